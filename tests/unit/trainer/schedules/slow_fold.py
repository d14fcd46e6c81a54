"""What a ledger amounts to, the slow way: each number is counted anew from all lines."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from hybridflow.trainer.schedules.ledger_state import GroupPhase, LedgerState

Line = dict[str, Any]

PHASE_AFTER = {
    "admitted": GroupPhase.GENERATING,
    "restarted": GroupPhase.GENERATING,
    "finished": GroupPhase.FINISHED,
    "scored": GroupPhase.SCORED,
    "taken": GroupPhase.TAKEN,
    "failed": GroupPhase.FAILED,
    "filtered": GroupPhase.FILTERED,
}


def surviving(path: Path) -> list[Line]:
    """The lines that no rewind has undone: the history after each line is kept whole."""
    histories: list[list[Line]] = [[]]
    for text in path.read_text().splitlines():
        line = json.loads(text)
        if line["kind"] == "rewound":
            histories.append(histories[line["position"]])
        else:
            histories.append([*histories[-1], line])
    return histories[-1]


def indices(line: Line) -> range:
    """The groups of a line."""
    return range(line["first"], line["first"] + line.get("count", 1))


def slow_fold(lines: list[Line]) -> dict[str, Any]:
    """The numbers of a `LedgerState`, by name."""
    published = [line["version"] for line in lines if line["kind"] == "published"]
    version = max(published, default=0)
    phases: dict[int, GroupPhase] = {}
    versions: dict[int, int] = {}
    steps: dict[int, int] = {}
    scored: list[int] = []
    groups: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for line in lines:
        if line["kind"] == "published":
            continue
        for index in indices(line):
            groups[line["kind"]] += 1
            phases[index] = PHASE_AFTER.get(line["kind"], phases.get(index, GroupPhase.FAILED))
            if line["kind"] in ("admitted", "restarted"):
                versions[index] = line["version"]
            if line["kind"] == "taken":
                steps[index] = line["step"]
            if line["kind"] == "scored":
                scored = [each for each in scored if each != index] + [index]
        tokens[line["kind"]] += line.get("tokens", 0)
    for index, step in steps.items():
        if step < version:
            phases[index] = GroupPhase.TRAINED
    order = [i for line in lines if line["kind"] == "taken" for i in indices(line)]
    open_phases = (GroupPhase.GENERATING, GroupPhase.FINISHED, GroupPhase.SCORED)
    return {
        "version": version,
        "phases": phases,
        "active": {i: versions[i] for i, phase in phases.items() if phase in open_phases},
        "ready": [index for index in scored if phases[index] == GroupPhase.SCORED],
        "batches": {
            step: [index for index in order if steps[index] == step]
            for step in set(steps.values())
            if step >= version
        },
        "trained_per_step": [list(steps.values()).count(step) for step in range(version)],
        "groups": +groups,
        "tokens": +tokens,
        "causes": +Counter(
            line["cause"] for line in lines if line["kind"] == "failed" for _ in indices(line)
        ),
        "staleness": +Counter(steps[index] - versions[index] for index in steps),
    }


def as_folded(state: LedgerState) -> dict[str, Any]:
    """The same numbers from the state itself."""
    return {
        "version": state.version,
        "phases": {index: state.phase(index) for index in range(state.num_admitted)},
        "active": dict(state.active),
        "ready": list(state.ready),
        "batches": {step: list(batch) for step, batch in state.batches.items()},
        "trained_per_step": list(state.trained_per_step),
        "groups": +state.groups,
        "tokens": +state.tokens,
        "causes": +state.causes,
        "staleness": +state.staleness,
    }
