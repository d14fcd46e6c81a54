"""Do two commits give the same bits? Runs, evaluations and a server's answers, by the commands of each.

    python benchmarks/same_bits.py [MODEL] [--source CHECKOUT …] [--steps 20] [--only grpo-local …]

Each CHECKOUT (default: this one) works in processes of its own, by its commands and over HTTP. One line a
row has digests (the first 16 digits of a sha256), and where two checkouts differ the status is 1:

    grpo-local, ppo-local   tiny recipes on one process
    grpo-ray2, ppo-ray2     the same on two processes under Ray
    pinned                  GRPO a step ahead on two processes that generate (`exact_async`)
    continuous              GRPO without a pause on two processes that generate, none ahead: what it does is
                            then decided by the keys alone
    ahead                   the same a step ahead, where the order of events decides which groups a step gets:
                            the prompts that were trained, and whether the rows of the first checkout's run,
                            trained again, give the metrics and the weights that it had
    lora, moe, vlm          GRPO on adapters, on a mixture of experts, on pictures
    sft                     the warm-up of a model that calls a calculator
    agent                   GRPO of this model, which talks with the calculator
    eval                    `hybridflow eval`: four answers to each prompt, and the table
    serve                   answers of `hybridflow serve` to the requests of same_bits_requests.json

Of a run these are all weights and optimizer tensors, and the logged metrics that neither the clock nor, where
several things go on at once, their order decides. This checkout makes the models with fixed seeds, and
random rewards, which depend on the answer, take the place of the task's own. MODEL is a folder with a warm
tiny model (`DEMO/sft/model` after `hybridflow demo --out DEMO`) that takes the place of the text model, with
the task's own rewards.

With `--keep FOLDER` the run folders stay in FOLDER/ROW/0, 1, … in the order of the checkouts: `hybridflow
diff` names the first difference of two of them. A server's answers are in replies.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from same_bits_answers import evaluated, served
from same_bits_checkout import Checkout, digest_of, metric_digest, tensor_digest

HERE = Path(__file__).resolve().parents[1]
RAY = ("trainer.controller=ray", "trainer.n_gpus_per_node=2")
APART = (
    "trainer.controller=ray",
    "trainer.resource_pools={train: [1], generate: [2]}",
    "trainer.placement={rollout: generate}",
    "ray_kwargs.ray_init.num_cpus=3",
    "algorithm.rollout_correction.rollout_is=token",
)
"""A process for training and two that generate, whatever the number of cores."""
OF_THE_WAY = ("fully_async/", "rollout/", "reward/", "training/num_gen_batches")
"""Beginnings of the names of metrics that say how the work was done, which timing decides where generation
has processes of its own.
"""
AS_THEY_COME = (
    "agent/max_concurrent",
    "val-aux/agent/max_concurrent",
    *(
        f"rollout/{name}"
        for name in ("decode_steps", "max_rows", "preemptions", "prefill_tokens", "prefix_hit")
    ),
)
"""The same where requests of conversations join one by one, as their turns end."""
EASY = ("products=1", "digits=1")
"""Options of the calculator with which a model that was warmed up for seconds is right now and then."""
SFT_STEPS = 80
DIFFERS = "differs"
RANDOM_REWARD = "reward.function=random"
MODELS = """
import sys
from pathlib import Path
from hybridflow.environments.built_in import CALL_WORDS
from hybridflow.models.tiny import create_tiny_model
from hybridflow.models.tiny import create_tiny_tool_tokenizer
folder = Path(sys.argv[1])
sys.path.insert(0, sys.argv[2])
from tiny_vlm import create_tiny_vlm
create_tiny_model(folder / "text")
create_tiny_model(folder / "experts", experts=4)
create_tiny_model(folder / "tools", tokenizer=create_tiny_tool_tokenizer(CALL_WORDS))
create_tiny_vlm(folder / "pictures")
"""


@dataclass(frozen=True)
class Run:
    """A training run, by its recipe, its model and further keys."""

    recipe: str
    model: str = "text"
    keys: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    """Beginnings of the names of metrics that are not compared."""


RUNS = {
    "grpo-local": Run("tiny/grpo"),
    "ppo-local": Run("tiny/ppo"),
    "grpo-ray2": Run("tiny/grpo", keys=RAY),
    "ppo-ray2": Run("tiny/ppo", keys=RAY),
    "pinned": Run(
        "tiny/grpo",
        keys=(*APART, "trainer.schedule=exact_async", "trainer.async.run_ahead=1"),
        ignored=OF_THE_WAY,
    ),
    "continuous": Run(
        "tiny/grpo",
        keys=(*APART, "trainer.schedule=fully_async", "trainer.async.run_ahead=0"),
        ignored=OF_THE_WAY,
    ),
    "lora": Run(
        "tiny/grpo",
        keys=("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16"),
    ),
    "moe": Run("tiny/moe", "experts"),
    "vlm": Run("tiny/vlm", "pictures"),
    "agent": Run(
        "tiny/calculator",
        "warm",
        keys=tuple(f"data.environment_options.{option}" for option in EASY),
        ignored=AS_THEY_COME,
    ),
}
AHEAD = Run(
    "tiny/grpo",
    keys=(
        *APART,
        "trainer.schedule=fully_async",
        "trainer.async.run_ahead=1",
        "trainer.keep_rows=true",
    ),
)


@dataclass
class Bench:
    """The models, and what the rows of the first checkout left for the others."""

    folder: Path
    steps: int
    given: Path | None
    """The user's own text model."""
    ahead: Path | None = field(default=None, init=False)
    """The first checkout's run of `ahead`, which every checkout trains again."""

    @cached_property
    def models(self) -> Path:
        """Folder of the models."""
        folder = self.folder / "models"
        Checkout(HERE, self.folder).python(["-c", MODELS, str(folder), str(HERE / "benchmarks")], "models")
        return folder

    @cached_property
    def warm(self) -> Path:
        """The model that calls a calculator, warmed up by this checkout, so that all get the same one."""
        return self.warm_up(Checkout(HERE, self.folder), self.folder / "warm")

    def model(self, name: str) -> Path:
        """Return a model's folder."""
        if name == "text" and self.given is not None:
            return self.given
        return self.warm if name == "warm" else self.models / name

    def rewards(self, name: str) -> tuple[str, ...]:
        """Return the keys of the reward for a model that may know nothing."""
        own = name == "warm" or (name == "text" and self.given is not None)
        return () if own else (RANDOM_REWARD,)

    def warm_up(self, checkout: Checkout, out: Path) -> Path:
        """Fine-tune the model with tools in the run folder `out`; returns the folder of the merged model."""
        options = "data.task.options"
        keys = [
            f"model.path={self.models / 'tools'}",
            f"{options}.environment=calculator",
            f"{options}.well_formed=0.8",
            *(f"{options}.options.{option}" for option in EASY),
            "data.train_batch_size=32",
            f"trainer.default_local_dir={out}",
            f"trainer.total_training_steps={SFT_STEPS}",
            f"trainer.save_freq={SFT_STEPS}",
            "trainer.logger=[jsonl]",
        ]
        checkout.command(["sft", "--recipe", "tiny/agent_sft", *keys], "sft")
        merged = out / "merged"
        checkout.command(["merge", str(out / f"global_step_{SFT_STEPS}"), str(merged)], "merge")
        return merged

    def train(self, checkout: Checkout, name: str, run: Run) -> Path:
        """Train by the command of a checkout; returns the run's folder."""
        out = checkout.folder / name
        keys = [
            f"actor_rollout_ref.model.path={self.model(run.model)}",
            f"trainer.default_local_dir={out}",
            f"trainer.total_training_steps={self.steps}",
            f"trainer.save_freq={self.steps}",
            f"trainer.test_freq={self.steps}",
            "trainer.logger=[jsonl]",
            *self.rewards(run.model),
            *run.keys,
        ]
        checkout.command(["train", "--recipe", run.recipe, *keys], name)
        return out


