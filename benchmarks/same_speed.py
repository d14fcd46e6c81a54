"""Are two commits equally fast, and as large in memory? Whole processes of both, in turn.

    python benchmarks/same_speed.py MODEL OLD [NEW] [--rounds 5] [--only grpo …]

MODEL is a folder with a warm tiny model (`DEMO/sft/model` after `hybridflow demo --out DEMO`); OLD and NEW
(default: this one) are checkouts. One line a row: the median of the ratio new / old over the rounds, its
least and its most, for wall seconds, CPU seconds and the peak of resident memory. The rows:

    grpo, ppo    a run of 12 steps of the tiny recipe, with its validation and its checkpoint
    generate     128 responses of 64 tokens to 16 prompts by the native engine, five times
    start        the time until the configuration of a run is shown
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
DEADLINE = 3600
"""Seconds that one process may take."""
STEPS = 12

GENERATE = """
import sys
try:
    from hybridflow.models.files.build import build_policy
except ModuleNotFoundError:  # older commits
    from hybridflow.models.build import build_policy
try:
    from hybridflow.protocol.prompt import Prompt
except ModuleNotFoundError:  # in older commits a prompt is its token ids
    Prompt = tuple
from hybridflow.rollout.base import GenerationRequest, SamplingParams
from hybridflow.rollout.native.engine import NativeEngine
import torch
policy = build_policy(sys.argv[1], device=torch.device("cpu"), dtype="float32", probe=False)
engine = NativeEngine(policy, eos_token_ids=())
sampling = SamplingParams(max_tokens=64)
prompts = [Prompt(tuple(range(3 + number, 18 + number))) for number in range(16)]
for turn in range(5):
    requests = [GenerationRequest(row, prompts[row // 8], sampling, seed=row) for row in range(128)]
    assert sum(len(output.token_ids) for output in engine.generate(requests)) == 128 * 64
"""


def command(row: str, model: Path, folder: Path) -> list[str]:
    """Return the command of a row; it runs in a checkout by PYTHONPATH."""
    if row == "generate":
        return [sys.executable, "-c", GENERATE, str(model)]
    recipe = {"grpo": "tiny/grpo", "ppo": "tiny/ppo", "start": "tiny/grpo"}[row]
    keys = [
        "--recipe",
        recipe,
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={folder}",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={STEPS}",
        f"trainer.test_freq={STEPS}",
        "trainer.logger=[jsonl]",
    ]
    return [sys.executable, "-m", "hybridflow.cli.main", "config" if row == "start" else "train", *keys]


def measure(source: Path, row: str, model: Path) -> tuple[float, float, float]:
    """Return wall seconds, CPU seconds of the process and its children, and MiB of the largest one."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        environment = {
            **os.environ,
            "PYTHONPATH": str(source / "src"),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        began = time.perf_counter()
        process = subprocess.Popen(
            command(row, model, Path(folder) / "run"), env=environment, stdout=nowhere, stderr=subprocess.PIPE
        )
        assert process.stderr is not None
        said = process.stderr.read().decode(errors="replace")
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{row} of {source} ended with status {status}: {said[-2000:]}")
        return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=HERE)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=["grpo", "ppo", "generate", "start"])
    options = parser.parse_args()
    for row in options.only:
        ratios: list[list[float]] = [[], [], []]
        for number in range(options.rounds + 1):
            # the first pair warms the caches of the disk; then either goes first in turn
            sides = [options.old, options.new]
            if number % 2:
                sides.reverse()
            found = {side: measure(side, row, options.model) for side in sides}
            if number:
                for ratio, new, old in zip(ratios, found[options.new], found[options.old], strict=True):
                    ratio.append(new / old)
        text = [
            f"{name} {statistics.median(ratio):.3f} ({min(ratio):.3f}-{max(ratio):.3f})"
            for name, ratio in zip(("wall", "cpu", "memory"), ratios, strict=True)
        ]
        print(f"{row:<10} new / old, {options.rounds} pairs: {', '.join(text)}", flush=True)


if __name__ == "__main__":
    main()
