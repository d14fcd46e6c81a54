"""The page as one HTML file: its parts and the data of one run, or of two, in one string.

    run folder ──collect──► JSON data ──render──► report.html

What is missing is left out, with a note on the page. The page's own source stands in `assets/`; the data is
embedded as JSON.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError, DataError
from hybridflow.observability.report.follow import KINDS, RunFollower
from hybridflow.observability.report.rows import detail, digests, take_pictures

MAX_SAMPLE_STEPS = 20  # steps whose rows are embedded whole
MAX_ROWS = 64  # a step
MAX_PICTURES = 4 * 2**20  # characters of all pictures of the page

SCRIPTS = (
    "charts.js",
    "store.js",
    "overview.js",
    "table.js",
    "rollouts.js",
    "trajectory.js",
    "timeline.js",
    "compare.js",
    "page.js",
)


def write_report(
    run_dir: str | Path, out: str | Path | None = None, against: str | Path | None = None
) -> Path:
    """Write the report of a run to `out` (default: `report.html` in its folder) and return its path.

    `against` is the folder of a run to compare it with. Raises DataError where a folder does not exist or
    holds nothing of a run, ConfigError where `out` cannot be written.
    """
    data = _whole(Path(run_dir))
    if against is not None:
        data["other"] = _whole(Path(against))
    target = Path(out or Path(run_dir) / "report.html")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(render(data)[0], encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the report cannot be written ({error}): give another file") from error
    return target


def _whole(run: Path) -> dict[str, Any]:
    """Return the data of a run that is there."""
    if not run.is_dir():
        raise DataError(f"{run} is no folder: give the run folder (trainer.default_local_dir) of a run")
    data = collect(run)
    ended = data["summary"] is not None or data["failure"] is not None
    if not (ended or any(data[part] for part in ("steps", "rollouts", "config", "log"))):
        raise DataError(
            f"{run} holds no metrics.jsonl, samples/, validation/, summary.json, failure.json, config.yaml "
            "or log.txt: is it the folder of a run?"
        )
    return data


def collect(run: Path) -> dict[str, Any]:
    """Return everything that the page shows, as JSON data; its `notes` say what is missing or cut.

    `details` has whole rows of evenly chosen steps, by "kind/step", and `pictures` their pictures by digest.
    """
    follower = RunFollower(run)
    follower.poll()
    data = follower.changes()
    details = {}
    for kind in KINDS:
        folder = follower.folders[kind]
        steps = evenly(sorted(folder.files), MAX_SAMPLE_STEPS)
        for step in steps:
            rows = [row for row in folder.rows(step) if row is not None]
            details[f"{kind}/{step}"] = [detail(row) for row in rows[:MAX_ROWS]]
        if len(steps) < len(folder.files):
            data["notes"].append(
                f"{kind}: of {len(folder.files)} steps {len(steps)} have their texts whole, evenly chosen; "
                "`hybridflow view --live` shows all."
            )
        if any(file.total > MAX_ROWS for file in folder.files.values()):
            data["notes"].append(
                f"{kind}: the first {MAX_ROWS} rows of a step have their texts whole; "
                "`hybridflow view --live` shows all."
            )
    embedded = [row for rows in details.values() for row in rows]
    pictures = take_pictures(embedded, MAX_PICTURES)
    if missing := digests(embedded) - pictures.keys():
        data["notes"].append(
            f"Pictures of samples that are named and not shown, as they did not fit: {len(missing)}."
        )
    return {**data, "details": details, "pictures": pictures}


def render(data: Mapping[str, Any], *, live: bool = False) -> tuple[str, str]:
    """Return the page, and the content security policy that it is held to: its own script and style, and
    where it is `live` requests to the server that it comes from.
    """
    files = resources.files("hybridflow.observability.report").joinpath("assets")
    script = "\n".join(files.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)
    style = files.joinpath("page.css").read_text(encoding="utf-8")
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:"
    if live:
        policy += "; connect-src 'self'"
    parts = {"SCRIPT": script, "CSS": style, "POLICY": policy, "DATA": embed_json(data)}
    template = files.joinpath("page.html").read_text(encoding="utf-8")
    # one pass over the template, so that a placeholder's name inside the data stays data
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template), policy


def _hash(text: str) -> str:
    """Return the source expression by which a policy allows this text between its tags."""
    digest = hashlib.sha256(f"\n{text}\n".encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def embed_json(data: Any) -> str:
    """Return JSON for a <script> element, without `<`, `>` and `&`, which could end it."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # half of a surrogate pair cannot be written as UTF-8; as an escape it can
    return re.sub(r"[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """Return at most `count` items at even distances, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]
