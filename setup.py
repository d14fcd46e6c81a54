"""What pyproject.toml cannot say: the README as a package index shows it.

A link to another file of the repository would be dead there, so only its text is kept.
"""

import re
from pathlib import Path

from setuptools import setup

RELATIVE_LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#)[^)]*\)")

readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
setup(
    long_description=RELATIVE_LINK.sub(r"\1", readme),
    long_description_content_type="text/markdown",
)
