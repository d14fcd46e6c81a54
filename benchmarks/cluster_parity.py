"""Do two or four processes learn what one learns? Each way of spreading a model, by GRPO and PPO, against one
process.

    python benchmarks/cluster_parity.py [--only grpo/fsdp …] [--steps 20]     (`make cluster-parity`; about an
                                                                              hour on 2 cores)
    python benchmarks/cluster_parity.py --only grpo/pp --keep  (puts these rows into the committed figures)
    python benchmarks/cluster_parity.py --page         (writes the page again from the committed figures)

From one warm model (the demo's), comparisons of a run on two processes under Ray, or on four where two ways
are combined, with the same run on one:

  step      the first step on the same rollouts: |Δloss|, gradient norm (relative), updated weights
  step64    the same in float64, where rounding cannot hide a mistake
  replay    20 steps in float64 on the rollouts of the one process: gradient norm (relative), |Δloss|. In
  float32
            the order of sums decides in time which tokens are clipped: one process with other micro-batches
            then moves the norm by as much
  tokens    5 steps running freely, where only the sharding differs: the same tokens
  curve     20 steps running freely: the mean score of the steps

AdamW moves a weight by about the learning rate in each update, whatever the size of its gradient. So where a
gradient is little more than rounding, so is the direction of the move. The weights of `step` are therefore no
bar: they are told as a share of the largest possible move, learning rate × updates, with the smaller learning
rate where two models train. `BARS` has all bars. Prints a table, writes
`benchmarks/results/cluster_parity.json` and `.md`, and ends with status 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from side_by_side import machine
from torch import Tensor

from hybridflow.checkpoint.layout import MODEL
from hybridflow.checkpoint.shard_index import read_tensors
from hybridflow.config import PPOConfig
from hybridflow.config.load import load_config, prepare_config
from hybridflow.demo.demo import WarmUpOptions, warm_up
from hybridflow.models.tiny import create_tiny_model
from hybridflow.observability.logging_setup import setup_logging
from hybridflow.protocol import DataProto
from hybridflow.trainer.ppo.build import build
from hybridflow.trainer.source import TrainBatch

RESULT = Path(__file__).parent / "results" / "cluster_parity.json"
ACTOR = "actor_rollout_ref.actor"
CRITIC = "critic"
REF = "actor_rollout_ref.ref"
SPREADS: dict[str, tuple[str, ...]] = {
    "fsdp": (),
    "hsdp": (f"{ACTOR}.fsdp_config.fsdp_size=1", f"{CRITIC}.fsdp_config.fsdp_size=1"),
    "offload": tuple(
        f"{role}.fsdp_config.{key}=true"
        for role in (ACTOR, CRITIC)
        for key in ("param_offload", "optimizer_offload")
    ),
    "offload_policy": (
        f"{ACTOR}.fsdp_config.offload_policy=true",
        f"{CRITIC}.fsdp_config.offload_policy=true",
    ),
    "ulysses": (f"{ACTOR}.ulysses_sequence_parallel_size=2", f"{CRITIC}.ulysses_sequence_parallel_size=2"),
    "ring": tuple(
        f"{role}.{key}"
        for role in (ACTOR, CRITIC)
        for key in ("ulysses_sequence_parallel_size=2", "fsdp_config.context_parallel=ring")
    ),
    "tp": (f"{ACTOR}.fsdp_config.tensor_parallel_size=2", f"{CRITIC}.fsdp_config.tensor_parallel_size=2"),
    "pp": tuple(f"{role}.fsdp_config.pipeline_parallel_size=2" for role in (ACTOR, CRITIC)),
    "pp_fsdp": tuple(f"{role}.fsdp_config.pipeline_parallel_size=2" for role in (ACTOR, CRITIC)),
    "tp_pp": tuple(
        f"{role}.fsdp_config.{key}=2"
        for role in (ACTOR, CRITIC)
        for key in ("tensor_parallel_size", "pipeline_parallel_size")
    ),
    "tp_ulysses": tuple(
        f"{role}.{key}=2"
        for role in (ACTOR, CRITIC)
        for key in ("fsdp_config.tensor_parallel_size", "ulysses_sequence_parallel_size")
    ),
    "tp_ring": tuple(
        f"{role}.{key}"
        for role in (ACTOR, CRITIC)
        for key in (
            "fsdp_config.tensor_parallel_size=2",
            "ulysses_sequence_parallel_size=2",
            "fsdp_config.context_parallel=ring",
        )
    ),
    "ep": tuple(f"{role}.fsdp_config.expert_parallel_size=2" for role in (ACTOR, CRITIC)),
    "ep_fsdp": tuple(f"{role}.fsdp_config.expert_parallel_size=2" for role in (ACTOR, CRITIC)),
    "tp_ep": tuple(
        f"{role}.fsdp_config.{key}"
        for role in (ACTOR, CRITIC)
        for key in ("tensor_parallel_size=2", "expert_parallel_size=4")
    ),
    "lora": (),
}
PROCESSES = dict.fromkeys(("pp_fsdp", "tp_pp", "tp_ulysses", "tp_ring", "ep_fsdp", "tp_ep"), 4)
"""Processes of a spread; the others have two."""
ONLY_SHARDED = ("fsdp", "hsdp", "offload", "offload_policy", "pp", "pp_fsdp", "lora")
"""Where only the sharding differs, so that free runs give the same tokens at first."""
EXPERTS = ("ep", "ep_fsdp", "tp_ep")
"""Spreads of a mixture of experts, whose updates go to the experts of the one process's generation (R3)."""
REPLAY = (
    f"{ACTOR}.router_replay.mode=R3",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay=true",
)
LORA = (
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.model.lora_alpha=16",
    f"{ACTOR}.optim.lr=3e-3",
)
FLOAT64 = ("actor_rollout_ref.model.dtype=float64",)  # the critic's model follows the actor's
SIZE = (
    "data.train_batch_size=16",
    f"{ACTOR}.ppo_mini_batch_size=8",
    "trainer.test_freq=-1",
    "data.task.val_size=0",
    "trainer.logger=[]",
)
LOSSES = ("actor/pg_loss", "critic/vf_loss")
NORMS = ("actor/grad_norm", "critic/grad_norm")
SCORE = "critic/score/mean"


