"""One job of the learn table in a process of its own: make a warm start, make a teacher, or run a recipe from
the warm start.

    python benchmarks/learn_cell.py {warm,teacher,run} --seed N [--name RECIPE] --work FOLDER --out FOLDER …
    (learn.py starts these)

tiny model ──SFT──► warm start ──recipe, until the budget of generated tokens is spent──► held-out accuracy
──► OUT/learn/NAME_SEED.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from learn_settings import (
    NUM_PASS_QUESTIONS,
    PASS_K,
    PASS_MEASURED,
    TEACHER,
    TEACHER_ACCURACY,
    TEACHER_MAX_STEPS,
    Cell,
    Settings,
    result_path,
    teacher_folder,
    warm_folder,
    write_json,
)

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.demo.demo import MAX_TOKENS, WarmUpOptions, evaluate, held_out_questions, warm_up
from hybridflow.models.tiny import create_tiny_model
from hybridflow.observability.logging_setup import setup_logging
from hybridflow.trainer.ppo.build import PPOTrainer, build

CURVES = {"length": "response_length/mean", "entropy": "actor/entropy", "grad_norm": "actor/grad_norm"}
"""Metrics of each step that are kept beside the training score."""


def make_warm_start(seed: int, work: Path, settings: Settings) -> None:
    """The demo's warm-up of this seed, and what its model knows."""
    folder = warm_folder(work, seed, settings)
    model = create_tiny_model(folder / "model", seed=seed)
    warm = warm_up(model, folder / "sft", seed=seed, options=WarmUpOptions(settings.warm_accuracy))
    shutil.copytree(warm.model, folder / "warm", dirs_exist_ok=True)
    with build(_config(Cell("grpo", seed), settings, folder / "warm", folder / "look")) as trainer:
        known = _measure(trainer, seed, passes=True)
    shutil.rmtree(folder / "look")
    write_json(folder / "warm.json", known | {"sft_steps": warm.steps, "seconds": warm.seconds})


def make_teacher(seed: int, work: Path, settings: Settings) -> None:
    """The same warm-up from the same random weights, carried on until the greedy accuracy is
    TEACHER_ACCURACY.
    """
    folder = teacher_folder(work, seed, settings)
    model = create_tiny_model(folder / "model", seed=seed)
    options = WarmUpOptions(TEACHER_ACCURACY, check_every=25, max_steps=TEACHER_MAX_STEPS)
    teacher = warm_up(model, folder / "sft", seed=seed, options=options)
    shutil.copytree(teacher.model, folder / "teacher", dirs_exist_ok=True)
    write_json(
        folder / "teacher.json",
        {"greedy": teacher.accuracy, "sft_steps": teacher.steps, "seconds": teacher.seconds},
    )


def run(
    cell: Cell,
    work: Path,
    out: Path,
    settings: Settings,
    before: dict[str, Any],
    teacher: dict[str, Any] | None,
) -> None:
    """Train from the warm start until the budget is spent, measure, write the result."""
    start = time.perf_counter()
    folder = work / "runs" / cell.label
    shutil.rmtree(folder, ignore_errors=True)
    warm = warm_folder(work, cell.seed, settings) / "warm"
    teacher_model = teacher_folder(work, cell.seed, settings) / "teacher" if teacher else None
    config = _config(cell, settings, warm, folder, teacher=teacher_model)
    critic_steps = config.trainer.critic_warmup
    spent = outside = 0.0
    curves: dict[str, list[float]] = {name: [] for name in ("tokens", "score", *CURVES)}

    def budget_spent(step: int, metrics: dict[str, float]) -> bool:
        nonlocal spent, outside
        if step <= critic_steps:  # the policy stands still: these tokens teach the critic
            outside += metrics["rollout/generated_tokens"]
            return False
        spent += metrics["rollout/generated_tokens"]
        curves["tokens"].append(spent)
        # where groups are filtered, the score of all that was generated
        curves["score"].append(
            round(metrics.get("training/unfiltered_score/mean", metrics["critic/score/mean"]), 4)
        )
        for name, key in CURVES.items():
            curves[name].append(round(metrics.get(key, 0.0), 4))
        return spent >= settings.budget

    with build(config) as trainer:
        trained_from = time.perf_counter()
        trainer.fit(after_step=budget_spent)
        seconds = time.perf_counter() - trained_from
        after = _measure(trainer, cell.seed, passes=cell.name in PASS_MEASURED)
    write_json(
        result_path(out, cell),
        {
            "name": cell.name,
            "seed": cell.seed,
            "digest": cell.digest(settings),
            "before": {key: before[key] for key in after},
            "after": after,
            "tokens": int(spent),
            "steps": len(curves["tokens"]),
            "critic_steps": critic_steps,
            "critic_tokens": int(outside),
            "teacher": teacher,
            "seconds": round(seconds, 1),
            "seconds_all": round(time.perf_counter() - start, 1),
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "curves": curves,
        },
    )


