"""Reads a run folder incrementally for the page.

metrics.jsonl, timeline.jsonl, rollouts.jsonl, samples/, validation/, log.txt, … ──poll──► RunFollower
cursor of the page ──changes──► what came later, with the next cursor; (kind, step, index) ──► a trajectory

Only files are read, so a run does not notice who looks at it. Each file may be missing, half-written or
replaced.
"""

from __future__ import annotations

import copy
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from hybridflow.observability.advice import History, find_advice
from hybridflow.observability.glossary import MetricEntry, find
from hybridflow.observability.report.files import Fingerprint, Folder, Lines, fingerprint, read_yaml
from hybridflow.observability.report.rows import detail, digests, finite, number, take_pictures
from hybridflow.observability.run_log import LOG_FILE


class Findings:
    """Follows the rules through a run whose newest step may still get further metrics."""

    def __init__(self) -> None:
        self._history = History()
        self._found: dict[str, dict[str, Any]] = {}
        self._done: dict[int, int] = {}
        """Numbers of metrics of the steps that the rules have seen for good."""

    def are_stale(self, metrics: Mapping[int, Mapping[str, float]]) -> bool:
        """Return whether a step before the newest one has got metrics since, as by a validation that comes
        late.
        """
        newest = max(self._done, default=-math.inf)
        return {step: len(values) for step, values in metrics.items() if step <= newest} != self._done

    def of(self, metrics: Mapping[int, Mapping[str, float]]) -> list[dict[str, Any]]:
        """Return the findings of the rules in all steps, present ones first.

        An entry has `rule`, `message`, `keys`, `hint`, `first`, `last`, `steps` (their number) and `now`. The
        steps before the newest one are those of the last call (`are_stale`).
        """
        steps = [step for step in sorted(metrics) if step not in self._done]
        if not steps:
            return []
        for step in steps[:-1]:
            _look(self._history, self._found, metrics[step], step)
            self._done[step] = len(metrics[step])
        found = copy.deepcopy(self._found)
        _look(copy.deepcopy(self._history), found, metrics[steps[-1]], steps[-1])
        entries = [{**entry, "now": entry["last"] == steps[-1]} for entry in found.values()]
        return sorted(entries, key=lambda entry: (not entry["now"], entry["hint"], -entry["last"]))


def _look(
    history: History, found: dict[str, dict[str, Any]], metrics: Mapping[str, float], step: int
) -> None:
    history.add({name: value for name, value in metrics.items() if isinstance(value, (int, float))}, step)
    alarms, hints = find_advice(history)
    for advice in alarms + hints:
        entry = found.setdefault(advice.rule, {"rule": advice.rule, "first": step, "steps": 0})
        entry["message"] = advice.message
        entry["keys"] = list(advice.keys)
        entry["hint"] = bool(hints)
        entry["last"] = step
        entry["steps"] += 1


MAX_POINTS = 3000  # steps of a curve
MAX_ROLLOUTS = 50_000  # rows of the table, the newest ones
MAX_LOG = 32_768  # bytes of the log, its end
MAX_SECONDS = 2**53  # what the page's numbers hold exactly

SAMPLES = "samples"
ALL_ROLLOUTS = "rollout_data"
WAITS_FILE = "waits.json"
"""File of the run folder with the largest waits of its steps, which the run writes when it ends."""
KINDS = {SAMPLES: "rollout", "validation": "validation"}
"""What the samples in a folder of the run are."""

COUNTED = {"failed trajectories": "training/num_failed/", "trajectories tried again": "agent/num_retried/"}
"""Prefixes of metrics that count by cause, by the names of their sums over the run."""


