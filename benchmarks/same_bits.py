"""Do two commits train to the same bits? The tiny GRPO and PPO recipes, in one process and in two under Ray.

    python benchmarks/same_bits.py MODEL [--source CHECKOUT …] [--steps 20] [--only grpo-local …]

MODEL is a folder with a warm tiny model (`DEMO/sft/model` after `hybridflow demo --out DEMO`). Each CHECKOUT
(default: this one) trains in processes of its own with the recipe's seed. One line a run has the sha256 of
all weights and of all optimizer tensors, and of the logged metrics that are no times; it ends with status 1
where two checkouts differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
DEADLINE = 3600
"""Seconds one run may take."""
RAY = ("trainer.n_gpus_per_node=2", "trainer.controller=ray")
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "grpo-local": ("tiny/grpo", ()),
    "ppo-local": ("tiny/ppo", ()),
    "grpo-ray2": ("tiny/grpo", RAY),
    "ppo-ray2": ("tiny/ppo", RAY),
}
TIMES = ("timing", "perf/", "seconds", "memory", "cpu")
"""Parts of the names of metrics that depend on the machine's load."""


def train(source: Path, model: Path, name: str, steps: int, folder: Path) -> Path:
    """Train by the command of a checkout; returns the run's folder."""
    recipe, keys = RUNS[name]
    out = folder / name
    command = [sys.executable, "-m", "hybridflow.cli.main", "train", "--recipe", recipe]
    command += [
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={out}",
        f"trainer.total_training_steps={steps}",
        f"trainer.save_freq={steps}",
        f"trainer.test_freq={steps}",
        "trainer.logger=[jsonl]",
        *keys,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(source / "src"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with (folder / f"{name}.log").open("w") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=DEADLINE, check=False)
    if done.returncode:
        print((folder / f"{name}.log").read_text()[-2000:], file=sys.stderr)
        raise SystemExit(f"{name} of {source} ended with status {done.returncode}")
    return out


def tensor_digest(folder: Path, steps: int) -> str:
    """Return the digest of every tensor of the last checkpoint, in the order of files and names."""
    from safetensors.numpy import load_file

    digest = hashlib.sha256()
    files = sorted((folder / f"global_step_{steps}").rglob("*.safetensors"))
    if not files:
        raise SystemExit(f"{folder} has no tensors at step {steps}")
    for path in files:
        tensors = load_file(path)
        for key in sorted(tensors):
            digest.update(f"{path.parent.name}/{path.name}/{key}".encode())
            digest.update(tensors[key].tobytes())
    return digest.hexdigest()[:16]


def metric_digest(folder: Path) -> str:
    """Return the digest of the metrics of all steps that no clock and no memory of the process decides."""
    kept = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        kept.append({key: values[key] for key in sorted(values) if not any(part in key for part in TIMES)})
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--source", type=Path, nargs="+", default=[HERE])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    options = parser.parse_args()
    differs = False
    for name in options.only:
        found = []
        for source in options.source:
            with tempfile.TemporaryDirectory() as folder:
                run = train(source.resolve(), options.model.resolve(), name, options.steps, Path(folder))
                found.append((tensor_digest(run, options.steps), metric_digest(run)))
            print(f"{name:12} tensors {found[-1][0]} metrics {found[-1][1]} {source}", flush=True)
        differs = differs or len(set(found)) > 1
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
