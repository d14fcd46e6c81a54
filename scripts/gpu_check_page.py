"""The one file of the GPU check: Markdown that a person reads, and the same as JSON at its end.

facts, outcomes ──page_of()──► text ──write()──► gpu_check_DATE_DEVICE.md ──read()──► facts, outcomes

Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_check_stages import Outcome

JSON_HEAD = "## The same as JSON"
ABOUT = (
    "Written by scripts/gpu_check.sh of hybridflow. It holds versions, names of devices, times and the last\n"
    "lines that each stage printed. The home folder and the folder of the clone are written as `~` and\n"
    "`CLONE`. Look through it before you send it."
)


def name_of(date: str, device: str) -> str:
    """Return the name of the file."""
    return f"gpu_check_{date}_{re.sub(r'[^A-Za-z0-9]+', '-', device).strip('-')}.md"


def page_of(facts: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    """Return the whole text."""
    lines = [f"# GPU check: {facts['device']}, {facts['date']}", "", ABOUT, "", *_head(facts)]
    lines += ["", "| stage | status | seconds | of at most | why |", "|---|---|---|---|---|"]
    for each in outcomes:
        cells = [each.stage, each.status, f"{each.seconds:.0f}", f"{each.limit_s:.0f}", _cell(each.reason)]
        lines.append(f"| {' | '.join(cells)} |")
    for each in outcomes:
        lines += ["", *_section(each)]
    whole = {"facts": facts, "stages": [asdict(each) for each in outcomes]}
    lines += ["", JSON_HEAD, "", "```json", json.dumps(whole, indent=1, ensure_ascii=False), "```", ""]
    return "\n".join(lines)


def _head(facts: Mapping[str, Any]) -> list[str]:
    """Return the facts that are one line each, and what is missing."""
    rows = [f"- {name}: {value}" for name, value in facts.items() if isinstance(value, str)]
    missing = [f"- **missing**: {told}" for told in facts.get("missing", [])]
    return rows + missing


def _section(outcome: Outcome) -> list[str]:
    """Return what is told of one stage: its tests, and the end of its output."""
    lines = [f"## {outcome.stage}: {outcome.status}", "", f"{outcome.meaning}."]
    tests = outcome.results.get("tests")
    if isinstance(tests, dict):
        lines += ["", f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped."]
        lines += [f"- `{name}`: {said}" for name, said in tests["failures"].items()]
    if outcome.output:
        fence = _fence("\n".join(outcome.output))
        lines += ["", fence, *outcome.output, fence]
    return lines


def _fence(text: str) -> str:
    """Return a fence that is longer than any in the text."""
    longest = max((len(found) for found in re.findall(r"`+", text)), default=0)
    return "`" * max(3, longest + 1)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")


def anonymous(text: str, root: Path) -> str:
    """Return the text without the places of this machine."""
    home = os.path.expanduser("~")
    text = text.replace(str(root), "CLONE")
    return text.replace(home, "~") if len(home) > 1 else text


def write(path: Path, facts: Mapping[str, Any], outcomes: Sequence[Outcome], root: Path) -> None:
    """Write the file whole: whoever ends the check in the middle of it leaves the one before."""
    part = path.with_suffix(".part")
    part.write_text(anonymous(page_of(facts, outcomes), root), encoding="utf-8")
    part.replace(path)


def read(path: Path) -> dict[str, Any]:
    """Return facts and stages of a file that was sent."""
    text = path.read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text.rpartition(f"{JSON_HEAD}\n\n```json\n")[2].rpartition("\n```")[0])
    return found
