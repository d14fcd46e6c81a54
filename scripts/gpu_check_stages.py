"""Stages of the GPU check: a command each, with a time limit of its own, and what came of it.

Stage ──run()──► process group, its output in a log ──ends, or is ended at the limit──► Outcome

Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import xml.etree.ElementTree as xml
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PASSED = "passed"
FAILED = "failed"
LATE = "over its limit"
INTERRUPTED = "interrupted"
EMPTY = "nothing ran"
LEFT_OUT = "left out"
STATES = (PASSED, FAILED, LATE, INTERRUPTED, EMPTY, LEFT_OUT)
GRACE_S = 10.0
"""Seconds between the request to end and the kill."""
TOLD_EVERY_S = 20.0
"""Seconds between two lines about a stage that runs."""
TAIL_LINES = 40
FAILED_TAIL_LINES = 120
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")


@dataclass(frozen=True)
class Stage:
    """One command of the check."""

    name: str
    meaning: str
    """What it shows, for the reader of the file."""
    command: Sequence[str]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables beside those of this process."""
    reason: str = ""
    """Why the stage is left out; empty where it is run."""


@dataclass
class Outcome:
    """What came of a stage."""

    stage: str
    meaning: str
    status: str
    """One of STATES."""
    seconds: float = 0.0
    limit_s: float = 0.0
    exit_code: int | None = None
    reason: str = ""
    """Why it did not run, or ended before its end."""
    output: list[str] = field(default_factory=list)
    """The last lines of what it printed."""
    results: dict[str, Any] = field(default_factory=dict)
    """The JSON files that it wrote, by name, and counts of its tests."""


def left_out(stage: Stage, reason: str) -> Outcome:
    """Return the outcome of a stage that is not run."""
    return Outcome(stage.name, stage.meaning, LEFT_OUT, limit_s=stage.limit_s, reason=reason)


def run(stage: Stage, folder: Path, *, root: Path, left_s: float) -> Outcome:
    """Run a stage for at most its limit and at most `left_s` seconds.

    Its log is FOLDER/NAME.log, and what it writes into FOLDER/NAME are its results. Nothing that the stage
    does raises. Ctrl-C ends the stage, and is part of its outcome.
    """
    if stage.reason:
        return left_out(stage, stage.reason)
    if left_s <= 0:
        return left_out(stage, "the time of the whole check was over before it")
    limit = min(stage.limit_s, left_s)
    results = folder / stage.name
    results.mkdir(parents=True, exist_ok=True)
    log = folder / f"{stage.name}.log"
    outcome = Outcome(stage.name, stage.meaning, FAILED, limit_s=limit)
    print(f"{stage.name}: {stage.meaning} (at most {limit:.0f} s)", flush=True)
    began = time.monotonic()
    try:
        _follow(stage, outcome, log, root)
    except OSError as error:
        outcome.reason = f"its command could not be started: {error}"
    outcome.seconds = round(time.monotonic() - began, 1)
    outcome.results = results_of(results)
    tests = outcome.results.get("tests")
    if outcome.status == PASSED and tests is not None and tests["passed"] == 0:
        outcome.status = EMPTY
        outcome.reason = "every test was skipped"
    outcome.output = tail(log, TAIL_LINES if outcome.status == PASSED else FAILED_TAIL_LINES)
    print(f"{stage.name}: {outcome.status} after {outcome.seconds:.0f} s\n", flush=True)
    return outcome


def _follow(stage: Stage, outcome: Outcome, log: Path, root: Path) -> None:
    """Start the command, wait for its end or its limit, and leave no process of its group behind."""
    environment = {**os.environ, **stage.environment}
    with log.open("wb") as file:
        process = subprocess.Popen(
            list(stage.command),
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all it has started ends with it
        )
    try:
        outcome.exit_code = _wait(process, outcome.limit_s, log)
        outcome.status = PASSED if outcome.exit_code == 0 else FAILED
        if outcome.exit_code != 0:
            outcome.reason = f"its command ended with status {outcome.exit_code}"
    except subprocess.TimeoutExpired:
        outcome.status = LATE
        outcome.reason = f"it was ended after {outcome.limit_s:.0f} s"
    except KeyboardInterrupt:
        outcome.status = INTERRUPTED
        outcome.reason = "the check was interrupted"
    finally:
        end_group(process)


def _wait(process: subprocess.Popen[bytes], limit_s: float, log: Path) -> int:
    """Return the exit status; say now and then that it goes on. Raises TimeoutExpired at the limit."""
    began = time.monotonic()
    while True:
        left = began + limit_s - time.monotonic()
        try:
            return process.wait(max(0.0, min(left, TOLD_EVERY_S)))
        except subprocess.TimeoutExpired:
            if left <= TOLD_EVERY_S:
                raise
        last = tail(log, 1)
        told = last[0][:100] if last else "it has printed nothing so far"
        print(f"    {time.monotonic() - began:.0f} s: {told}", flush=True)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ask the process and all of its group to end, and kill what is left after a while."""
    deadline = time.monotonic() + GRACE_S
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:  # all of them have ended
            return
        except PermissionError:  # macOS says so of a group of which only a zombie is left
            return
        while number == signal.SIGTERM and time.monotonic() < deadline and _lives(process):
            time.sleep(0.05)
    process.wait()


def _lives(process: subprocess.Popen[bytes]) -> bool:
    """Whether any process of the group is there; the first one is waited for, lest it count as a zombie."""
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def tail(log: Path, count: int) -> list[str]:
    """Return the last lines of a log without colours and without what was overwritten on the same line."""
    if not log.is_file():
        return []
    text = ESCAPES.sub("", log.read_bytes().decode("utf-8", "replace"))
    lines = [line.rstrip().rsplit("\r", 1)[-1] for line in text.split("\n")]
    return [line for line in lines if line][-count:]


def results_of(folder: Path) -> dict[str, Any]:
    """Return what a stage wrote: each JSON file by its name, and the report of pytest as `tests`."""
    found = dict(_read_json(folder))
    report = folder / "tests.xml"
    if report.is_file():
        try:
            found["tests"] = tests_of(report)
        except xml.ParseError as error:
            found["tests.xml"] = f"cannot be read: {error}"
    return found


def _read_json(folder: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted(folder.glob("*.json")):
        try:
            yield path.stem, json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:  # it was ended while it wrote
            yield path.stem, f"cannot be read: {error}"


def tests_of(report: Path) -> dict[str, Any]:
    """Return counts, failures, reasons of skips and recorded figures of a report of pytest (JUnit's XML)."""
    cases = list(xml.parse(report).getroot().iter("testcase"))
    failures: dict[str, str] = {}
    skips: dict[str, str] = {}
    figures: dict[str, Any] = {}
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        for kind, told in (("failure", failures), ("error", failures), ("skipped", skips)):
            said = case.find(kind)
            if said is not None:
                told[name] = (str(said.get("message")).splitlines() or [""])[0][:300]
        for one in case.iter("property"):
            figures[f"{case.get('name')}: {one.get('name')}"] = one.get("value")
    return {
        "passed": len(cases) - len(failures.keys() | skips.keys()),
        "failed": len(failures),
        "skipped": len(skips),
        "failures": failures,
        "skips": skips,
        "figures": figures,
    }
