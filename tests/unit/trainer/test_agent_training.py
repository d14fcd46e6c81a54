"""Training with an environment: rows of several turns, exact to the bit, and failures that are never rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny_trainer import build, ppo_config

from hybridflow.config import PPOConfig
from hybridflow.errors import ConfigError
from hybridflow.observability.trackers.jsonl import read_metrics
from hybridflow.protocol import DataProto

WORLD = """
from hybridflow.environments import Environment, Step
from hybridflow.tools import tool

class Echo(Environment):
    fails = ()

    def __init__(self, turns=3):
        self.left = turns

    def reset(self, row):
        self.sample = self.step_seed % 3
        return f"{self.seed % 10} + 1"

    def step(self, text):
        self.left -= 1
        digits = sum(c.isdigit() for c in text)
        return Step(text[:4] + "?", reward=digits / 10, done=not self.left, extra={"digits": digits})

class Brittle(Echo):
    def step(self, text):
        if self.step_seed % 2:
            raise ValueError("as ordered")
        return super().step(text)

class Broken(Echo):
    def reset(self, row):
        raise ValueError("as ordered")
"""
APART = "training/rollout_log_probs_diff_max"
SHORT = (
    "data.max_response_length=6",
    "actor_rollout_ref.rollout.max_model_len=120",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4",
    "actor_rollout_ref.rollout.agent.num_workers=0",
    "actor_rollout_ref.rollout.n=4",
    "data.task.name=null",
    "algorithm.adv_estimator=grpo",
)


def config(model: Path, run: Path, world: str, *overrides: str) -> PPOConfig:
    run.parent.mkdir(parents=True, exist_ok=True)
    (run.parent / "world.py").write_text(WORLD)
    environment = f"data.environment='{run.parent / 'world.py'}:{world}'"
    return ppo_config(model, run, *SHORT, environment, *overrides)


def first_batch(model: Path, run: Path, world: str, *overrides: str) -> tuple[DataProto, dict[str, float]]:
    with build(config(model, run, world, *overrides)) as trainer:
        made = trainer.source.next(1)
        return made.rows, made.metrics.to_floats()


def one_token_turns(*overrides: str) -> tuple[str, ...]:
    """Any token ends a turn, so that no turn is cut by its length and conversations go on."""
    ends = ",".join(map(str, range(112)))
    return (f"actor_rollout_ref.rollout.stop_token_ids=[{ends}]", *overrides)


def test_rows_have_given_tokens_between_sampled_ones(model: Path, tmp_path: Path) -> None:
    rows, metrics = first_batch(model, tmp_path / "run", "Echo", *one_token_turns())
    mask = rows.batch["response_mask"]
    attended = rows.batch["attention_mask"][:, -mask.shape[1] :].bool()
    assert len(rows) == 16 and not bool((mask & ~attended).any())
    given = attended & ~mask
    assert bool(given.any(-1).all()), "each conversation has several turns"
    assert bool((rows.batch["rollout_log_probs"][~mask] == 0).all())
    assert bool((rows.batch["policy_version"][~mask] == -1).all())
    assert metrics["agent/num_turns/mean"] == 3.0 and metrics["agent/num_rows/mean"] == 1.0
    assert metrics["agent/environment/digits"] >= 0
    prompts = [tuple(row) for row in rows.batch["prompts"].tolist()]
    assert set(Counter(prompts).values()) <= {4, 8, 12, 16}, "a group is asked the same"
    scores = rows.batch["token_level_scores"]
    for row, text in enumerate(rows.non_tensor_batch["extra_info"]):
        said = [message["content"] for message in text["messages"] if message["role"] == "assistant"]
        digits = [sum(letter.isdigit() for letter in each) / 10 for each in said]
        found = scores[row][mask[row]]
        assert torch.allclose(found, torch.tensor(digits)), "each turn has one token, with its own reward"


def test_generation_and_training_agree_to_the_bit_over_turns(model: Path, tmp_path: Path) -> None:
    made = config(model, tmp_path / "run", "Echo", *one_token_turns(), "actor_rollout_ref.rollout.exact=true")
    with build(made) as trainer:
        trainer.fit()
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl").values()
    logged = [metrics for metrics in steps if APART in metrics]
    assert len(logged) == 2
    assert [step[APART] for step in logged] == [0.0, 0.0]
    assert logged[0]["agent/num_turns/mean"] == 3.0 and "val-core/Echo/reward/mean@1" in logged[-1]
    assert logged[-1]["val-aux/agent/num_turns/mean"] == 3.0


def test_a_run_repeats_itself_whatever_comes_first(model: Path, tmp_path: Path) -> None:
    exact = "actor_rollout_ref.rollout.exact=true"
    first, _ = first_batch(model, tmp_path / "a" / "run", "Echo", *one_token_turns(exact))
    others = "actor_rollout_ref.rollout.agent.max_concurrent=3"
    second, _ = first_batch(model, tmp_path / "b" / "run", "Echo", *one_token_turns(exact, others))
    for name in ("input_ids", "response_mask", "rollout_log_probs", "token_level_scores", "row_id"):
        assert torch.equal(first.batch[name], second.batch[name]), name


def test_what_failed_is_counted_and_is_no_row(model: Path, tmp_path: Path) -> None:
    no_retries = "actor_rollout_ref.rollout.agent.retries.environment=0"
    rows, metrics = first_batch(model, tmp_path / "run", "Brittle", *one_token_turns(no_retries))
    failed = int(metrics["training/num_failed/environment"])
    assert 0 < failed < 16 and len(rows) == 16 - failed
    left = Counter(rows.non_tensor_batch["uid"])
    least = "actor_rollout_ref.rollout.agent.min_group_size=4"
    kept, counted = first_batch(model, tmp_path / "run2", "Brittle", *one_token_turns(no_retries, least))
    small = [uid for uid, size in left.items() if size < 4]
    assert small and set(kept.non_tensor_batch["uid"]) == set(left) - set(small)
    assert counted["training/num_small_groups"] == len(small)


def test_a_further_try_draws_anew(model: Path, tmp_path: Path) -> None:
    many = "actor_rollout_ref.rollout.agent.retries.environment=50"
    rows, metrics = first_batch(model, tmp_path / "run", "Brittle", *one_token_turns(many))
    assert len(rows) == 16 and metrics["agent/num_retried/environment"] > 0
    assert "training/num_failed/environment" not in metrics


def test_a_step_in_which_all_failed_learns_nothing_and_the_third_ends_the_run(
    model: Path, tmp_path: Path
) -> None:
    made = config(model, tmp_path / "run", "Broken", "trainer.total_training_steps=5", "trainer.test_freq=0")
    with pytest.raises(Exception, match=r"(?s)last 3 steps has failed.*as ordered"), build(made) as trainer:
        trainer.fit()


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["data.environment=gues"], "wanted one of .*guess"),
        (["data.environment=no/such.py:Guess"], "there is no file no/such.py"),
        (["data.environment=guess", "data.environment_options={wrong: 1}"], "do not fit"),
        (["data.environment=guess", "algorithm.adv_estimator=spin"], "learns from the data's own answers"),
        (
            ["data.environment=guess", "actor_rollout_ref.rollout.agent.min_group_size=9"],
            "no group would ever",
        ),
        (["actor_rollout_ref.rollout.multi_turn.format=morse"], "wanted auto or one of"),
        (["actor_rollout_ref.rollout.multi_turn.tool_config_path=none.yaml"], "there is no file none.yaml"),
    ],
)
def test_wrong_keys_are_refused(model: Path, tmp_path: Path, overrides: list[str], message: str) -> None:
    enable = "actor_rollout_ref.rollout.multi_turn.enable=true"
    keys = [*SHORT, "data.environment=guess", enable, *overrides]
    with pytest.raises(ConfigError, match=message), build(ppo_config(model, tmp_path / "run", *keys)):
        raise AssertionError("not refused")
