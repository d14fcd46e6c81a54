"""Executions a second in the sandbox, beside an interpreter that is started for each program.

    python benchmarks/sandbox.py [--seconds 20] [--rounds 3] [--quick]

One program (`print(sum(range(1000)))`) again and again: in a pool of one and of two warm workers, and by
`subprocess.run([python, "-I", "-c", ...])` from one and from two threads, which protects nothing. In turn,
several rounds, with their median. Beside it the seconds until the first verdict of a new sandbox. Writes
`benchmarks/results/sandbox.json` and `.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hybridflow.sandbox.sandbox import Sandbox, SandboxPool

RESULTS = Path(__file__).parent / "results"
CODE = "print(sum(range(1000)))"


def rate(run: Callable[[], str], threads: int, seconds: float) -> float:
    """Return how many programs end a second, started by so many threads."""
    ends = time.monotonic() + seconds

    def one(_: int) -> int:
        count = 0
        while time.monotonic() < ends:
            assert run() == "499500\n"
            count += 1
        return count

    began = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(one, range(threads)))
    return total / (time.monotonic() - began)


def plain() -> str:
    """Run the program in a fresh interpreter."""
    return subprocess.run([sys.executable, "-I", "-c", CODE], capture_output=True, text=True).stdout


def cold() -> float:
    """Return the seconds from nothing to the first verdict."""
    began = time.monotonic()
    with Sandbox() as sandbox:
        assert sandbox.run(CODE).ok
        return time.monotonic() - began


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a second of each, and write nothing")
    options = parser.parse_args()
    if options.quick:
        options.seconds = 1.0
        options.rounds = 1
    load = os.getloadavg()[0]
    figures: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for workers in (1, 2):
            with SandboxPool(num_workers=workers) as pool:
                layers = pool.layers()
                pool.run(CODE)
                found = rate(lambda pool=pool: pool.run(CODE).stdout, workers, options.seconds)  # type: ignore[misc]
            figures.setdefault(f"sandbox, {workers} warm", []).append(found)
            figures.setdefault(f"plain interpreter, {workers} at once", []).append(
                rate(plain, workers, options.seconds)
            )
        figures.setdefault("cold start, s", []).append(cold())
    active = [name for name, reason in layers.items() if not reason]
    lines = [
        "# Executions in the sandbox",
        "",
        f"Written by `benchmarks/sandbox.py`: {platform.machine()}, {os.cpu_count()} cores, load before "
        f"{load:.1f}, Python {platform.python_version()}. Layers: {', '.join(active)}.",
        "",
        "| | median | each round |",
        "|---|---|---|",
    ]
    for name, values in figures.items():
        unit = " programs a second"
        if name.endswith(", s"):
            unit = " s"
        rounds = ", ".join(f"{value:.2f}" for value in values)
        lines.append(f"| {name.removesuffix(', s')} | {statistics.median(values):.2f}{unit} | {rounds} |")
    print("\n".join(lines))
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "sandbox.json").write_text(
            json.dumps({"layers": layers, "figures": figures}, indent=1) + "\n"
        )
        (RESULTS / "sandbox.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
