"""Learned rewards on the tiny task: how well they judge held-out answers, and what a policy gains by them.

    python benchmarks/reward_models.py [--kinds reward_model,judge] [--seeds 0,1,2] [--jobs 2] [--page]
    (`make reward-models`)

base ──tiny/reward_model────► reward model ──tiny/ppo_reward_model────► policy
     ──tiny/process_reward──► process reward model ──tiny/ppo_process_reward──► policy
     ──tiny/judge_sft───────► judge under `hybridflow serve` ──tiny/judge──► policy

The base knows the task; the policy begins at a smaller model that has seen wrong answers, too. A finished
cell is not run again: results/reward_models/KIND_SEED.json. Writes these and results/reward_models.md; ends
with status 1 where a cell failed or a bar is missed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from cells import run_job
from learn_settings import RESULTS, ROOT, write_json
from side_by_side import machine, table, verdict

from hybridflow.config.recipes import read_recipe

WORK = ROOT / "reward_models"
"""Stages are kept in a folder of the digest, so that a changed recipe trains anew."""
OUT = RESULTS / "reward_models"
PAGE = RESULTS / "reward_models.md"
LEARNED = {"reward_model": "tiny/ppo_reward_model", "process_reward": "tiny/ppo_process_reward"}
"""Recipe of what scores, in the folder tiny, and of the run that it scores."""
JUDGE = "judge"
KINDS = (*LEARNED, JUDGE)
BEFORE = "before"
"""Makes what all kinds of a seed begin at."""
ACCURACY = 0.95
"""Wanted on held-out data, of a reward model."""
GAIN = 0.1
"""By how much the share of held-out questions that are answered right has to rise."""
BASE_LAYERS = 4
"""Of what judges; the policy has 2, which are enough to work answers out, and few to check them."""
BASE_STEPS = 200
WARM_STEPS = 400
"""Steps of fine-tuning: on right answers for the base, on right and wrong ones for the policy."""
STEPS = 40
TASK = "data.task.options={hops: 5, max_number: 3, max_total: 3}"
"""The chains of the recipes that are run here."""
SCORES = {"reward_model": "reward_model_score", "process_reward": "reward_model_score", JUDGE: "judge"}
"""Column of the learned reward."""
RIGHT = "acc"
"""Column of the rule that knows the answers."""


def digest() -> str:
    """Changes where a recipe or a setting of this file does."""
    names = (*LEARNED, *LEARNED.values(), "tiny/sft", "tiny/judge_sft", "tiny/judge")
    recipes = [read_recipe(name if "/" in name else f"tiny/{name}") for name in names]
    content = json.dumps([recipes, BASE_LAYERS, BASE_STEPS, WARM_STEPS, STEPS, TASK], sort_keys=True)
    return blake2b(content.encode(), digest_size=4).hexdigest()


def result_of(kind: str, seed: int) -> dict[str, Any] | None:
    """Return a cell's result, if it is still that of these recipes."""
    file = OUT / f"{kind}_{seed}.json"
    if not file.is_file():
        return None
    found: dict[str, Any] = json.loads(file.read_text())
    return found if found["digest"] == digest() else None


def trained(
    root: Any, recipe: str, run: Path, model: Path, seed: int, *overrides: str
) -> tuple[Path, dict[str, float]]:
    """Train by supervision, once; return the model's folder, and the last validation."""
    if (run / "found.json").is_file():
        return run / "model", json.loads((run / "found.json").read_text())
    shutil.rmtree(run, ignore_errors=True)
    from hybridflow.config.load import prepare_config
    from hybridflow.trainer.sft.build import build

    keys = [
        f"model.path='{model}'",
        f"trainer.default_local_dir='{run}'",
        f"trainer.seed={seed}",
        "trainer.resume_mode=disable",
        *overrides,
    ]
    with build(prepare_config(root, keys, recipe=recipe).config) as trainer:
        found = trainer.fit()
        trainer.state.write_huggingface(run / "model", True)
    write_json(run / "found.json", found)
    return run / "model", found


