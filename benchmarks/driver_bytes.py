"""The bytes that pass the driver by value in a training step, by call, direction and response length.

    python benchmarks/driver_bytes.py [--lengths 64,512,4032] [--only grpo,gae] [--collectors 0,1]
    make driver-bytes                                                                  (needs the extra `ray`)

A tiny model with random weights is trained under Ray, with a pool for training and one for generation, and no
response ends before its longest length. Prints a table and writes `benchmarks/results/driver_bytes.md`. The
figures are those of step 2, whose samples are not shown; they do not depend on the machine, but with
collectors those of `collector.collect` differ by some thousand bytes from run to run.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from side_by_side import machine

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.controller.ray.backend import RayBackend
from hybridflow.controller.ray.running import RayPart, Traffic
from hybridflow.models.tiny import create_tiny_model, create_tiny_tokenizer
from hybridflow.trainer.ppo.build import build

RESULT = Path(__file__).parent / "results" / "driver_bytes.md"
ROWS = 4
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return len(set(solution_str)) / len(solution_str)
"""
"""Scores that differ: where all are equal, so are the critic's values, and equal values take no bytes."""
PAGE = """# Bytes through the driver

{date} · `{command}` · {machine}

Written by benchmarks/driver_bytes.py; do not edit. Bytes by value in step 2 of a run of a tiny model under
Ray, one process for training and one for generation, {rows} rows a step of exactly as many tokens as the
heading says, no samples shown. "To" is sent by the driver, "from" is fetched by it. The last column is the
slope between the shortest and the longest response. The total also has the calls that did not occur
at the longest one. Token ids travel in the narrowest integers that hold them: this model has {vocabulary}
tokens; of more than 255 tokens each takes 2 bytes, of more than 32,767 it takes 4.

{tables}
"""
where = threading.local()


def measure(algorithm: str, length: int, folder: Path, collectors: int = 0) -> Counter[str]:
    """Return the bytes of the second step by call and direction."""
    reward = folder / "reward.py"
    reward.write_text(REWARD)
    keys = [
        f"actor_rollout_ref.model.path='{create_tiny_model(folder / 'model', hidden=32)}'",
        "data.task.name=arithmetic_chain",
        "data.task.size=16",
        "data.task.val_size=1",
        f"data.train_batch_size={ROWS // 2}",
        "data.max_prompt_length=32",
        f"data.max_response_length={length}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={ROWS // 2}",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "actor_rollout_ref.rollout.exact=false",
        "reward.num_workers=0",
        f"reward.custom_reward_function.path='{reward}'",
        "critic.optim.lr=1e-2",
        f"algorithm.adv_estimator={algorithm}",
        "trainer.logger=[]",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.total_training_steps=2",
        "trainer.controller=ray",
        "trainer.resource_pools={train: [1], generate: [1]}",
        "trainer.placement={rollout: generate}",
        f"trainer.num_collectors={collectors}",
        "ray_kwargs.ray_init.num_cpus=2",
        "trainer.heartbeat_timeout=600",
        "trainer.startup_timeout=900",
        f"trainer.default_local_dir='{folder / 'run'}'",
    ]
    found: Counter[str] = Counter()
    with build(prepare_config(PPOConfig, keys).config) as trainer:
        trainer.step.shows = lambda step: False
        for step in (1, 2):
            found.clear()
            record(found)
            trainer.step(trainer.source.next(step).rows, step)
    return found


def record(found: Counter[str]) -> None:
    """Count from now on what each call sends and fetches."""

    def add(self: Traffic, num_bytes: int) -> None:
        found[getattr(where, "name", "other")] += num_bytes

    Traffic.add = add  # type: ignore[method-assign]


def named(function: Callable[..., Any], name_of: Callable[..., str]) -> Callable[..., Any]:
    """Return the function, whose traffic is counted under the name that its arguments give."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before = getattr(where, "name", "other")
        where.name = name_of(*args)
        try:
            return function(*args, **kwargs)
        finally:
            where.name = before

    return wrapped


def count_calls(put: Callable[[Any, str, Any], None]) -> None:
    """Count the traffic of each call under its name; `put` sets an attribute of a class."""
    put(
        RayBackend,
        "submit",
        named(RayBackend.submit, lambda backend, role, method, *_: f"to {role}.{method}"),
    )
    put(RayBackend, "store", named(RayBackend.store, lambda *_: "to the row store"))
    put(RayPart, "result", named(RayPart.result, lambda part, *_: f"from {part.role}.{part.method}"))


def table(heading: str, found: dict[int, Counter[str]]) -> str:
    """Return the figures of one kind of run: a row for each call, a column for each length."""
    lengths = sorted(found)
    span = ROWS * (lengths[-1] - lengths[0])
    total = {length: sum(found[length].values()) for length in lengths}
    names = sorted(found[lengths[-1]], key=lambda name: -found[lengths[-1]][name])
    lines = [
        f"## {heading}\n",
        f"| | {' | '.join(f'{length:,} tokens' for length in lengths)} | bytes a token |",
        f"|---|{'---|' * (len(lengths) + 1)}",
    ]
    rows = {name: {length: found[length][name] for length in lengths} for name in names}
    for name, line in (rows | {"total": total}).items():
        slope = (line[lengths[-1]] - line[lengths[0]]) / span
        lines.append(f"| {name} | {' | '.join(f'{line[at]:,}' for at in lengths)} | {slope:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="64,512,4032")
    parser.add_argument("--only", default="grpo,gae")
    parser.add_argument("--collectors", default="0,1")
    options = parser.parse_args()
    count_calls(setattr)
    tables = []
    for algorithm, collectors in itertools.product(options.only.split(","), options.collectors.split(",")):
        found = {}
        for length in map(int, options.lengths.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                found[length] = measure(algorithm, length, Path(folder), int(collectors))
        heading = algorithm.upper()
        if int(collectors):
            heading += f", trainer.num_collectors={collectors}"
        tables.append(table(heading, found))
        print(tables[-1], flush=True)
    command = f"python benchmarks/driver_bytes.py --lengths {options.lengths} --only {options.only}"
    command += f" --collectors {options.collectors}"
    date = datetime.date.today().isoformat()
    page = PAGE.format(
        date=date,
        command=command,
        machine=machine(),
        rows=ROWS,
        vocabulary=len(create_tiny_tokenizer()),
        tables="\n\n".join(tables),
    )
    RESULT.write_text(page)


if __name__ == "__main__":
    main()