@dataclass
class Run:
    """The metrics, tokens and weights of a run."""

    lines: list[dict[str, float]] = field(default_factory=list)
    """The metrics of each step."""
    tokens: list[Tensor] = field(default_factory=list)
    """`responses` of each step, in the order of `row_id`."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """The actor's and the critic's parameters after the last step."""


def overrides(
    algorithm: str, spread: str, model: Path, folder: Path, steps: int, processes: int
) -> list[str]:
    """The run's keys; only those of `spread` differ between one process and two."""
    keys = [
        *SIZE,
        f"actor_rollout_ref.model.path='{model}'",
        f"trainer.default_local_dir='{folder}'",
        "trainer.seed=0",
    ]
    keys += [f"trainer.total_training_steps={steps}", "trainer.resume_mode=disable", "trainer.save_freq=-1"]
    keys += LORA if spread == "lora" else ()
    keys += REPLAY if spread in EXPERTS else ()
    if algorithm == "ppo":
        keys += ["trainer.critic_warmup=0"]
    if processes > 1:
        keys += [
            f"trainer.n_gpus_per_node={processes}",
            f"ray_kwargs.ray_init.num_cpus={processes}",
            "trainer.startup_timeout=3600",  # on a busy machine
            "trainer.heartbeat_timeout=1800",
            *(key for key in SPREADS[spread] if algorithm == "ppo" or not key.startswith(CRITIC)),
        ]
    return keys


def execute(
    algorithm: str, keys: Sequence[str], *, replay: Path | None = None, record: Path | None = None
) -> Run:
    """One run; `record`: keep its rollouts there, `replay`: train on those in place of its own."""
    config = prepare_config(PPOConfig, list(keys), recipe=f"tiny/{algorithm}").config
    run = Run()
    with build(config) as trainer:
        own = trainer.source.next

        def rollouts(step: int) -> TrainBatch:
            if replay is not None:
                made = TrainBatch(DataProto.load_from_disk(replay / str(step)), epoch=0)
            else:
                made = own(step)
            batch = made.rows
            if record is not None:
                batch.save_to_disk(record / str(step))
            order = torch.argsort(batch.batch["row_id"])
            run.tokens.append((batch.batch["responses"] * batch.batch["response_mask"])[order])
            return made

        trainer.source.next = rollouts  # type: ignore[method-assign]

        def after(step: int, logged: dict[str, float]) -> bool:
            run.lines.append(logged)
            return False

        trainer.fit(after_step=after)
        saved = trainer.state.save(trainer.store)
    for role in ("actor", "critic"):
        if (saved / role).is_dir():
            run.weights |= {
                f"{role}/{name}": tensor for name, tensor in read_tensors(saved / role, MODEL).items()
            }
    return run


