"""Do tiny models learn to use tools and to play? GRPO from a warm start, on three seeds, beside the same
amount of further warm-up, and a control whose calculator answers by chance.

    python benchmarks/agents.py [--tasks calculator,guess] [--seeds 0,1,2] [--jobs 2] [--again] [--page]
    (`make agents`)

warm start of each task and seed ─► runs, each in a process of one thread ─► table, curves, exit status

A finished cell is not run again unless its recipe has changed, or --again is given. Writes
results/agents/NAME_SEED.json, results/agents.md and agents.svg; with --page only these two, of the cells that
there are. Ends with status 1 where a cell failed or a bar is missed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

from agents_page import draw, page, problems_of
from agents_settings import OUT, TASKS, WORK, Cell
from cells import run_job
from learn_settings import RESULTS
from side_by_side import machine


def job(what: str, cell: Cell) -> str:
    """Run one job; return why it failed, or nothing."""
    log = WORK / "logs" / f"{what}_{cell.label}.log"
    failure = run_job("agents_cell.py", [what, "--name", cell.name, "--seed", str(cell.seed)], log)
    told = f"{what} {cell.label}: {failure or 'done'}"
    print(told, flush=True)
    return failure and told


def run_cells(cells: Sequence[Cell], jobs: int) -> list[str]:
    """Make the warm starts that are missing, then run the cells; return why some failed."""
    cold = {cell.warm: cell for cell in reversed(cells) if not (cell.warm / "warm.json").is_file()}
    with ThreadPoolExecutor(jobs) as pool:
        failures = list(pool.map(lambda cell: job("warm", cell), reversed(cold.values())))
        warm = [cell for cell in cells if (cell.warm / "warm.json").is_file()]
        failures += pool.map(lambda cell: job("run", cell), warm)
    return [failure for failure in failures if failure]


def main() -> int:
    """Run what is missing, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="runs side by side")
    parser.add_argument("--again", action="store_true", help="run finished cells again, too")
    parser.add_argument(
        "--page", action="store_true", help="only write the page, of the cells that there are"
    )
    options = parser.parse_args()
    names = options.tasks.split(",")
    if unknown := sorted(set(names) - set(TASKS)):
        raise SystemExit(f"no such task: {', '.join(unknown)}; there are {', '.join(TASKS)}")
    seeds = [int(seed) for seed in options.seeds.split(",")]
    failures: list[str] = []
    if not options.page:
        cells = [Cell(name, seed) for name in names for seed in seeds]
        if options.again:
            for cell in cells:
                shutil.rmtree(cell.warm, ignore_errors=True)
        failures = run_cells([cell for cell in cells if options.again or not cell.found()], options.jobs)
    found = {name: [cell for seed in seeds if (cell := Cell(name, seed).found())] for name in TASKS}
    problems = failures + problems_of(found, seeds)
    if any(found.values()):
        sharing = f"torch {version('torch')}, one thread a run, {options.jobs} runs side by side"
        facts = f"{datetime.date.today().isoformat()} · `make agents` · {machine()}, {sharing}"
        draw(RESULTS / "agents.svg", found)
        (RESULTS / "agents.md").write_text(page(found, facts, problems))
        print(f"wrote {RESULTS / 'agents.md'} of the cells in {OUT}")
    print("\n".join(problems) or "all bars met")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