class RunFollower:
    """Reads a run folder whenever it is polled. A folder that is not there yet is an empty one."""

    def __init__(self, run: str | Path) -> None:
        self.run = Path(run)
        self.metrics = Lines(self.run / "metrics.jsonl")
        self.timeline = Lines(self.run / "timeline.jsonl")
        self.recorded = Lines(self.run / "rollouts.jsonl")
        self.folders = {kind: Folder(self.run / kind) for kind in KINDS}
        self._small: dict[str, tuple[Fingerprint | None, dict[str, Any] | None, str]] = {}
        self._number = 0
        self._epoch = os.urandom(4).hex()
        self._findings = Findings()
        self._advice: list[dict[str, Any]] = []
        self._newest = 0
        """Number of the poll that saw a change last."""

    def poll(self) -> None:
        """Read what has changed since the last time."""
        self._number += 1
        small = [self._read_small(name, parse) for name, parse in _SMALL.items()]
        config = self._small["config.yaml"][1] or {}
        if isinstance(folder := _trainer(config).get("rollout_data_dir"), str):
            path = Path(folder).expanduser()
            if ALL_ROLLOUTS not in self.folders or self.folders[ALL_ROLLOUTS].path != path:
                self.folders[ALL_ROLLOUTS] = Folder(path)
        sources: list[Lines | Folder] = [self.metrics, self.timeline, self.recorded, *self.folders.values()]
        gone = sum(source.poll(self._number) for source in sources) > 0  # all are polled
        self._forget_old_rollouts()
        if gone:
            self._epoch = os.urandom(4).hex()  # the page starts again
        if gone or self._findings.are_stale(self.metrics.by_step):
            self._findings = Findings()
        if gone or self.metrics.newest == self._number:
            self._advice = self._findings.of(self.metrics.by_step)
        if gone or any(small) or max(source.newest for source in sources) == self._number:
            self._newest = self._number

    def changes(self, cursor: str = "") -> dict[str, Any]:
        """Return the changes since the page's cursor, as JSON data.

        `reset` says that what the page has is not to be kept. Where nothing is new there is nothing but
        `cursor`, `reset`, `now` and `written`, in seconds since the epoch.
        """
        epoch, _, seen = cursor.partition(".")
        reset = epoch != self._epoch
        after = int(seen) if seen.isdecimal() and not reset else 0
        written = fingerprint(self.metrics.path)
        answer = {
            "cursor": f"{self._epoch}.{self._number}",
            "reset": reset,
            "now": time.time(),
            "written": None if written is None else written[2] / 1e9,
        }
        if not reset and self._newest <= after:
            return answer
        notes: list[str] = []
        steps = _thinned(self.metrics, after, notes)
        names = sorted({name for step in steps for name in self.metrics.by_step[step]})
        return {
            **answer,
            **self._head(notes),
            "steps": steps,
            "metrics": {
                name: [number(self.metrics.by_step[step].get(name)) for step in steps] for name in names
            },
            "about": {name: _about(entry) for name in names if (entry := find(name))},
            "timeline": [
                {"step": step, "spans": _spans(self.timeline.by_step[step])}
                for step, changed in sorted(self.timeline.changed.items())
                if changed > after
            ],
            "rollouts": list(reversed(list(self._rollouts(after, notes)))),
            "notes": notes,
        }

    def trajectory(self, kind: str, step: int, index: int) -> dict[str, Any]:
        """Return all `rows` of the trajectory that row number `index` of a step belongs to, if it is there,
        and their `pictures` by digest.
        """
        rows = []
        if kind in self.folders:
            rows = [row for row in self.folders[kind].rows(step) if row is not None]
        pictures = take_pictures(rows)
        own = rows[index : index + 1]
        if own and own[0].get("trajectory_id") is not None:
            own = [row for row in rows if row.get("trajectory_id") == own[0]["trajectory_id"]]
        wanted = digests(own)
        return {
            "rows": [detail(row) for row in own],
            "pictures": {digest: url for digest, url in pictures.items() if digest in wanted},
        }

    def _head(self, notes: list[str]) -> dict[str, Any]:
        """Return the facts of the run that are small; `notes` gets what is missing."""
        config = self._object("config.yaml", notes) or {}
        names = [_trainer(config).get(key) for key in ("project_name", "experiment_name")]
        if self._small["config.yaml"][0] is None:
            notes.append("No config.yaml in the run folder.")
        if not self.metrics.by_step:
            notes.append("No metrics.jsonl with a step in it, so there are no curves.")
        for kind, name in KINDS.items():
            files = self.folders[kind].files
            if not files:
                notes.append(f"No {kind}/*.jsonl in the run folder, so there are no {name} samples to read.")
            if bad := sum(file.bad for file in files.values()):
                notes.append(f"{kind}: {bad} lines could not be read.")
        for lines in (self.metrics, self.timeline, self.recorded):
            if lines.bad:
                notes.append(f"{lines.path.name}: {lines.bad} lines could not be read.")
        advice = [
            {**entry, "keys": [{"key": key, "value": _value(config, key)} for key in entry["keys"]]}
            for entry in self._advice
        ]
        return {
            "title": " / ".join(str(name) for name in names if name) or self.run.resolve().name,
            "summary": self._object("summary.json", notes),
            "machine": self._object("machine.json", notes),
            "waits": self._object(WAITS_FILE, notes),
            "config": yaml.safe_dump(config, sort_keys=False, allow_unicode=True) if config else "",
            "counts": {title: _sums(self.metrics.by_step, prefix) for title, prefix in COUNTED.items()},
            "failures": self._object("failures.json", notes) or {},
            "failure": self._object("failure.json", notes),
            "log": (self._object(LOG_FILE, notes) or {}).get("end", ""),
            "advice": advice,
        }

    def _rollouts(self, after: int, notes: list[str]) -> Iterator[dict[str, Any]]:
        """Yield the rows of files that changed after a poll, newest steps first, at most MAX_ROLLOUTS."""
        parts = [
            ("recorded", step, _num_rows(line), self.recorded.changed[step], line)
            for step, line in self.recorded.by_step.items()
        ]
        for kind, folder in self.folders.items():
            parts += [
                (kind, step, file.total, file.changed, file.columns) for step, file in folder.files.items()
            ]
        left = MAX_ROLLOUTS
        for kind, step, total, changed, columns in sorted(parts, key=lambda part: -part[1]):
            left -= total
            if left < 0:
                notes.append(f"The table has the newest rollouts, from step {step + 1} on.")
                break
            if changed > after:
                yield {"kind": kind, "step": step, "total": total, "columns": finite(columns)}

    def _forget_old_rollouts(self) -> None:
        """Keep no rows that the table will never have: newer ones are far more than it takes."""
        left = 2 * MAX_ROLLOUTS
        for step in sorted(self.recorded.by_step, reverse=True):
            left -= _num_rows(self.recorded.by_step[step])
            if left < 0:
                self.recorded.by_step[step] = {}
        for folder in self.folders.values():
            left = 2 * MAX_ROLLOUTS
            for step in sorted(folder.files, reverse=True):
                left -= folder.files[step].total
                if left < 0 and folder.files[step].columns:
                    folder.files[step] = replace(folder.files[step], columns={})

    def _read_small(self, name: str, parse: Callable[[Path], Any]) -> bool:
        """Read a file with one object if it has changed; return whether it has."""
        path = self.run / name
        seen = fingerprint(path)
        if name in self._small and self._small[name][0] == seen:
            return False
        loaded = None
        complaint = ""
        if seen is not None:
            try:
                loaded = finite(parse(path))
            except (OSError, ValueError, RecursionError) as error:
                complaint = f"{name} could not be read: {error}"
        if not isinstance(loaded, dict):
            loaded = None
        self._small[name] = (seen, loaded, complaint)
        return True

    def _object(self, name: str, notes: list[str]) -> dict[str, Any] | None:
        _, loaded, complaint = self._small[name]
        if complaint:
            notes.append(complaint)
        return loaded