def largest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference between two sets of weights."""
    assert one.keys() == other.keys(), f"other parameters: {sorted(one.keys() ^ other.keys())[:4]}"
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def differences(one: Run, other: Run, names: Sequence[str], *, relative: bool) -> float:
    """The largest difference of some metrics over all steps that both have."""
    worst = 0.0
    for left, right in zip(one.lines, other.lines, strict=True):
        for name in names:
            if name in left or name in right:
                worst = max(worst, abs(left[name] - right[name]) / (abs(left[name]) if relative else 1.0))
    return worst


def same_tokens(one: Run, other: Run, steps: int) -> int:
    """How many of the first `steps` steps have the same tokens, from the first on."""
    for step, (left, right) in enumerate(zip(one.tokens[:steps], other.tokens[:steps], strict=True)):
        if left.shape != right.shape or not torch.equal(left, right):
            return step
    return min(steps, len(one.tokens))


def one_process(
    algorithm: str, spread: str, model: Path, folder: Path, rollouts: Path, steps: int
) -> dict[str, Run]:
    """The runs that two processes are compared with; the first of them leaves its rollouts for the others."""

    def one(name: str, steps: int, *more: str, **where: Path) -> Run:
        keys = overrides(algorithm, spread, model, folder / f"one_{algorithm}_{spread}_{name}", steps, 1)
        return execute(algorithm, [*keys, *more], **where)

    return {
        "free": one("free", steps, record=rollouts),
        "step": one("step", 1, replay=rollouts),
        "step64": one("step64", 1, *FLOAT64, replay=rollouts),
        "replay": one("replay", steps, *FLOAT64, replay=rollouts),
    }


def compare(
    algorithm: str, spread: str, model: Path, folder: Path, base: dict[str, Run], rollouts: Path, steps: int
) -> dict[str, Any]:
    """The four comparisons of one cell."""

    def two(name: str, steps: int, replay: Path | None, *more: str) -> Run:
        processes = PROCESSES.get(spread, 2)
        keys = overrides(algorithm, spread, model, folder / f"{algorithm}_{spread}_{name}", steps, processes)
        return execute(algorithm, [*keys, *more], replay=replay)

    first = two("step", 1, rollouts)
    first64 = two("step64", 1, rollouts, *FLOAT64)
    replayed = two("replay", steps, rollouts, *FLOAT64)
    free = two("free", steps, None)
    scores = [[line[SCORE] for line in run.lines] for run in (base["free"], free)]
    return {
        "algorithm": algorithm,
        "spread": spread,
        "step_loss": differences(base["step"], first, LOSSES, relative=False),
        "step_grad_norm": differences(base["step"], first, NORMS, relative=True),
        "step_weights": largest(base["step"].weights, first.weights),
        "step64_weights": largest(base["step64"].weights, first64.weights),
        "replay_loss": differences(base["replay"], replayed, LOSSES, relative=False),
        "replay_grad_norm": differences(base["replay"], replayed, NORMS, relative=True),
        "same_tokens": same_tokens(base["free"], free, min(5, steps)),
        "curve": abs(sum(scores[0]) - sum(scores[1])) / len(scores[0]),
        "curve_worst_step": max(abs(left - right) for left, right in zip(*scores, strict=True)),
        "scores_one": scores[0],
        "scores_two": scores[1],
    }


BARS = {
    "step_loss": (1e-5, "difference of the loss of the first step"),
    "step_grad_norm": (1e-5, "relative difference of its gradient norm"),
    "step_weights_share": (
        math.inf,
        "largest difference of a weight after it, over the largest possible move (learning rate × updates)",
    ),
    "step64_weights": (1e-10, "largest difference of a weight after it, in float64"),
    "replay_loss": (1e-4, "largest difference of the loss of the steps on the same rollouts, in float64"),
    "replay_grad_norm": (1e-3, "largest relative difference of their gradient norms"),
    "curve": (0.05, "difference of the mean score of the steps that run freely"),
}
"""For each column the largest value that is allowed, infinite where there is no bar, and what it is."""


def largest_move(algorithm: str, spread: str) -> float:
    """How far the first step can move a weight, about: learning rate × updates."""
    keys = overrides(algorithm, spread, Path("model"), Path("run"), 1, 1)
    config = load_config(PPOConfig, keys, recipe=f"tiny/{algorithm}").config
    actor = config.actor_rollout_ref.actor
    rates = [actor.optim.lr]
    if algorithm == "ppo":
        rates.append(config.critic.optim.lr)
    return min(rates) * config.data.train_batch_size / actor.ppo_mini_batch_size


def with_share(row: dict[str, Any]) -> dict[str, Any]:
    """A cell's figures and the share of the largest move that its weights differ by."""
    move = row.get("largest_move") or largest_move(row["algorithm"], row["spread"])
    return {**row, "largest_move": move, "step_weights_share": row["step_weights"] / move}


