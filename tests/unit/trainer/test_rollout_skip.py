"""Dumped rollouts are read back where they are those of the run's keys, and generated where they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import build, ppo_config

from hybridflow.errors import ConfigError, DataError
from hybridflow.observability.trackers.jsonl import read_metrics
from hybridflow.protocol import DataProto
from hybridflow.trainer.schedules.skip import FROM_DUMP

ROLLOUT = "actor_rollout_ref.rollout"


def train(model: Path, run: Path, *overrides: str) -> tuple[list[DataProto], int]:
    """Train; return the rows of each step, and how often tokens were generated for training."""
    keys = (
        "algorithm.adv_estimator=grpo",
        "trainer.test_freq=-1",
        "data.val_files=[]",
        f"{ROLLOUT}.skip.enable=true",
        f"{ROLLOUT}.skip.dump_dir='{run.parent / 'dumps'}'",
    )
    seen: list[DataProto] = []
    calls = 0
    with build(ppo_config(model, run, *keys, *overrides)) as trainer:
        inner = trainer.step
        generate = trainer.source.pipeline.run_groups

        def step(batch: DataProto, number: int) -> Any:
            seen.append(batch.select())
            return inner(batch, number)

        def counted(*args: Any, **how: Any) -> Any:
            nonlocal calls
            calls += 1
            return generate(*args, **how)

        trainer.step = step  # type: ignore[assignment]
        trainer.source.pipeline.run_groups = counted  # type: ignore[method-assign]
        trainer.fit()
    return seen, calls


def same_rows(one: DataProto, other: DataProto) -> bool:
    return all(torch.equal(one.batch[name], other.batch[name]) for name in map(str, one.batch.keys()))


def test_a_second_run_reads_what_the_first_has_dumped(model: Path, tmp_path: Path) -> None:
    first, generated = train(model, tmp_path / "first")
    assert generated == 2
    # another learning rate is another policy, and the same rollouts
    second, generated = train(model, tmp_path / "second", "actor_rollout_ref.actor.optim.lr=1e-4")
    assert generated == 0 and all(map(same_rows, first, second))
    lines = read_metrics(tmp_path / "second" / "metrics.jsonl")
    assert [lines[step][FROM_DUMP] for step in (1, 2)] == [1.0, 2.0]
    assert FROM_DUMP not in read_metrics(tmp_path / "first" / "metrics.jsonl")[1]
    # what is not there is generated, with the prompts that follow
    third, generated = train(model, tmp_path / "third", "trainer.total_training_steps=3")
    assert generated == 1 and len(third) == 3
    prompts = [rows.batch["row_id"].tolist() for rows in third]
    assert len({row for rows in prompts for row in rows}) == 24
    _, generated = train(model, tmp_path / "fourth", f"{ROLLOUT}.temperature=0.7")
    assert generated == 2


def test_repeat_trains_on_the_dumps_over_and_over(model: Path, tmp_path: Path) -> None:
    repeat = (f"{ROLLOUT}.skip.action=repeat", "trainer.total_training_steps=5")
    with pytest.raises(DataError, match=r"skip\.action=cache first"):
        train(model, tmp_path / "early", *repeat)
    first, _ = train(model, tmp_path / "first")
    rows, generated = train(model, tmp_path / "again", *repeat)
    assert generated == 0 and len(rows) == 5
    assert all(same_rows(one, first[number % 2]) for number, one in enumerate(rows))


def test_a_changed_reward_file_is_another_reward(model: Path, tmp_path: Path) -> None:
    reward = tmp_path / "own.py"
    key = f"reward.custom_reward_function.path='{reward}'"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
    )
    assert train(model, tmp_path / "first", key)[1] == 2
    assert train(model, tmp_path / "second", key)[1] == 0
    reward.write_text(reward.read_text().replace("1.0", "2.0"))
    assert train(model, tmp_path / "third", key)[1] == 2


def test_what_cannot_go_together_is_refused(model: Path, tmp_path: Path) -> None:
    skip = f"{ROLLOUT}.skip.enable=true"
    with pytest.raises(ConfigError, match=r"set trainer\.schedule=sync"):
        ppo_config(model, tmp_path / "run", skip, "trainer.schedule=one_step_off")
    with pytest.raises(ConfigError, match=r"exact=auto"):
        ppo_config(model, tmp_path / "run", skip, f"{ROLLOUT}.exact=true")


def test_verls_keys_are_taken(model: Path, tmp_path: Path) -> None:
    old = ppo_config(model, tmp_path / "run", f"{ROLLOUT}.skip_rollout=true", f"{ROLLOUT}.skip_dump_dir=d")
    new = ppo_config(
        model,
        tmp_path / "run",
        "skip.rollout.enable=true",
        "skip.rollout.dump_dir=d",
        "skip.rollout.action=repeat",
    )
    skips = [config.actor_rollout_ref.rollout.skip for config in (old, new)]
    assert [(skip.enable, skip.dump_dir, skip.action) for skip in skips] == [
        (True, "d", "cache"),
        (True, "d", "repeat"),
    ]
