"""A small student learns from a larger teacher by each loss of distillation, in 20 steps.

    python benchmarks/distillation.py TEACHER --work FOLDER    # writes benchmarks/results/distillation.md

TEACHER is a model of the tiny task, such as DEMO/sft/model of `hybridflow demo --out DEMO`. The student has
half of its width, and has read worked answers for a few supervised steps. The reverse KL of the page is
estimated alike for every loss: the mean of log π − log π_teacher over the tokens that the student samples in
the first and in the last step, each before its update.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.demo.demo import WarmUpOptions, warm_up
from hybridflow.models.tiny import create_tiny_model
from hybridflow.observability.trackers.jsonl import read_metrics
from hybridflow.trainer.ppo.build import build

TARGET = Path(__file__).resolve().parent / "results" / "distillation.md"
LOSS = "distillation.distillation_loss"
STEPS = 20
SFT_STEPS = 100
MODES = (
    "k1",
    *("reverse_kl", "forward_kl", "jsd"),
    *("reverse_kl_topk", "forward_kl_topk", "jsd_topk"),
)
ACCURACY = "val-core/arithmetic_chain/acc/mean@1"
HEAD = f"""# Distillation

Written by `benchmarks/distillation.py` on a CPU: a student of half the teacher's width, after {SFT_STEPS}
supervised steps, takes {STEPS} steps of 64 prompts × 8 responses from the teacher on its own samples
(`--recipe tiny/on_policy_distillation`, one seed), by each `distillation_loss.loss_mode`.
Those with `_topk` are told 16 of the 112 tokens. k1 is the policy gradient by the sampled token; the
others take the place of the policy loss (`use_task_rewards=false`). The reverse KL is estimated on the
tokens that the student samples, in nats a token; accuracy is greedy, on 1,024 held-out questions.

| loss | reverse KL, first step | last step | accuracy before | after |
|---|---|---|---|---|
"""


def taught(mode: str, student: Path, teacher: Path, run: Path) -> str:
    """Train a student by one loss, and return its line of the page."""
    overrides = [
        f"actor_rollout_ref.model.path='{student}'",
        f"distillation.teacher_model.path='{teacher}'",
        f"trainer.default_local_dir='{run}'",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.logger=[]",
        f"{LOSS}.loss_mode={mode}",
    ]
    if mode != "k1":
        overrides.append(f"{LOSS}.use_task_rewards=false")
    if mode.endswith("_topk"):
        overrides.append(f"{LOSS}.topk=16")
    if ACCURACY not in read_metrics(run / "metrics.jsonl").get(STEPS, {}):
        shutil.rmtree(run, ignore_errors=True)
        config = prepare_config(PPOConfig, overrides, recipe="tiny/on_policy_distillation").config
        with build(config) as trainer:
            trainer.fit()
    found = read_metrics(run / "metrics.jsonl")
    kl = [-found[step]["critic/advantages/mean"] for step in (1, STEPS)]
    right = [found[step][ACCURACY] for step in (0, STEPS)]
    return f"| `{mode}` | {kl[0]:.3f} | {kl[1]:.3f} | {right[0]:.3f} | {right[1]:.3f} |\n"


def main() -> None:
    """Make the student, train it by each loss, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("teacher", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs; finished ones stay")
    options = parser.parse_args()
    student = options.work / "sft" / "model"
    if not student.exists():
        random = create_tiny_model(options.work / "random", hidden=64, intermediate=192, seed=1)
        warm_up(random, options.work / "sft", seed=1, options=WarmUpOptions(0.9, max_steps=SFT_STEPS))
    lines = [taught(mode, student, options.teacher, options.work / mode) for mode in MODES]
    TARGET.write_text(HEAD + "".join(lines), encoding="utf-8")
    print(TARGET.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
