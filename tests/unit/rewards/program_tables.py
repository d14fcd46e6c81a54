"""Programs with their test cases, read from tables: texts in `programs/`.

`## name` begins a program, `---` its test cases, and `####` a headline. A line `+name` stands for the part of
that name.
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).with_name("programs")


def programs_in(table: str) -> dict[str, tuple[str, str]]:
    """Return name -> (program, its test cases), of `programs/TABLE.txt`."""
    sections = re.split(r"^## ", (FOLDER / f"{table}.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)[
        1:
    ]
    parts: dict[str, str] = {}
    found: dict[str, tuple[str, str]] = {}
    for section in sections:
        name, _, body = section.partition("\n")
        body = re.sub(r"^#### .*", "", body, flags=re.MULTILINE)
        if name.startswith("+"):
            parts[name] = body
            continue
        program, _, cases = body.partition("\n---\n")
        lines = [parts.get(line, line) for line in program.splitlines()]
        assert name not in found and cases, name
        found[name] = ("\n".join(lines), cases.strip())
    return found