def missed(row: dict[str, Any], steps: int) -> list[str]:
    """The bars that a cell does not meet."""
    found = [f"{name} {row[name]:.2e} > {bar}" for name, (bar, _) in BARS.items() if not row[name] <= bar]
    if row["spread"] in ONLY_SHARDED and row["same_tokens"] < min(5, steps):
        found.append(f"tokens differ from step {row['same_tokens'] + 1}")
    return [f"{row['algorithm']}/{row['spread']}: {text}" for text in found]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The cells as Markdown."""
    lines = ["| run | " + " | ".join(BARS) + " | same_tokens |", "|---|" + "---|" * (len(BARS) + 1)]
    for row in rows:
        numbers = " | ".join(f"{row[name]:.1e}" for name in BARS)
        lines.append(f"| {row['algorithm']}, {row['spread']} | {numbers} | {row['same_tokens']} steps |")
    return "\n".join(lines)


def measured() -> dict[str, str]:
    """When and where figures of this process are measured."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{machine()}, {torch.get_num_threads()} thread a process",
        "torch": torch.__version__,
    }


def where(figures: dict[str, Any]) -> str:
    """When and where figures were measured, in words; rows of older dates do not say where."""
    known = [figures[name] for name in ("date", "machine") if name in figures]
    if "torch" in figures:
        known.append(f"torch {figures['torch']}")
    return " · ".join(known)


MEANINGS = {
    "pp": "two stages",
    "pp_fsdp": "two stages of two shards each",
    "tp_pp": "two stages whose layers are cut in two",
    "ulysses": "two ranks that share the tokens of rows by an exchange of heads",
    "ring": "two ranks that share the tokens of rows by ring attention",
    "tp_ulysses": "two pairs of such ranks, each with a slice of every layer, by an exchange of heads",
    "tp_ring": "the same by ring attention",
    "ep": "two parts of the experts, with updates that go to the experts of generation (R3)",
    "ep_fsdp": "two shards of each of these parts",
    "tp_ep": "four parts of the experts, where the other layers are cut in two",
}
"""What the less obvious spreads are."""


def page_of(result: dict[str, Any]) -> str:
    """The page."""
    steps = result["steps"]
    share = max(row["step_weights_share"] for row in result["cells"])
    bars = {name: f"{bar:g}" for name, (bar, _) in BARS.items()}
    legend = "\n".join(
        f"| {name} | {meaning} | {bars[name].replace('inf', 'no bar')} |"
        for name, (_, meaning) in BARS.items()
    )
    counted = min(5, steps)
    same_tokens = (
        f"how many of {counted} steps that run freely have the same tokens; wanted where only the sharding "
        f"differs ({', '.join(ONLY_SHARDED)})"
    )
    shown = {row["spread"] for row in result["cells"]}
    spreads = "\n".join(f"- `{name}`: {text}." for name, text in MEANINGS.items() if name in shown)
    problems = "\n".join(f"- **missed**: {problem}" for problem in result["problems"])
    later: dict[str, list[str]] = {}
    for row in result["cells"]:
        if "date" in row:
            later.setdefault(where(row), []).append(f"{row['algorithm']}, {row['spread']}")
    dates = "".join(f"\n\nMeasured later, {place}: {'; '.join(runs)}." for place, runs in later.items())
    return f"""# Two and four processes against one

`{result["command"]}` · {where(result)}

Written by benchmarks/cluster_parity.py, which says what is compared; do not edit. {steps} steps of each run.

| column | what it is | at most |
|---|---|---|
{legend}
| same_tokens | {same_tokens} | {counted} steps |

AdamW moves a weight by about the learning rate in each update, whatever the size of its gradient. So where a
gradient is little more than rounding, so is the direction of the move: the weights of a float32 step are no
bar (they differ by at most {share:.3f} of the largest move), and `step64_weights` shows that rounding is all
there is.

{table(result["cells"])}

{spreads}

{problems or "Every bar is met."}{dates}
"""