def knowing(seed: int) -> Path:
    """Return a model that knows the task, of more layers than the policy."""
    from hybridflow.config import SFTConfig
    from hybridflow.models.tiny import create_tiny_model

    folder = WORK / digest() / f"base_{seed}"
    new = create_tiny_model(WORK / digest() / f"new_base_{seed}", layers=BASE_LAYERS, seed=seed)
    keys = [TASK, "data.task.val_size=256", f"trainer.total_training_steps={BASE_STEPS}"]
    return trained(SFTConfig, "tiny/sft", folder, new, seed, *keys)[0]


def warm_start(seed: int) -> Path:
    """Return a policy that has seen as many wrong answers as right ones."""
    from hybridflow.config import SFTConfig
    from hybridflow.models.tiny import create_tiny_model

    keys = ["data.task.options.conversation=either", f"trainer.total_training_steps={WARM_STEPS}"]
    new = create_tiny_model(WORK / digest() / f"new_policy_{seed}", seed=seed)
    return trained(SFTConfig, "tiny/judge_sft", WORK / digest() / f"policy_{seed}", new, seed, *keys)[0]


def policy(run: Path, warm: Path, seed: int, recipe: str, *overrides: str) -> list[dict[str, float]]:
    """Train a policy from the warm start; return what each look at held-out questions found."""
    from hybridflow.config import PPOConfig
    from hybridflow.config.load import prepare_config
    from hybridflow.observability.trackers.jsonl import read_metrics
    from hybridflow.trainer.ppo.build import build

    keys = [
        f"actor_rollout_ref.model.path='{warm}'",
        f"trainer.default_local_dir='{run}'",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.seed={seed}",
        "trainer.resume_mode=disable",
        *overrides,
    ]
    with build(prepare_config(PPOConfig, keys, recipe=recipe).config) as trainer:
        trainer.fit()
    looks = []
    for step, line in sorted(read_metrics(run / "metrics.jsonl").items()):
        found = {name: value for name, value in line.items() if name.startswith("val-")}
        if found:
            looks.append({"step": step, **found})
    return looks


def run_cell(kind: str, seed: int) -> None:
    """Train what scores and the policy, and write the cell's file."""
    from hybridflow.config import RewardModelConfig, SFTConfig
    from hybridflow.observability.logging_setup import setup_logging

    setup_logging()
    base = knowing(seed)
    warm = warm_start(seed)
    if kind == BEFORE:
        return
    folder = WORK / digest() / f"{kind}_{seed}"
    today = datetime.date.today().isoformat()
    found: dict[str, Any] = {"kind": kind, "seed": seed, "digest": digest(), "date": today}
    run = folder / "policy"
    shutil.rmtree(run, ignore_errors=True)
    if kind == JUDGE:
        model, _ = trained(SFTConfig, "tiny/judge_sft", folder / kind, base, seed)
        with served(model) as url:
            terms = read_recipe("tiny/judge")["reward"]["terms"]
            terms[0]["base_url"] = url
            written = [", ".join(f"{name}: {value!r}" for name, value in term.items()) for term in terms]
            found["looks"] = policy(
                run, warm, seed, "tiny/judge", f"reward.terms=[{{{'}, {'.join(written)}}}]"
            )
    else:
        model, last = trained(RewardModelConfig, f"tiny/{kind}", folder / kind, base, seed)
        found["accuracy"] = last["val/accuracy"]
        path = f"reward.reward_model.model.path='{model}'"
        found["looks"] = policy(run, warm, seed, LEARNED[kind], path)
    write_json(OUT / f"{kind}_{seed}.json", found)


