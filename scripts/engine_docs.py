"""Write what generation engines can do, from the table in `hybridflow.config.engine_features`, between the
markers of docs/rollout/engines.md; with --check only say whether the page is fresh.

    python scripts/engine_docs.py [--check]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from hybridflow.config.engine_features import ENGINES, FEATURES, TABLE, Cell

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "rollout" / "engines.md"


def main(arguments: list[str]) -> int:
    """Exit status 0, or 1 where --check finds the page stale."""
    old = PAGE.read_text(encoding="utf-8")
    new = render()
    if "--check" in arguments:
        if old != new:
            sys.stderr.write("docs/rollout/engines.md is not fresh: run python scripts/engine_docs.py\n")
        return int(old != new)
    PAGE.write_text(new, encoding="utf-8")
    return 0


def render() -> str:
    """The page as it should be."""
    text, number = re.subn(
        r"(<!-- table -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{table()}{found[2]}",
        PAGE.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    if number != 1:
        raise ValueError(f"{PAGE}: wanted one <!-- table --> … <!-- end -->, found {number}")
    return text


def table() -> str:
    """Engines × features, and below them the notes that the numbers stand for."""
    notes: list[str] = []
    lines = ["| | " + " | ".join(ENGINES) + " |", "|---" * (len(ENGINES) + 1) + "|"]
    lines += [
        f"| {meaning} | " + " | ".join(_cell(TABLE[name][feature], notes) for name in ENGINES) + " |"
        for feature, meaning in FEATURES.items()
    ]
    numbered = "\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1))
    return (
        f"\n{chr(10).join(lines)}\n\nNotes:\n\n{numbered}\n\nEvery “yes” is shown by a test, which "
        "`tests/conformance/shown_by.py` names.\n\n"
    )


def _cell(cell: Cell, notes: list[str]) -> str:
    word = "yes" if cell.has else "no"
    if cell.unshown:
        word = "not shown"
    if not cell.note:
        return word
    if cell.note not in notes:
        notes.append(cell.note)
    return f"{word} ({notes.index(cell.note) + 1})"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