def _config(
    cell: Cell, settings: Settings, model: Path, folder: Path, teacher: Path | None = None
) -> PPOConfig:
    fixed = [
        f"actor_rollout_ref.model.path='{model}'",
        f"trainer.default_local_dir='{folder}'",
        f"trainer.seed={cell.seed}",
        "trainer.resume_mode=disable",
        "trainer.logger=[]",
        "trainer.save_freq=-1",
        "data.task.val_size=0",  # held-out accuracy is measured once, after the run
        *([f"distillation.teacher_model.path='{teacher}'"] if teacher else []),
        *cell.own_overrides(),
    ]
    critic_steps = prepare_config(PPOConfig, fixed, recipe=cell.recipe).config.trainer.critic_warmup
    steps = f"trainer.total_training_steps={settings.max_steps + critic_steps}"
    return prepare_config(PPOConfig, [*fixed, steps], recipe=cell.recipe).config


def _measure(trainer: PPOTrainer, seed: int, *, passes: bool) -> dict[str, float]:
    """Held-out accuracy, sampled at temperature 1 and greedy; with `passes` also pass@8 on a part of the
    questions.
    """
    rollout = trainer.source.roles.rollout
    tokenizer = trainer.source.pipeline.tokenizer
    questions = held_out_questions(tokenizer, seed=seed)
    sampled = evaluate(rollout, tokenizer, questions, max_tokens=MAX_TOKENS, greedy=False, seed=seed)
    greedy = evaluate(rollout, tokenizer, questions, max_tokens=MAX_TOKENS, greedy=True, seed=seed)
    found = {"sampled": sampled.accuracy, "greedy": greedy.accuracy, "mean_length": sampled.mean_length}
    if passes:
        some = [questions[index] for index in range(NUM_PASS_QUESTIONS)]
        found["pass"] = evaluate(
            rollout, tokenizer, some, max_tokens=MAX_TOKENS, greedy=False, seed=seed, n=PASS_K
        ).pass_rate
    return found


def main() -> None:
    """One job, as the command line names it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", choices=["warm", "teacher", "run"])
    parser.add_argument("--name")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=int, required=True)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--warm-accuracy", type=float, required=True)
    options = parser.parse_args()
    setup_logging()
    settings = Settings(options.budget, options.max_steps, options.warm_accuracy)
    if options.job == "warm":
        make_warm_start(options.seed, options.work, settings)
    elif options.job == "teacher":
        make_teacher(options.seed, options.work, settings)
    else:
        before = json.loads((warm_folder(options.work, options.seed, settings) / "warm.json").read_text())
        path = teacher_folder(options.work, options.seed, settings) / "teacher.json"
        teacher = json.loads(path.read_text()) if options.name == TEACHER else None
        run(Cell(options.name, options.seed), options.work, options.out, settings, before, teacher)


if __name__ == "__main__":
    main()
