"""Commands on existing runs: `hybridflow diff`, `replay` and `reverify` compare, repeat and re-score them,
and `hybridflow why RUN` reports what their steps wait for, the key to change, and what it would save.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from hybridflow.errors import HybridFlowError

if TYPE_CHECKING:
    from hybridflow.trainer.replay.diff import Difference, RunDiff
    from hybridflow.trainer.replay.replay import Replay
    from hybridflow.trainer.replay.reverify import Judged

CANNOT = 2
"""Exit status where a comparison cannot be made; 0 says equal and 1 different."""
SHOWN = 60
"""Characters of a value in the output."""
MOST = 8
"""Waits that are shown."""


def add_time_travel(words: Any) -> None:
    """Add the grammar of the commands."""
    diff = words.add_parser("diff", help="name the first quantity in which two runs differ, and where")
    diff.add_argument("first", help="folder of a run")
    diff.add_argument("second", help="folder of another run")
    diff.add_argument("--json", action="store_true", help="print it as one JSON object")
    diff.set_defaults(body=diff_command)
    again = words.add_parser(
        "replay", help="train a step of a run again from its checkpoint and kept rows, and compare the bits"
    )
    again.add_argument("run", help="folder of a run with trainer.keep_rows=true")
    again.add_argument("--step", type=int, required=True, help="the last step to do again, from 1")
    again.add_argument("--json", action="store_true", help="print it as one JSON object")
    again.set_defaults(body=replay_command)
    judge = words.add_parser(
        "reverify", help="judge stored rows by another reward or estimator, without generating"
    )
    judge.add_argument("run", help="folder of a run with trainer.keep_rows=true")
    judge.add_argument("--reward", metavar="FILE.PY:NAME", help="a reward function (default: the run's)")
    judge.add_argument("--estimator", help="an advantage estimator (default: the run's)")
    judge.add_argument("--step", type=int, help="one step (default: all that were kept)")
    judge.set_defaults(body=reverify_command)


def cannot_is_two(body: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Return the body of a command with an error of the user's as exit status 2, as `diff` and `cmp` have."""

    @functools.wraps(body)
    def call(options: argparse.Namespace) -> int:
        try:
            return body(options)
        except HybridFlowError as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            return CANNOT

    return call


@cannot_is_two
def diff_command(options: argparse.Namespace) -> int:
    """Print the first difference of two runs."""
    from hybridflow.observability.logging_setup import setup_logging
    from hybridflow.observability.progress import progress

    setup_logging()
    with progress.shown():
        with progress.importing("torch"):
            from hybridflow.trainer.replay.diff import diff_runs
        with progress.phase("comparing the runs"):
            found = diff_runs(Path(options.first), Path(options.second))
    if options.json:
        print(json.dumps({"status": found.status, **asdict(found)}, default=str))
    else:
        show_diff(found)
    return found.status


@cannot_is_two
def replay_command(options: argparse.Namespace) -> int:
    """Repeat steps of a run and print whether their bits agree."""
    from hybridflow.observability.logging_setup import setup_logging
    from hybridflow.observability.progress import progress

    setup_logging()
    with progress.shown():
        with progress.importing():
            from hybridflow.trainer.replay.replay import replay
        found = replay(Path(options.run), options.step)
    if options.json:
        print(json.dumps({"status": found.status, **asdict(found)}, default=str))
    else:
        show_replay(found)
    return found.status


def show_replay(found: Replay) -> None:
    """Print which steps were repeated, and whether their bits agree with the run's."""
    steps = ", ".join(map(str, found.steps))
    print(f"began after step {found.began_after}; steps done again: {steps}")
    for difference in found.differences:
        print(f"differs: {line_of(difference)}")
    weights = "weights and optimizers" if found.compared_weights else "no weights"
    print(f"compared: {found.num_metrics} metrics, {weights}")
    if found.status == 0:
        print("all bits agree")
    for note in found.notes:
        print(f"note: {note}")


