"""Which properties the numbers of three trainers have: a table of what `hybridflow invariants` says of each.

    python benchmarks/invariants.py          (a minute; verl is found where PYTHONPATH has its folder)

Each adapter runs in a process of its own. Writes `benchmarks/results/invariants.md`, with the faults that
were planted into formulas (`planted_faults.py`), each of which is found by its property.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from planted_faults import FAULTS, planted

from hybridflow.invariants.adapter import NAMED
from hybridflow.invariants.checking import try_all
from hybridflow.invariants.table import PROPERTIES

PAGE = Path(__file__).parent / "results" / "invariants.md"
MARKS = {"held": "yes", "failed": "no", "not offered": "–"}
MOST = 300
"""Characters of an input on the page."""

HEAD = """\
# Invariants: which properties the numbers of a trainer have

Written by `benchmarks/invariants.py`; `hybridflow invariants --adapter NAME` says the same with every input.
The [documentation](../../docs/invariants.md) says how a trainer is asked, and `src/hybridflow/invariants/`
what a property tries. A property is of the functions that an adapter calls, and no judgement of a trainer:
some behaviours below are documented choices, and some inputs do not come up in that trainer's own runs. A
dash: the trainer has no such function that can be called by itself.
"""
FAILED = """
## Inputs that failed

| adapter | property | input | got | wanted |
|---|---|---|---|---|"""
PLANTED = """
## Planted faults

Each property finds the fault that was planted for it into a trainer made of formulas, which has all
properties without it. The last column counts the properties that find the same fault.

| property | fault | found | by |
|---|---|---|---|"""


def told_by(adapter: str) -> dict[str, Any]:
    """Return what the command says of an adapter: its JSON, or `error` where it has no adapter."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "told.json"
        command = [
            sys.executable,
            "-m",
            "hybridflow",
            "invariants",
            "--adapter",
            adapter,
            "--json",
            str(file),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if not file.exists():
            return {"version": "", "error": done.stderr.strip().splitlines()[-1], "outcomes": []}
        told: dict[str, Any] = json.loads(file.read_text())
        return told


def cell(outcomes: list[dict[str, str]], name: str) -> str:
    """Return what came of a property, with the kinds where they differ."""
    own = [each for each in outcomes if each["property"] == name]
    statuses = {each["status"] for each in own} - {"not offered"}
    if len(statuses) < 2:
        return MARKS[statuses.pop() if statuses else "not offered"]
    parts = [
        f"{MARKS[status]}: {', '.join(each['kind'] for each in own if each['status'] == status)}"
        for status in ("held", "failed")
    ]
    return "; ".join(parts)


def counts(told: dict[str, Any]) -> str:
    """Return the figures of an adapter, or why there are none."""
    if "error" in told:
        return f"not run: {told['error']}"
    return f"{told['held']} held, {told['failed']} failed, {told['not offered']} not offered"


def plain(text: str) -> str:
    """Return a text for a cell of a table."""
    text = text if len(text) <= MOST else f"{text[:MOST]}…"
    return text.replace("|", "\\|").replace("\n", " ")


def page_of(told: dict[str, dict[str, Any]], note: str) -> str:
    """Return the page."""
    lines = [
        HEAD,
        *([note, ""] if note else []),
        "| adapter | version | properties |",
        "|---|---|---|",
        *(f"| {name} | {each['version']} | {plain(counts(each))} |" for name, each in told.items()),
        "",
        f"| property | what it says | source | {' | '.join(told)} |",
        f"|---|---|---|{'---|' * len(told)}",
    ]
    for each in PROPERTIES.values():
        cells = " | ".join(cell(one["outcomes"], each.name) for one in told.values())
        lines.append(f"| `{each.name}` | {plain(each.sentence)} | {each.source} | {cells} |")
    lines.append(FAILED)
    for name, each in told.items():
        for one in each["outcomes"]:
            if one["status"] == "failed":
                texts = " | ".join(plain(one[part]) for part in ("given", "got", "wanted"))
                lines.append(f"| {name} | `{one['property']}` {one['kind']} | {texts} |")
    lines.append(PLANTED)
    for name, (fault, _) in FAULTS.items():
        failed = {
            one.property for one in try_all(planted(name), PROPERTIES.values()) if one.status == "failed"
        }
        lines.append(f"| `{name}` | {fault} | {'yes' if name in failed else 'NO'} | {len(failed)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--note", default="", help="a sentence on how the packages were installed")
    note = words.parse_args().note
    PAGE.write_text(page_of({name: told_by(name) for name in NAMED}, note), encoding="utf-8")
    print(f"wrote {PAGE}")
