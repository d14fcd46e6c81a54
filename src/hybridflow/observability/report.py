"""The report of a run: one HTML file with its curves and samples, which needs no server and no network.

    {run}/metrics.jsonl, failures.json, samples/*.jsonl, validation/*.jsonl, summary.json, config.yaml
    ──write_report──► report.html

What is missing is left out, with a note on the page. The page's own source stands beside this file
(report.html, report.css and four scripts); the data is embedded as JSON.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from hybridflow.errors import ConfigError, DataError
from hybridflow.observability.glossary import MetricEntry, find
from hybridflow.observability.trackers.jsonl import read_metrics

MAX_SAMPLE_STEPS = 20
MAX_ROWS = 64  # a step
MAX_TOKENS = 2048  # a response
MAX_TEXT = 20_000  # characters of a prompt, a response or a conversation
MAX_PICTURES = 4 * 2**20  # characters of all pictures of the page
MAX_POINTS = 3000  # steps of a curve

KINDS = {"samples": "rollout", "validation": "validation"}
"""What the samples in a folder of the run are."""

SCRIPTS = ("report_charts.js", "report_conversation.js", "report_samples.js", "report.js")
_PARTS = {"CSS": ("report.css",), "SCRIPT": SCRIPTS}

COUNTED = {"failed trajectories": "training/num_failed/", "trajectories tried again": "agent/num_retried/"}
"""Prefixes of metrics that count by cause, by the names of their sums over the run."""


def write_report(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run to `out` (default: `report.html` in its folder) and return its path.

    Raises DataError where the folder does not exist or holds nothing of a run, ConfigError where `out` cannot
    be written.
    """
    run = Path(run_dir)
    if not run.is_dir():
        raise DataError(f"{run} is no folder: give the run folder (trainer.default_local_dir) of a run")
    data = collect(run)
    if not data["steps"] and not any(data["samples"].values()) and data["summary"] is None:
        raise DataError(
            f"{run} holds no metrics.jsonl, samples/, validation/ or summary.json: is it the folder of a run?"
        )
    target = Path(out or run / "report.html")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(render(data), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the report cannot be written ({error}): give another file") from error
    return target


def collect(run: Path) -> dict[str, Any]:
    """Return everything that the page shows, as JSON data; its `notes` say what is missing or cut."""
    notes: list[str] = []
    metrics = read_metrics(run / "metrics.jsonl")
    if not metrics:
        notes.append("No metrics.jsonl with a step in it, so there are no curves.")
    steps = _thinned(metrics, notes)
    names = sorted({name for step in steps for name in metrics[step]})
    config = _config(run / "config.yaml", notes)
    names_of_run = _names_of_run(config)
    samples = {kind: _samples(run / kind, kind, notes) for kind in ("samples", "validation")}
    pictures = _pictures(samples, notes)
    return {
        "title": " / ".join(names_of_run) or run.resolve().name,
        "summary": _json(run / "summary.json", notes),
        "machine": _json(run / "machine.json", notes),
        "config": yaml.safe_dump(config, sort_keys=False, allow_unicode=True) if config else "",
        "steps": steps,
        "metrics": {name: [_number(metrics[step].get(name)) for step in steps] for name in names},
        "about": {name: _about(entry) for name in names if (entry := find(name))},
        "counts": {title: _sums(metrics, prefix) for title, prefix in COUNTED.items()},
        "failures": _json(run / "failures.json", notes) or {},
        "samples": samples,
        "pictures": pictures,
        "notes": notes,
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
            if name.startswith(prefix):
                cause = name.removeprefix(prefix)
                sums[cause] = sums.get(cause, 0.0) + value
    return sums


def _names_of_run(config: Mapping[str, Any]) -> list[str]:
    trainer = config.get("trainer")
    if not isinstance(trainer, Mapping):
        return []
    return [str(trainer[key]) for key in ("project_name", "experiment_name") if trainer.get(key)]


def render(data: Mapping[str, Any]) -> str:
    """Return the page: template, style, scripts and data in one string."""
    files = resources.files("hybridflow.observability")
    parts = {
        key: "\n".join(files.joinpath(name).read_text(encoding="utf-8") for name in names)
        for key, names in _PARTS.items()
    }
    parts["DATA"] = embed_json(data)
    template = files.joinpath("report.html").read_text(encoding="utf-8")
    # one pass over the template, so that a placeholder's name inside the data stays data
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def embed_json(data: Any) -> str:
    """Return JSON for a <script> element, without `<`, `>` and `&`, which could end it."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # half of a surrogate pair cannot be written as UTF-8; as an escape it can
    return re.sub(r"[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)


def _thinned(metrics: Mapping[int, Mapping[str, float]], notes: list[str]) -> list[int]:
    """Return the steps whose metrics are shown: all, or evenly chosen ones and those of validations."""
    steps = sorted(metrics)
    if len(steps) <= MAX_POINTS:
        return steps
    stride = math.ceil(len(steps) / MAX_POINTS)
    kept = [
        step
        for index, step in enumerate(steps)
        if index % stride == 0 or step == steps[-1] or any(n.startswith("val") for n in metrics[step])
    ]
    notes.append(
        f"The curves show {len(kept)} of {len(steps)} steps: one in {stride}, those with a validation, and "
        "the last."
    )
    return kept


def _number(value: Any) -> float | str | None:
    """Return a number with six digits, the name of one that is not finite, or None for what is none."""
    if not isinstance(value, (int, float)):
        return None
    if not math.isfinite(value):
        return str(float(value)).replace("nan", "NaN").replace("inf", "Infinity")
    return float(f"{value:.6g}")


def _read(path: Path, parse: Callable[[str], Any], notes: list[str]) -> dict[str, Any] | None:
    """Return the object in a file, or None where it cannot be read, with a note."""
    try:
        loaded = parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        notes.append(f"{path.name} could not be read: {error}")
        return None
    if not isinstance(loaded, dict):
        return None
    return loaded


def _json(path: Path, notes: list[str]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    return _finite(_read(path, json.loads, notes))  # type: ignore[no-any-return]


def _config(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.exists():
        notes.append("No config.yaml in the run folder.")
        return {}
    return _read(path, yaml.safe_load, notes) or {}


def _samples(folder: Path, kind: str, notes: list[str]) -> list[dict[str, Any]]:
    """Return [{step, total, rows}] of evenly chosen steps, in order of step."""
    files = sorted((int(file.stem), file) for file in folder.glob("*.jsonl") if file.stem.isdigit())
    if not files:
        notes.append(f"No {kind}/*.jsonl in the run folder, so there are no {KINDS[kind]} samples to read.")
        return []
    chosen = evenly(files, MAX_SAMPLE_STEPS)
    shown = []
    num_bad = 0
    for step, file in chosen:
        lines = [
            line for line in file.read_text(encoding="utf-8", errors="replace").split("\n") if line.strip()
        ]
        rows = []
        for line in lines[:MAX_ROWS]:
            try:
                rows.append(_row(json.loads(line)))
            except (ValueError, AttributeError, TypeError):
                num_bad += 1
        shown.append({"step": step, "total": len(lines), "rows": rows})
    if len(chosen) < len(files):
        notes.append(f"{kind}: {len(chosen)} of {len(files)} steps are embedded, evenly chosen.")
    if any(item["total"] > MAX_ROWS for item in shown):
        notes.append(
            f"{kind}: the first {MAX_ROWS} rows of a step are embedded; the rest stands in the JSONL files."
        )
    if num_bad:
        notes.append(f"{kind}: {num_bad} lines could not be read.")
    return shown


def _pictures(samples: Mapping[str, list[dict[str, Any]]], notes: list[str]) -> dict[str, str]:
    """Take the pictures out of all rows: return each once, by its digest, as far as MAX_PICTURES reaches."""
    pictures: dict[str, str] = {}
    left = MAX_PICTURES
    media = [
        medium
        for steps in samples.values()
        for step in steps
        for row in step["rows"]
        for medium in row.get("media", ())
    ]
    for medium in media:
        picture = medium.pop("picture", None)
        if picture and medium["digest"] not in pictures and len(picture) <= left:
            pictures[medium["digest"]] = picture
            left -= len(picture)
    missing = {medium["digest"] for medium in media} - pictures.keys()
    if missing:
        notes.append(
            f"Pictures of samples that are named and not shown, as they did not fit: {len(missing)}."
        )
    return pictures


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """Return at most `count` items at even distances, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample row as the page takes it: cut to size, and without numbers that JSON cannot hold."""
    kept: dict[str, Any] = {}
    for name, value in row.items():
        if name == "tokens" and isinstance(value, Mapping):
            kept["tokens"] = {
                field: [_finite(item) for item in values[:MAX_TOKENS]] for field, values in value.items()
            }
            kept["tokens_cut"] = max(
                0, max((len(values) for values in value.values()), default=0) - MAX_TOKENS
            )
        elif name == "messages" and isinstance(value, list):
            kept["messages"] = _messages(value)
        elif isinstance(value, str) and len(value) > MAX_TEXT:
            kept[name] = value[:MAX_TEXT] + f"… (cut; {len(value)} characters in all)"
        else:
            kept[name] = _finite(value)
    return kept


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation as far as MAX_TEXT characters reach: role, name, content and calls as text."""
    kept: list[dict[str, Any]] = []
    left = MAX_TEXT
    for number, message in enumerate(messages):
        if left <= 0:
            kept.append({"role": "…", "content": f"{len(messages) - number} more messages", "calls": []})
            break
        calls = [call.get("function", call) for call in message.get("tool_calls") or []]
        texts = [f"{call.get('name')}({_text(call.get('arguments'))})" for call in calls]
        content = _text(message.get("content"))
        role = " ".join(str(message[key]) for key in ("role", "name") if message.get(key))
        kept.append({"role": role, "content": content[:left], "calls": [text[:left] for text in texts]})
        left -= len(content) + sum(map(len, texts))
    return kept


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _finite(value: Any) -> Any:
    """Return the same JSON value with NaN and infinities as their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return _number(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