def cells(only: Sequence[str]) -> list[tuple[str, str]]:
    """(algorithm, spread) of all that are asked for."""
    every = [(algorithm, spread) for algorithm in ("grpo", "ppo") for spread in SPREADS]
    # a critic's routes are its own, and nobody replays them
    every = [cell for cell in every if cell[0] == "grpo" or cell[1] not in EXPERTS]
    return [cell for cell in every if not only or "/".join(cell) in only]


def warm_model(folder: Path, experts: int) -> Path:
    """The demo's warm model, or one with experts."""
    tiny = create_tiny_model(folder / "tiny", experts=experts, seed=0)
    return warm_up(tiny, folder / "sft", seed=0, options=WarmUpOptions(0.5)).model


def main() -> int:
    """Exit status: 1 where a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="cells such as grpo/fsdp; left out: all")
    parser.add_argument("--steps", type=int, default=20, help="steps of the longer runs")
    parser.add_argument("--keep", action="store_true", help="put the rows of --only into the result")
    parser.add_argument("--page", action="store_true", help="only write the page again, from the result")
    options = parser.parse_args()
    if options.page:
        return write(json.loads(RESULT.read_text()))
    setup_logging()
    torch.set_num_threads(1)
    rows = []
    problems = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        models: dict[int, Path] = {}
        base: dict[tuple[str, str], dict[str, Run]] = {}
        for algorithm, spread in cells(options.only):
            experts = 4 * (spread in EXPERTS)
            if experts not in models:
                models[experts] = warm_model(folder / f"{experts}_experts", experts)
            model = models[experts]
            kind = "experts" if experts else "lora" if spread == "lora" else "plain"
            key = (algorithm, kind)
            rollouts = folder / f"rollouts_{algorithm}_{kind}"
            if key not in base:
                base[key] = one_process(algorithm, spread, model, folder, rollouts, options.steps)
            row = with_share(compare(algorithm, spread, model, folder, base[key], rollouts, options.steps))
            rows.append(row)
            problems += missed(row, options.steps)
            if options.only and options.keep:
                keep(row)
            sys.stdout.write(table([row]).splitlines()[-1] + "\n")
            sys.stdout.flush()
    sys.stdout.write(table(rows) + "\n" + "\n".join(problems or ["every bar is met"]) + "\n")
    if options.only:
        return 1 if problems else 0
    return write(
        {
            "command": "python benchmarks/cluster_parity.py",
            **measured(),
            "steps": options.steps,
            "cells": rows,
        }
    )


def keep(row: dict[str, Any]) -> None:
    """Put a row, with its date and machine, into the committed figures."""
    result = json.loads(RESULT.read_text())
    found = {(each["algorithm"], each["spread"]): each for each in result["cells"]}
    found[row["algorithm"], row["spread"]] = {**row, **measured()}
    result["cells"] = [found[cell] for cell in cells(()) if cell in found]
    write(result)


def write(result: dict[str, Any]) -> int:
    """Judge the figures and write them with their page; 1 where a bar is missed."""
    rows = [with_share(row) for row in result["cells"]]
    problems = [problem for row in rows for problem in missed(row, result["steps"])]
    whole = {**result, "problems": problems, "cells": rows}
    RESULT.write_text(json.dumps(whole, indent=1) + "\n")
    RESULT.with_suffix(".md").write_text(page_of(whole))
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
