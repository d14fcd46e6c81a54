"""The texts of the programs: the files of this folder, joined so that they need nothing of this package."""

from __future__ import annotations

import functools
from importlib import resources


@functools.cache
def text_of(*names: str) -> str:
    """Return a program of some files of this folder, which runs the `main` of the last one."""
    lines = ["from __future__ import annotations"]
    for name in names:
        text = resources.files(__package__).joinpath(f"{name}.py").read_text(encoding="utf-8")
        own = ("from hybridflow.", "from __future__")
        lines += [line for line in text.splitlines() if not line.startswith(own)]
    return "\n".join([*lines, "main()", ""])


BATCH = ("encoding", "loading", "batch")
SOLUTION = ("encoding", "loading", "solution")
TESTS = ("decoding", "tests")


@functools.cache
def together() -> str:
    """Return the program that is the solution's process and the tests' at once (`together.py`)."""
    texts = {"solution": text_of(*SOLUTION), "tests": text_of(*TESTS)}
    return text_of("together").replace("texts: dict[str, str] = {}", f"texts = {texts!r}")
