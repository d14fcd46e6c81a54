"""The five schedules in a race: GRPO of a tiny model, answers of log-normal length, rewards that take a
random time; on two processes under Ray, of which one generates, and in one process.

    python benchmarks/schedule_race.py [--seeds 0,1,2] [--steps 16] [--quick] [--again] [--page]
    (`make async`)

warm start of a seed ─► every schedule from it, one after the other ─► table, curves

A finished run is not made again unless --again is given; --page only writes the page of those that there are.
Writes results/schedule_race.json, schedule_race.md and schedule_race.svg; --quick (one seed, 4 steps) writes
nothing there. Ends with status 1 where a run failed or an aim is missed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cells import run_job
from learn_settings import RESULTS, ROOT, write_json
from schedule_race_page import CELLS, draw, page, problems_of
from side_by_side import machine

WORK = ROOT / "schedule_race"
FOUND = RESULTS / "schedule_race.json"


def job(what: str, seed: int, steps: int, work: Path, name: str = "") -> str:
    """Run one job; return why it failed, or nothing."""
    label = f"{name.replace('/', '_') or what}_{seed}"
    words = [what, "--seed", str(seed), "--steps", str(steps), "--work", str(work), "--name", name]
    failure = run_job("schedule_race_cell.py", words, work / "logs" / f"{label}.log")
    print(f"{label}: {failure or 'done'}", flush=True)
    return failure and f"{label}: {failure}"


def run_seed(seed: int, steps: int, work: Path) -> list[str]:
    """Run all schedules of a seed that have not run, one after the other; return why some failed.

    Each seed begins with another one, so none always has the quietest machine.
    """
    if not (work / f"warm_{seed}" / "warm.json").is_file():
        failure = job("warm", seed, steps, work)
        if failure:
            return [failure]
    names = list(CELLS)
    names = names[seed % len(names) :] + names[: seed % len(names)]
    missing = [name for name in names if not _path(work, name, seed).is_file()]
    return [failure for name in missing if (failure := job("run", seed, steps, work, name))]


def _path(work: Path, name: str, seed: int) -> Path:
    return work / "cells" / f"{name.replace('/', '_')}_{seed}.json"


def main() -> int:
    """Run what is missing, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="one seed, 4 steps; nothing is written")
    parser.add_argument("--again", action="store_true", help="run finished ones again, too")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    work = WORK
    steps = options.steps
    if options.quick:
        seeds = seeds[:1]
        steps = 4
        work = WORK / "quick"
    if options.again:
        shutil.rmtree(work, ignore_errors=True)
    failures: list[str] = []
    found: list[dict[str, Any]] = json.loads(FOUND.read_text()) if options.page else []
    if not options.page:
        for seed in seeds:
            failures += run_seed(seed, steps, work)
        paths = [_path(work, name, seed) for seed in seeds for name in CELLS]
        found = [json.loads(path.read_text()) for path in paths if path.is_file()]
    problems = failures + problems_of(found, seeds)
    facts = f"{datetime.date.today().isoformat()} · `make async` · {machine()}, torch {version('torch')}"
    text = page(found, facts, problems)
    print(text)
    if not options.quick and found:
        write_json(FOUND, found)
        draw(RESULTS / "schedule_race.svg", found)
        (RESULTS / "schedule_race.md").write_text(text)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