@cannot_is_two
def reverify_command(options: argparse.Namespace) -> int:
    """Print the results of another reward function or estimator on stored rows."""
    from hybridflow.observability.logging_setup import setup_logging
    from hybridflow.observability.progress import progress

    setup_logging()
    with progress.shown():
        with progress.importing("torch"):
            from hybridflow.trainer.replay.reverify import reverify
        judged = reverify(Path(options.run), options.reward, options.estimator, options.step)
    show_judged(judged)
    return 0


def show_judged(judged: Sequence[Judged]) -> None:
    """Print a row for each step, with stored values beside the new ones."""
    heads = ("step", "rows", "scores changed", "mean score", "mean |advantage|", "loss at the start")
    table = Table(*heads, title="Stored → judged anew", title_justify="left")
    for one in judged:
        table.add_row(
            str(one.step),
            str(one.num_rows),
            str(one.changed_scores),
            _pair(one.scores),
            _pair(one.advantages),
            _pair(one.losses) if one.losses else "-",
        )
    Console().print(table)


def _pair(values: tuple[float, float]) -> str:
    return f"{values[0]:.6g} → {values[1]:.6g}"


def show_diff(found: RunDiff) -> None:
    """Print the first difference, those that follow, what was compared and what was not."""
    if found.differences:
        print(f"first difference: {line_of(found.differences[0])}")
        for difference in found.differences[1:]:
            print(f"  then: {line_of(difference)}")
    elif found.status == 0:
        print("the runs are equal in all that was compared")
    else:
        print("nothing of any step could be compared")
    print(f"compared: {', '.join(f'{count} {what}' for what, count in found.compared.items())}")
    for note in found.notes:
        print(f"note: {note}")


def line_of(difference: Difference) -> str:
    """Return a difference on one line: kind, name, place, both values."""
    place = difference.where()
    where = f" at {place}" if place else ""
    return (
        f"{difference.kind} {difference.name}{where}: {_short(difference.first)} | "
        f"{_short(difference.second)}"
    )


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def add_why(words: Any) -> None:
    """Add the grammar of the command."""
    command = words.add_parser(
        "why", help="why a run is slow: its largest waits, the key that shortens each, and the forecast gain"
    )
    command.add_argument("run", help="folder of a run with at least two finished steps")
    command.add_argument(
        "--tried", metavar="RUN", help="folder of a run in which a key was changed: did the forecast hold?"
    )
    command.add_argument("--json", action="store_true", help="print it as one JSON object")
    command.set_defaults(body=why_command)


def why_command(options: argparse.Namespace) -> int:
    """Print the waits of a run, or the forecasts that were tried beside their results."""
    from hybridflow.trainer.why.findings import as_data, found_in, held
    from hybridflow.trainer.why.rules import waits_of
    from hybridflow.trainer.why.run_times import RunTimes

    run = RunTimes.read(Path(options.run))
    if options.tried:
        tried = RunTimes.read(Path(options.tried))
        found, others = held(run, tried)
        if options.json:
            forecasts = [{**as_data(each.wait), "became": each.became} for each in found]
            print(json.dumps({"seconds": [run.seconds, tried.seconds], "tried": forecasts, "others": others}))
            return 0
        print(f"a mean step took {run.seconds:.3g} s, and takes {tried.seconds:.3g} s")
        for each in found:
            forecast = "no forecast" if each.wait.saved is None else f"forecast {each.wait.saved:.3g} s"
            print(f"{each.wait.overrides[0]}: {forecast}, it became {each.became:.3g} s")
        if not found:
            print("no key of these two runs was changed to a value that was advised")
        if others:
            print(f"also different, so that the seconds may be theirs: {', '.join(others)}")
        return 0
    if options.json:
        print(json.dumps(found_in(run)))
        return 0
    waits = waits_of(run)
    print(f"a mean step takes {run.seconds:.3g} s (of {len(run.steps)} steps after the first)")
    for number, wait in enumerate(waits[:MOST], 1):
        gain = ""
        if wait.saved is not None:
            gain = f", forecast to save {wait.saved:.3g} s ({wait.saved / run.seconds:.0%} of a step)"
        print(f"{number}. {wait.cause}: {wait.text}")
        if wait.key:
            print(f"   {' '.join(wait.overrides) if wait.saved is not None else wait.key}{gain}")
    if not waits:
        print("nothing stands out: no wait is worth a key")
    return 0
