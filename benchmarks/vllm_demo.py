"""The demo with vLLM: does it learn as with the native engine, and is a push of weights that is dropped found
in the same step?

    python benchmarks/vllm_demo.py        (`make demo-vllm`, in the environment that has vllm; about 10
    minutes on 2 cores)

One warm model, made once. From it, with the same seed, the demo's GRPO once with `rollout.name=native` and
once with `rollout.name=vllm` (in process), each in a process of its own, one after the other. Then short runs
with vLLM in which the push after step 2 is spoilt on purpose. Writes `benchmarks/results/vllm_demo.json` and
`.md`; ends with status 1 where a bar is missed: with vLLM the held-out accuracies rise by 0.20 (greedy) and
0.15 (sampled) and end within 0.05 of native's, and each spoilt push ends the run in its own step.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from side_by_side import machine
from torch import Tensor

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.demo.demo import DemoOptions, WarmUpOptions, reinforce, warm_up
from hybridflow.errors import RolloutError
from hybridflow.models.tiny import create_tiny_model
from hybridflow.observability.logging_setup import setup_logging
from hybridflow.rollout.vllm.in_process import InProcess
from hybridflow.trainer.ppo.build import build
from hybridflow.trainer.run_folder import RunFolder

RESULT = Path(__file__).parent / "results" / "vllm_demo"
DEADLINE = 3600
"""Seconds one run may take before it is ended."""
SPOILT_STEP = 2
"""The step whose push is spoilt, of the four of a short run."""
HELD_OUT = "val-core/arithmetic_chain/acc/mean@1"
DIFFERENCE = "training/rollout_log_probs_diff_max"
Weights = Iterable[tuple[str, Tensor, int]]
SPOIL: dict[str, str] = {
    "dropped": "the push never reaches the engine",
    "shortened": "the last tensor of the push gets lost on the way",
    "flipped": "one bit of one tensor is flipped on the way",
}
PAGE = """# The demo with vLLM

{date} · `{command}` · {machine} · vLLM {vllm}, torch {torch}

Written by benchmarks/vllm_demo.py; do not edit. One warm model ({sft_steps} warm-up steps), seed {seed};
from it {steps} steps of the demo's GRPO with each engine. Accuracies are those of {questions} held-out
questions.

| engine | greedy before | after | sampled before | after | rollout against training, max nats | steps, s |
|---|---|---|---|---|---|---|
{table}

Greedy held-out accuracy during training:

| step | {names} |
|---|{bars}|
{curve}

Reward of the training batches, mean of ten steps:

| steps | {names} |
|---|{bars}|
{rewards}

## Spoilt pushes

In each run the push of weights after step {spoilt} is spoilt on purpose.

| what is done | found in step | the run's last words |
|---|---|---|
{spoils}
"""


def trained(engine: str, model: Path, out: Path, seed: int, overrides: list[str]) -> dict[str, Any]:
    """The demo's RL with this engine: accuracies before and after, the curve, seconds."""
    wanted = DemoOptions(out, seed=seed, overrides=(f"actor_rollout_ref.rollout.name={engine}", *overrides))
    folder = RunFolder(out / engine)
    before, after, seconds = reinforce(wanted, model, folder)
    lines = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    return {
        "engine": engine,
        "greedy_before": before.greedy,
        "greedy_after": after.greedy,
        "sampled_before": before.sampled.accuracy,
        "sampled_after": after.sampled.accuracy,
        "num_questions": len(before.sampled.samples),
        "seconds": seconds,
        "held_out": {line["step"]: line[HELD_OUT] for line in lines if HELD_OUT in line},
        "rewards": [line["critic/rewards/mean"] for line in lines if "critic/rewards/mean" in line],
        "difference": max(line[DIFFERENCE] for line in lines if DIFFERENCE in line),
    }


def spoilt(how: str, model: Path, out: Path, seed: int) -> dict[str, Any]:
    """A short run in which the push after `SPOILT_STEP` is spoilt: the last step that ended, and what the run
    died of.
    """
    InProcess.push = spoiling(InProcess.push, how)
    overrides = [
        f"actor_rollout_ref.model.path='{model}'",
        f"trainer.default_local_dir='{out / how}'",
        f"trainer.seed={seed}",
        "trainer.resume_mode=disable",
        "actor_rollout_ref.rollout.name=vllm",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.total_training_steps=4",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.logger=[jsonl]",
    ]
    ended = [0]

    def note(step: int, metrics: dict[str, float]) -> bool:
        ended.append(step)
        return False

    with build(prepare_config(PPOConfig, overrides, recipe="tiny/grpo").config) as trainer:
        try:
            trainer.fit(after_step=note)
        except RolloutError as error:
            return {"how": how, "step": max(ended) + 1, "message": str(error)}
    return {"how": how, "step": None, "message": "nothing was noticed"}


