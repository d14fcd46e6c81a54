"""Does every algorithm learn? Each recipe on three seeds, from the same warm start and with the same number
of generated tokens.

    python benchmarks/learn.py [--algo grpo,rloo] [--seeds 0,1,2] [--jobs 2] [--again] [--check]      (`make
    learn`, `make learn ALGO=grpo`)

warm start of each seed ─► teacher, where one is asked for ─► recipe × seed, each in a process of one thread
─► table, curves, exit status

A finished cell is not run again unless its recipe or the settings changed, or --again is given; a cell that
fails keeps its log, is named in the table, and does not stop the rest. Writes OUT/learn/NAME_SEED.json,
OUT/learn.json, learn.md and learn.svg, and, where OUT is benchmarks/results, refreshes the pages of
docs/algorithms. With --check no table is written. Ends with status 1 where a cell that was asked for failed
or a bar is missed: sampled held-out accuracy (grpo_passk: pass@8) up by 0.10 on average over the seeds, the
control with random rewards by 0.02 at most.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

from cells import run_job
from learn_settings import (
    RESULTS,
    ROOT,
    TEACHER,
    Cell,
    Settings,
    all_names,
    finished,
    read_result,
    result_path,
    teacher_folder,
    warm_folder,
    write_json,
)
from learn_table import make_row, missed, page, table_head, table_line
from side_by_side import machine


class Jobs:
    """Runs jobs of learn_cell.py, a few side by side, and says how each went."""

    def __init__(self, work: Path, out: Path, settings: Settings, jobs: int) -> None:
        self.work = work
        self.out = out
        self.settings = settings
        self.jobs = jobs

    def run(self, job: str, cells: list[Cell]) -> dict[Cell, str]:
        """The cells that failed, with the last line of their log."""
        numbers = count(1)

        def one(cell: Cell) -> str:
            start = time.perf_counter()
            failure = self._process(job, cell)
            how = failure or self._gain(job, cell)
            print(
                f"[{next(numbers)}/{len(cells)}] {job} {cell.label}: {how}, "
                f"{time.perf_counter() - start:.0f} s",
                flush=True,
            )
            return failure

        with ThreadPoolExecutor(self.jobs) as pool:
            failures = list(pool.map(one, cells))
        return {cell: failure for cell, failure in zip(cells, failures, strict=True) if failure}

    def _process(self, job: str, cell: Cell) -> str:
        words = [job, "--name", cell.name, "--seed", str(cell.seed)]
        words += ["--work", str(self.work), "--out", str(self.out), "--budget", str(self.settings.budget)]
        words += ["--max-steps", str(self.settings.max_steps)]
        words += ["--warm-accuracy", str(self.settings.warm_accuracy)]
        return run_job("learn_cell.py", words, self.work / "logs" / f"{job}_{cell.label}.log")

    def _gain(self, job: str, cell: Cell) -> str:
        result = read_result(self.out, cell) if job == "run" else None
        return (
            f"sampled {result['before']['sampled']:.3f} → {result['after']['sampled']:.3f}"
            if result
            else "done"
        )


def run_cells(cells: list[Cell], jobs: Jobs) -> dict[Cell, str]:
    """Warm starts first, then teachers, then the cells; gives those that failed. A cell whose start could not
    be made failed too.
    """
    work = jobs.work
    settings = jobs.settings
    warm = [Cell("warm", seed) for seed in sorted({cell.seed for cell in cells})]
    failed = jobs.run(
        "warm",
        [cell for cell in warm if not (warm_folder(work, cell.seed, settings) / "warm.json").is_file()],
    )
    teachers = [Cell("teacher", cell.seed) for cell in cells if cell.name == TEACHER]
    failed |= jobs.run(
        "teacher",
        [
            cell
            for cell in teachers
            if not (teacher_folder(work, cell.seed, settings) / "teacher.json").is_file()
        ],
    )
    broken = {(cell.name, cell.seed): failure for cell, failure in failed.items()}
    lost = {
        cell: broken.get(
            ("warm", cell.seed), broken.get(("teacher", cell.seed), "") if cell.name == TEACHER else ""
        )
        for cell in cells
    }
    lost = {cell: failure for cell, failure in lost.items() if failure}
    lost |= jobs.run("run", [cell for cell in cells if cell not in lost])
    for cell, failure in lost.items():
        write_json(result_path(jobs.out, cell), {"name": cell.name, "seed": cell.seed, "failed": failure})
    return lost


def collect(
    names: list[str], seeds: list[int], out: Path, settings: Settings
) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """The finished cells of each recipe, and a sentence on each cell that is missing, failed or of another
    recipe or setting.
    """
    results: dict[str, list[dict[str, Any]]] = {}
    problems = []
    for name in names:
        for cell in (Cell(name, seed) for seed in seeds):
            found = read_result(out, cell)
            if found is None:
                problems.append(f"{cell.label}: not run yet")
            elif "failed" in found:
                problems.append(f"{cell.label}: {found['failed']}")
            elif not finished(out, cell, settings):
                problems.append(f"{cell.label}: its recipe or the settings have changed since it ran")
            else:
                results.setdefault(name, []).append(found)
    return results, problems


def write_table(out: Path, seeds: list[int], settings: Settings, facts: dict[str, str]) -> None:
    """learn.json, learn.md and learn.svg of all results there are, and the pages of the algorithms where
    `out` is the project's.
    """
    from learn_plot import plot_all

    results, problems = collect(all_names(), seeds, out, settings)
    rows = [make_row(name, cells) for name, cells in results.items()]
    problems = missed(rows) + problems
    write_json(out / "learn.json", {**facts, "budget": settings.budget, "rows": rows, "problems": problems})
    (out / "learn.md").write_text(page(rows, facts, settings, problems))
    if results:
        plot_all(
            out / "learn.svg", {name: [cell["curves"] for cell in cells] for name, cells in results.items()}
        )
    if out.resolve() == RESULTS:
        subprocess.run([sys.executable, str(ROOT / "scripts" / "algorithm_docs.py")], check=True)
    print(f"wrote {out / 'learn.md'}")


def arguments() -> argparse.Namespace:
    """The command line."""
    default = Settings()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algo", help="recipes, by comma (default: all, and the control grpo_random)")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="runs side by side, one thread each"
    )
    parser.add_argument("--again", action="store_true", help="run finished cells again, too")
    parser.add_argument("--check", action="store_true", help="write no table")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "learn", help="folder of warm starts, runs and logs"
    )
    parser.add_argument("--budget", type=int, default=default.budget, help="generated tokens of a run")
    parser.add_argument("--max-steps", type=int, default=default.max_steps)
    parser.add_argument("--warm-accuracy", type=float, default=default.warm_accuracy)
    return parser.parse_args()


def main() -> int:
    """Run what is missing, print, write."""
    options = arguments()
    settings = replace(
        Settings(), budget=options.budget, max_steps=options.max_steps, warm_accuracy=options.warm_accuracy
    )
    names = options.algo.split(",") if options.algo else all_names()
    if unknown := sorted(set(names) - set(all_names())):
        raise SystemExit(f"no such recipe: {', '.join(unknown)}; there are {', '.join(all_names())}")
    seeds = [int(seed) for seed in options.seeds.split(",")]
    cells = [Cell(name, seed) for seed in seeds for name in names]
    wanted = [cell for cell in cells if options.again or not finished(options.out, cell, settings)]
    jobs = Jobs(options.work, options.out, settings, options.jobs)
    run_cells(wanted, jobs)
    results, problems = collect(names, seeds, options.out, settings)
    rows = [make_row(name, found) for name, found in results.items()]
    problems = missed(rows) + problems
    print("\n".join([table_head(), *(table_line(row) for row in rows), "", *(problems or ["all bars met"])]))
    if not options.check:
        sharing = f"one thread a run, {options.jobs} runs side by side"
        facts = {
            "date": datetime.date.today().isoformat(),
            "command": f"python benchmarks/learn.py --jobs {options.jobs}",
            "machine": f"{machine()}, torch {version('torch')}, {sharing}",
        }
        write_table(options.out, seeds, settings, facts)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
