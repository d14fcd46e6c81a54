"""The schedule in words follows the keys."""

from __future__ import annotations

from hybridflow.config import PPOConfig
from hybridflow.config.load import load_config
from hybridflow.config.resolve import resolve
from hybridflow.explain.run import schedule_lines

IS = "algorithm.rollout_correction.rollout_is=token"


def said(*overrides: str) -> dict[str, tuple[str, str]]:
    loaded = load_config(PPOConfig, ["data.train_batch_size=8", *overrides])
    config, _ = resolve(loaded.config, loaded.given)
    return {line.label: (line.value, line.how) for line in schedule_lines(config)}


def test_sync_is_one_line() -> None:
    lines = said()
    assert list(lines) == ["schedule"] and "between two updates" in lines["schedule"][1]


def test_collectors_are_told() -> None:
    lines = said("trainer.num_collectors=3", "trainer.controller=ray")
    assert lines["groups are played by"][0] == "3 collectors"


def test_a_replay_buffer_is_counted() -> None:
    lines = said(
        *("algorithm.use_pf_ppo=true", "algorithm.pf_ppo.max_age=3", "actor_rollout_ref.rollout.n=4"),
        *("data.max_prompt_length=100", "data.max_response_length=200", IS),
    )
    value, how = lines["rows of earlier steps that a step may draw, at most"]
    assert value == "96" and "every pass reads 4 batches, an update one" in how  # 3 × 8 × 4
    size = 96 * (17 * 100 + 35 * 200)
    assert lines["replay buffer in the driver's memory, at most"][0] == f"{size / 1024:.0f} KiB"
    assert lines["the loss corrects rows of earlier steps by"][1].endswith("rollout_is=token")
    assert "replay buffer in the driver's memory, at most" not in said("algorithm.pf_ppo.max_age=3")


def test_an_exact_schedule_says_how_old_its_tokens_are() -> None:
    lines = said("trainer.schedule=exact_async", "trainer.async.run_ahead=2", IS)
    assert "weights of 2 training steps before" in lines["schedule"][1]
    assert lines["staleness of a token, at most"][0] == "2"
    assert lines["groups generated and not yet trained, at most"][0] == "24"
    assert lines["new weights wait for"][0] == "the groups of their batch"
    assert lines["the loss corrects stale tokens by"][1].endswith("rollout_is=token")


def test_a_continuous_schedule_says_what_bounds_it() -> None:
    lines = said("trainer.schedule=fully_async", "trainer.async.run_ahead=0.5", IS)
    assert lines["staleness of a token, at most"][0] == "2"
    assert lines["groups generated and not yet trained, at most"][0] == "12"
    assert lines["new weights wait for"][0] == "the next token"
    whole = said("trainer.schedule=colocated_async", "trainer.async.partial_rollout=false", IS)
    assert whole["new weights wait for"][0] == "all responses that were begun"
    fresh = said("trainer.schedule=fully_async", "trainer.async.run_ahead=0")
    assert fresh["staleness of a token, at most"][0] == "0"
    assert "the loss corrects stale tokens by" not in fresh
