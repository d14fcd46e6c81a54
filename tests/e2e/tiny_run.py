"""The inputs of the end-to-end tests: a tiny model folder, parquet files in gsm8k's schema, a reward that
varies, and the keys for them.

Questions are short sums, written as rows of `openai/gsm8k`. A model of random weights cannot answer them, so
where a test needs rewards that differ from row to row it takes `DIGIT_SHARE` in place of the data's own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hybridflow.models.tiny import create_tiny_model
from hybridflow.observability.trackers.jsonl import read_metrics

MAX_PROMPT = 40
MAX_RESPONSE = 12
TIMINGS = ("timing_s/", "fully_async/", "perf/", "reward/seconds")
"""Metrics that no two runs share."""
DIGIT_SHARE = '''"""A reward between 0 and 1: the share of the characters that are digits or spaces."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(c.isdigit() or c == " " for c in solution_str) / max(1, len(solution_str))
'''


@dataclass(frozen=True)
class Inputs:
    """Paths of what a run reads."""

    model: Path
    train: Path
    val: Path
    reward: Path


def write_inputs(folder: Path, *, train_rows: int = 14, val_rows: int = 3) -> Inputs:
    """Model, data and reward function of a tiny run."""
    folder.mkdir(parents=True, exist_ok=True)
    reward = folder / "digit_share.py"
    reward.write_text(DIGIT_SHARE)
    return Inputs(
        model=create_tiny_model(folder / "model", hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64),
        train=write_parquet(folder / "train.parquet", gsm8k_rows(train_rows, split="train")),
        val=write_parquet(folder / "test.parquet", gsm8k_rows(val_rows, split="test")),
        reward=reward,
    )


def gsm8k_rows(number: int, *, split: str) -> list[dict[str, Any]]:
    """Rows as verl's preparation of GSM8K writes them."""
    draw = random.Random(split)
    rows = []
    for index in range(number):
        a = draw.randint(1, 9)
        b = draw.randint(1, 9)
        question = f"{a} + {b} = ?"
        answer = f"{a} + {b} = {a + b} . #### {a + b}"
        rows.append(
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": question}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
            }
        )
    return rows


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Rows as a parquet file."""
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)
    return path


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Rows as a jsonl file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def small_run(inputs: Inputs, out: Path, *overrides: str, steps: int = 2) -> list[str]:
    """Return the overrides of a short run: two responses to each of four prompts; `overrides` come last."""
    return [
        f"data.train_files={inputs.train}",
        f"data.max_prompt_length={MAX_PROMPT}",
        f"data.max_response_length={MAX_RESPONSE}",
        "data.train_batch_size=4",
        f"actor_rollout_ref.model.path={inputs.model}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "critic.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "critic.optim.lr=1e-3",
        "actor_rollout_ref.rollout.name=native",
        "actor_rollout_ref.rollout.n=2",
        "reward.num_workers=0",
        f"reward.custom_reward_function.path={inputs.reward}",
        "trainer.logger=[]",
        "trainer.num_threads=1",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={out}",
        *overrides,
    ]


def metrics_of(run: Path, *, with_timings: bool = False) -> dict[int, dict[str, float]]:
    """The metrics by step of a run folder."""
    return {
        step: {name: value for name, value in line.items() if with_timings or not name.startswith(TIMINGS)}
        for step, line in read_metrics(run / "metrics.jsonl").items()
    }
