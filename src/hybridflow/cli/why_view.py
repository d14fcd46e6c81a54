"""`hybridflow why RUN`: what the steps of a run wait for, the key to change, and what it would save."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridflow.trainer.why import Wait

MOST = 8
"""Waits that are shown."""


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
    """Print the waits of a run, or the forecasts that were tried beside what they became."""
    from hybridflow.trainer.why import RunTimes, held, waits_of

    run = RunTimes.read(Path(options.run))
    if options.tried:
        tried = RunTimes.read(Path(options.tried))
        found, others = held(run, tried)
        if options.json:
            forecasts = [{**_plain(each.wait), "became": each.became} for each in found]
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
    waits = waits_of(run)
    if options.json:
        print(json.dumps({"seconds": run.seconds, "waits": [_plain(wait) for wait in waits]}))
        return 0
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


def _plain(wait: Wait) -> dict[str, Any]:
    return {**asdict(wait), "overrides": wait.overrides}