Digests = dict[str, str]


def trained(bench: Bench, checkout: Checkout, name: str) -> Digests:
    """Return the digests of a run."""
    run = RUNS[name]
    out = bench.train(checkout, name, run)
    return {"tensors": tensor_digest(out, bench.steps), "metrics": metric_digest(out, run.ignored)}


def fine_tuned(bench: Bench, checkout: Checkout, name: str) -> Digests:
    """Return the digests of the warm-up."""
    out = checkout.folder / name
    merged = bench.warm_up(checkout, out)
    assert merged.is_dir()
    return {"tensors": tensor_digest(out, SFT_STEPS), "metrics": metric_digest(out)}


def trained_ahead(bench: Bench, checkout: Checkout, name: str) -> Digests:
    """Return the digest of the prompts that were trained, and whether a run's rows train to the same bits
    again.
    """
    out = bench.train(checkout, name, AHEAD)
    bench.ahead = bench.ahead or out
    prompts: list[str] = []
    for meta in out.glob("rows/step_*/meta.json"):
        columns = json.loads(meta.read_text())["non_tensor_batch"]
        prompts += [json.dumps(row, sort_keys=True) for row in columns["extra_info"]]
    words = ["replay", str(bench.ahead), "--step", str(bench.steps)]
    status = checkout.command(words, "replay", good=(0, 1))
    return {"prompts": digest_of(sorted(prompts)), "replay": DIFFERS if status else "same"}


def answered(bench: Bench, checkout: Checkout, name: str) -> Digests:
    """Return the digests of an evaluation."""
    return evaluated(checkout, bench.model("text"), bench.rewards("text"))


def replied(bench: Bench, checkout: Checkout, name: str) -> Digests:
    """Return the digest of the server's answers."""
    return served(checkout, bench.warm)


ROWS: dict[str, Callable[[Bench, Checkout, str], Digests]] = {
    **dict.fromkeys(("grpo-local", "ppo-local", "lora", "moe", "vlm"), trained),
    "sft": fine_tuned,
    "agent": trained,
    "eval": answered,
    "serve": replied,
    **dict.fromkeys(("grpo-ray2", "ppo-ray2", "pinned", "continuous"), trained),
    "ahead": trained_ahead,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--source", type=Path, nargs="+", default=[HERE])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--keep", type=Path, help="a new folder for all that the rows write, to be looked at")
    options = parser.parse_args()
    differs = False
    with tempfile.TemporaryDirectory() as folder:
        if options.keep is not None:
            options.keep.mkdir(parents=True)
        bench = Bench(
            (options.keep or Path(folder)).resolve(), options.steps, options.model and options.model.resolve()
        )
        for name in options.only:
            found: list[Digests] = []
            for number, source in enumerate(options.source):
                began = time.monotonic()
                checkout = Checkout(source.resolve(), bench.folder / name / str(number))
                found.append(ROWS[name](bench, checkout, name))
                text = " ".join(f"{what} {digest}" for what, digest in found[-1].items())
                print(f"{name:12} {text} {source} ({time.monotonic() - began:.0f} s)", flush=True)
            differs = differs or any(one != found[0] or DIFFERS in one.values() for one in found)
            if options.keep is None:
                shutil.rmtree(bench.folder / name)
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
