"""The demo on three seeds, by PPO, and with random rewards: does it learn, and does the control not?

    python benchmarks/demo_seeds.py [--jobs 2]        (`make demo-seeds`; about half an hour on 2 cores)

Each run is a `hybridflow demo` in a process of its own, two side by side. Prints a table, writes
`benchmarks/results/demo_seeds.json` and ends with status 1 where a bar is missed: greedy accuracy up by 0.20
and sampled by 0.15 on each seed, sampled by 0.25 on average, the control up by 0.02 at most.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from side_by_side import machine

RESULT = Path(__file__).parent / "results" / "demo_seeds.json"
DEADLINE = 1800
"""Seconds one demo may take before it is ended."""
RUNS = (("grpo", 0, "arithmetic_chain"), ("grpo", 1, "arithmetic_chain"), ("grpo", 2, "arithmetic_chain"),
        ("grpo", 0, "random"), ("ppo", 0, "arithmetic_chain"))  # fmt: skip
KEPT = (
    "greedy_before",
    "greedy_after",
    "sampled_before",
    "sampled_after",
    "num_questions",
    "sft_steps",
    "seconds_sft",
    "seconds_rl",
    "seconds",
)


def run(algorithm: str, seed: int, reward: str, folder: Path) -> dict[str, Any]:
    """One demo; its summary without the sample texts."""
    out = folder / f"{algorithm}_{seed}_{reward}"
    command = [
        sys.executable,
        "-m",
        "hybridflow.cli.main",
        "demo",
        "--algo",
        algorithm,
        "--seed",
        str(seed),
        "--reward",
        reward,
        "--out",
        str(out),
    ]
    log = out.with_suffix(".log")
    with log.open("w") as file:
        status = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, timeout=DEADLINE, check=False
        ).returncode
    if status:
        raise SystemExit(
            f"demo {algorithm} {seed} {reward} ended with status {status}:\n{log.read_text()[-3000:]}"
        )
    summary = json.loads((out / algorithm / "summary.json").read_text())
    return {"algorithm": algorithm, "seed": seed, "reward": reward} | {key: summary[key] for key in KEPT}


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """The bars that were not met, as sentences."""
    found = []
    learned = [row for row in rows if row["reward"] != "random"]
    for row in learned:
        for name, bar in (("greedy", 0.20), ("sampled", 0.15)):
            gain = row[f"{name}_after"] - row[f"{name}_before"]
            if gain < bar:
                found.append(
                    f"{row['algorithm']} seed {row['seed']}: {name} accuracy rose by {gain:.3f}, wanted {bar}"
                )
    gains = [row["sampled_after"] - row["sampled_before"] for row in learned if row["algorithm"] == "grpo"]
    if sum(gains) / len(gains) < 0.25:
        found.append(f"grpo: sampled accuracy rose by {sum(gains) / len(gains):.3f} on average, wanted 0.25")
    for row in rows:
        if row["reward"] == "random":
            gain = max(row[f"{name}_after"] - row[f"{name}_before"] for name in ("greedy", "sampled"))
            if gain > 0.02:
                found.append(f"the control with random rewards rose by {gain:.3f}, at most 0.02 is chance")
    return found


def main() -> int:
    """Run all, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="demos side by side")
    jobs = parser.parse_args().jobs
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        rows = list(pool.map(lambda chosen: run(*chosen, Path(folder)), RUNS))
    for row in rows:
        change = ", ".join(
            f"{name} {row[f'{name}_before']:.3f} -> {row[f'{name}_after']:.3f}"
            for name in ("greedy", "sampled")
        )
        print(f"{row['algorithm']:5} seed {row['seed']} {row['reward']:17} {change}, {row['seconds']:.0f} s")
    problems = missed(rows)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(
        json.dumps(
            {
                "command": f"python benchmarks/demo_seeds.py --jobs {jobs}",
                "date": datetime.date.today().isoformat(),
                "machine": (f"{machine()}, torch {torch.__version__}, one thread a run"),
                "runs": rows,
                "missed": problems,
            },
            indent=2,
        )
        + "\n"
    )
    print("\n".join(problems) or "all bars met")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