def _trainer(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of the trainer in the run's configuration."""
    trainer = config.get("trainer")
    return trainer if isinstance(trainer, Mapping) else {}


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _end_of_log(path: Path) -> dict[str, str]:
    """Return the last lines of a log, whole ones."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MAX_LOG))
        text = file.read().decode("utf-8", errors="replace")
    if size > MAX_LOG:
        text = text.partition("\n")[2]
    return {"end": text}


_SMALL: dict[str, Callable[[Path], Any]] = {
    "config.yaml": read_yaml,
    "summary.json": _json,
    "machine.json": _json,
    WAITS_FILE: _json,
    "failures.json": _json,
    "failure.json": _json,
    LOG_FILE: _end_of_log,
}


def _about(entry: MetricEntry) -> dict[str, str]:
    """Return the glossary's facts of a metric; a number without a unit has the unit ""."""
    unit = "" if entry.unit == "1" else entry.unit
    return {"meaning": entry.meaning, "unit": unit, "better": entry.better}


def _sums(metrics: Mapping[int, Mapping[str, float]], prefix: str) -> dict[str, float]:
    """Return the sums over all steps of the metrics with a prefix, by the rest of their names."""
    sums: dict[str, float] = {}
    for values in metrics.values():
        for name, value in values.items():
            if name.startswith(prefix) and isinstance(value, (int, float)):
                cause = name.removeprefix(prefix)
                sums[cause] = sums.get(cause, 0.0) + value
    summed: dict[str, float] = finite(sums)
    return summed


def _value(config: Mapping[str, Any], key: str) -> str | None:
    """Return the value of a key in the run's configuration as text, or None where it has none."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return json.dumps(value, ensure_ascii=False, default=str)  # YAML has dates, and JSON has none


def _thinned(metrics: Lines, after: int, notes: list[str]) -> list[int]:
    """Return the steps that changed after a poll: all, or evenly chosen ones and those of validations."""
    steps = sorted(step for step, changed in metrics.changed.items() if changed > after)
    if len(steps) <= MAX_POINTS:
        return steps
    stride = math.ceil(len(steps) / MAX_POINTS)
    kept = [
        step
        for index, step in enumerate(steps)
        if index % stride == 0
        or step == steps[-1]
        or any(name.startswith("val") for name in metrics.by_step[step])
    ]
    notes.append(
        f"The curves show {len(kept)} of {len(steps)} steps: one in {stride}, those with a validation, and "
        "the last."
    )
    return kept


def _num_rows(line: Mapping[str, Any]) -> int:
    return max((len(values) for values in line.values() if isinstance(values, list)), default=0)


def _spans(line: Mapping[str, Any]) -> list[list[Any]]:
    """Return the spans of a step that are whole: [lane, name, start, end], in seconds since the epoch."""
    whole = []
    spans = line.get("spans")
    for span in spans if isinstance(spans, list) else ():
        match span:
            case [str(), str(), int() | float() as start, int() | float() as end]:
                if 0 <= start < MAX_SECONDS and 0 <= end < MAX_SECONDS:
                    whole.append(span)
    return whole
