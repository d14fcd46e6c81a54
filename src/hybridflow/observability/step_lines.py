"""A JSONL file of a run with a line for each step, which readers follow while it grows."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class StepLines:
    """Appends lines to a file that appears with the first one; what is written of a step last holds.

    Lines of steps after `keep_to` are of a run that is replaced, and are dropped.
    """

    def __init__(self, path: Path, keep_to: int) -> None:
        self.path = path
        if not path.exists():
            return
        kept = [line for line in path.read_bytes().splitlines(keepends=True) if _step(line) <= keep_to]
        partial = path.with_suffix(".jsonl.partial")
        partial.write_bytes(b"".join(kept))
        os.replace(partial, path)

    def write(self, step: int, line: Mapping[str, Any]) -> None:
        """Append the line of a step in one piece."""
        text = json.dumps({"step": step, **line}, ensure_ascii=False, separators=(",", ":"))
        with self.path.open("ab") as file:
            file.write(text.encode("utf-8", "backslashreplace") + b"\n")


def _step(line: bytes) -> float:
    """Return the step of a line; one that is torn is of no step that is kept."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