def spoiling(plain: Callable[..., None], how: str) -> Callable[..., None]:
    """`InProcess.push`, spoilt for the version of `SPOILT_STEP`."""

    def push(runner: InProcess, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if version != SPOILT_STEP:
            plain(runner, weights, version)
        elif how == "shortened":
            plain(runner, list(weights)[:-1], version)
        elif how == "flipped":
            call = runner._call
            runner._call = lambda method, *given: call(
                method, *(_flip(given) if method == "hybridflow_take" else given)
            )
            plain(runner, weights, version)
        else:
            assert how == "dropped"

    return push


def _flip(given: tuple[Any, ...]) -> tuple[Any, ...]:
    def changed() -> Iterator[tuple[str, Tensor, int]]:
        for number, (name, tensor, checksum) in enumerate(given[0]):
            if number == 3:
                tensor = tensor.clone()
                tensor.view(torch.int32).view(-1)[0] ^= 1
            yield name, tensor, checksum

    return changed(), *given[1:]


def in_process_of_its_own(
    what: str, model: Path, out: Path, seed: int, overrides: list[str]
) -> dict[str, Any]:
    """This file again, for one run."""
    command = [
        sys.executable,
        str(Path(__file__)),
        "--run",
        what,
        "--model",
        str(model),
        "--out",
        str(out),
        "--seed",
        str(seed),
    ]
    print(f"{what}: {' '.join(command)}", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, *overrides], env=environment, stdout=sys.stderr, timeout=DEADLINE, check=False
    )
    if done.returncode:
        raise SystemExit(f"the run {what} ended with status {done.returncode}")
    found: dict[str, Any] = json.loads((out / f"{what}.json").read_text())
    return found


def missed(runs: list[dict[str, Any]], spoils: list[dict[str, Any]]) -> list[str]:
    """The bars that were not met, as sentences."""
    native, vllm = runs
    found = []
    for name, bar in (("greedy", 0.20), ("sampled", 0.15)):
        gain = vllm[f"{name}_after"] - vllm[f"{name}_before"]
        if gain < bar:
            found.append(f"vllm: {name} accuracy rose by {gain:.3f}, wanted {bar}")
        if vllm[f"{name}_after"] < native[f"{name}_after"] - 0.05:
            found.append(
                f"{name} accuracy after: {vllm[f'{name}_after']:.3f} with vllm, "
                f"{native[f'{name}_after']:.3f} with native"
            )
    return found + [
        f"{each['how']}: found in step {each['step']}, wanted {SPOILT_STEP}"
        for each in spoils
        if each["step"] != SPOILT_STEP
    ]


def page(facts: dict[str, Any], runs: list[dict[str, Any]], spoils: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    columns = ("greedy_before", "greedy_after", "sampled_before", "sampled_after")
    table = [
        f"| {run['engine']} | {' | '.join(f'{run[name]:.3f}' for name in columns)} | "
        f"{run['difference']:.1e} | {run['seconds']:.0f} |"
        for run in runs
    ]
    steps = sorted({int(step) for run in runs for step in run["held_out"]})
    by_step = [{int(step): value for step, value in run["held_out"].items()} for run in runs]
    curve = [f"| {step} | {' | '.join(f'{run[step]:.3f}' for run in by_step)} |" for step in steps]
    rewards = []
    for start in range(0, len(runs[0]["rewards"]), 10):
        parts = [run["rewards"][start : start + 10] for run in runs]
        rewards.append(
            f"| {start + 1} to {start + len(parts[0])} | "
            f"{' | '.join(f'{sum(part) / len(part):.3f}' for part in parts)} |"
        )
    return PAGE.format(
        **facts,
        questions=runs[0]["num_questions"],
        steps=len(runs[0]["rewards"]),
        spoilt=SPOILT_STEP,
        table="\n".join(table),
        names=" | ".join(run["engine"] for run in runs),
        bars="|".join("---" for _ in runs),
        curve="\n".join(curve),
        rewards="\n".join(rewards),
        spoils="\n".join(f"| {SPOIL[each['how']]} | {each['step']} | {each['message']} |" for each in spoils),
    )


def main() -> int:
    """Run all in turn, print, write; or, with --run, one run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", choices=["native", "vllm", *SPOIL], help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="key=value, of both runs")
    options = parser.parse_args()
    if options.run:
        setup_logging()
        one = (options.model, options.out, options.seed)
        found = (
            spoilt(options.run, *one)
            if options.run in SPOIL
            else trained(options.run, *one, options.overrides)
        )
        (options.out / f"{options.run}.json").write_text(json.dumps(found))
        return 0
    import vllm

    setup_logging()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        warm = warm_up(
            create_tiny_model(out / "model", seed=options.seed),
            out / "sft",
            seed=options.seed,
            options=WarmUpOptions(),
        )
        spoils = [in_process_of_its_own(how, warm.model, out, options.seed, []) for how in SPOIL]
        runs = [
            in_process_of_its_own(engine, warm.model, out, options.seed, options.overrides)
            for engine in ("native", "vllm")
        ]
    facts = {
        "command": " ".join(["python", "benchmarks/vllm_demo.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": f"{machine()}, one thread a run",
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "seed": options.seed,
        "sft_steps": warm.steps,
    }
    problems = missed(runs, spoils)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.with_suffix(".json").write_text(
        json.dumps(facts | {"runs": runs, "spoilt": spoils, "missed": problems}, indent=2) + "\n"
    )
    RESULT.with_suffix(".md").write_text(page(facts, runs, spoils))
    print(RESULT.with_suffix(".md").read_text())
    print("\n".join(problems) or "all bars met")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