@contextmanager
def served(model: Path) -> Iterator[str]:
    """Serve a judge in a process of its own; gives its address, which ends in /v1."""
    command = [sys.executable, "-m", "hybridflow", "serve", str(model), "--served-model-name", JUDGE]
    command += ["--port", "0", "--no-token", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def page_of(cells: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """Return the page's table of the cells that there are, and what was missed."""
    rows = []
    missed = []
    for cell in cells:
        reward = _looks(cell, SCORES[cell["kind"]])
        right = _looks(cell, RIGHT)
        met = reward[-1] > reward[0] and right[-1] - right[0] >= GAIN
        accuracy = "-"
        if "accuracy" in cell:
            accuracy = f"{cell['accuracy']:.3f}"
            met = met and cell["accuracy"] >= ACCURACY
        changes = [f"{values[0]:.2f} → {values[-1]:.2f}" for values in (reward, right)]
        looks = " · ".join(f"{value:.2f}" for value in _looks(cell, RIGHT))
        rows.append((cell["kind"], cell["seed"], accuracy, *changes, looks, verdict(met)))
        if not met:
            missed.append(f"{cell['kind']}, seed {cell['seed']}")
    head = ("judged by", "seed", "held-out accuracy", "its score", "share that is right", "looks", "bars")
    return table(head, rows), missed


def _looks(cell: dict[str, Any], column: str) -> list[float]:
    (name,) = [name for name in cell["looks"][0] if f"/{column}/" in name]
    return [look[name] for look in cell["looks"]]


def main() -> int:
    """Run what is missing, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="cells side by side")
    parser.add_argument("--page", action="store_true", help="only write the page, of the cells there are")
    parser.add_argument("--cell", action="store_true", help="run the first cell, in this process")
    options = parser.parse_args()
    wanted = [(kind, int(seed)) for seed in options.seeds.split(",") for kind in options.kinds.split(",")]
    if options.cell:
        run_cell(*wanted[0])
        return 0
    failures = []
    if not options.page:
        missing = [cell for cell in wanted if result_of(*cell) is None]
        before = [(BEFORE, seed) for seed in sorted({seed for _, seed in missing})]
        with ThreadPoolExecutor(options.jobs) as pool:
            failures = [failure for cells in (before, missing) for failure in pool.map(job, cells) if failure]
    content, missed = page_of(
        [cell for kind in KINDS for seed in range(10) if (cell := result_of(kind, seed))]
    )
    text = [
        "# Learned rewards\n",
        f"{datetime.date.today().isoformat()} · `make reward-models` · {machine()}\n",
        "Written by benchmarks/reward_models.py; do not edit. The policies have 0.4 M parameters, and what",
        "judges them twice as many layers; the task is chains of five sums. The policy's warm-up has shown",
        "it as many wrong answers as right ones. A reward model learns from pairs of answers, of which one",
        "has two wrong steps; a process reward model from labels of the steps; a judge, to say 10 or 0 of an",
        "answer. Held-out accuracy is that on 256 new questions, of pairs and of steps. Then a policy learns",
        f"from that score alone in {STEPS} steps: PPO, and GRPO for the judge. Both numbers of it are those",
        "of answers to 256 held-out questions, sampled, before and after.\n",
        f"Bars: an accuracy of at least {ACCURACY}, a higher score, and {GAIN} more of the answers right.\n",
        content,
    ]
    PAGE.write_text("\n".join(text) + "\n")
    print("\n".join([*failures, *missed]) or "all bars met")
    return 1 if failures or missed else 0


def job(cell: tuple[str, int]) -> str:
    """Run a cell in a process of its own; return why it failed, or nothing."""
    kind, seed = cell
    words = ["--cell", "--kinds", kind, "--seeds", str(seed)]
    failure = run_job("reward_models.py", words, WORK / "logs" / f"{kind}_{seed}.log")
    print(f"{kind}, seed {seed}: {failure or 'done'}", flush=True)
    return failure and f"{kind}, seed {seed}: {failure}"


if __name__ == "__main__":
    raise SystemExit(main())
