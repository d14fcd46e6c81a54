"""Rules about runs: each planted illness is found by its own rule with a key that exists, and no healthy
one."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.config import PPOConfig
from hybridflow.observability.advice import Advice, AdviceWatch, StallWatch

LEARNED = Path(__file__).parents[3] / "benchmarks" / "results" / "learn"
STEPS = 30
Metrics = dict[str, float]


def healthy(step: int) -> Metrics:
    """The metrics of a step of a run that learns."""
    part = step / STEPS
    return {
        "actor/entropy": 0.8 - 0.5 * part,
        "actor/ppo_kl": 0.002,
        "actor/kl_loss": 0.01 + 0.1 * part,
        "actor/reward_kl_penalty": 0.01 + 0.1 * part,
        "actor/num_skipped_steps": 0.0,
        "critic/score/mean": 0.4 + 0.4 * part,
        "critic/score/min": 0.0,
        "critic/score/max": 1.0,
        "response_length/mean": 100.0 + 40.0 * part,
        "response_length/clip_ratio": 0.1,
        "reward_watch/repetition": 0.05,
        "training/rollout_log_probs_diff_max": 1e-5,
        "training/rollout_probs_diff_mean": 1e-6,
        "training/zero_variance_groups": 0.2 + 0.2 * part,
        "training/num_trajectories": 128.0,
        "training/num_failed/environment": 1.0,
        "reward/num_errors": 0.0,
        "rollout/requests": 128.0,
        "rollout/preemptions": 2.0,
        "rollout/prefix_hit_ratio": 0.8,
        "agent/num_turns/mean": 3.0,
        "fully_async/rollouter/idle_ratio": 0.2,
        "fully_async/trainer/idle_ratio": 0.3,
        "perf/mfu/actor": 0.35,
        **({"val-core/task/acc/mean@1": 0.4 + 0.3 * part} if step % 5 == 0 else {}),
    }


def found_in(plant: Callable[[int, Metrics], Metrics]) -> dict[str, Advice]:
    """The advice of a whole run by rule, where `plant` makes each step ill."""
    watch = AdviceWatch()
    found = {}
    for step in range(1, STEPS + 1):
        metrics = healthy(step)
        for advice in watch.look(metrics | plant(step, metrics), step):
            found[advice.rule] = advice
    return found


def later(step: int, before: float, after: float) -> float:
    return before if step <= 12 else after


ILLNESSES: dict[str, tuple[str, Callable[[int, Metrics], Metrics], str]] = {
    "zero variance": (
        "zero_variance",
        lambda step, m: {"training/zero_variance_groups": 0.6},
        "algorithm.filter_groups.enable",
    ),
    "no variance at all": (
        "rewards",
        lambda step, m: {"critic/score/max": 0.0},
        "actor_rollout_ref.rollout.n",
    ),
    "truncation": (
        "truncated",
        lambda step, m: {"response_length/clip_ratio": 0.3},
        "data.max_response_length",
    ),
    "entropy gone": ("entropy", lambda step, m: {"actor/entropy": 1e-5}, "actor_rollout_ref.actor.optim.lr"),
    "entropy collapse": (
        "entropy",
        lambda step, m: {"actor/entropy": later(step, 0.8, 0.01), "critic/score/mean": 0.4},
        "actor_rollout_ref.actor.optim.lr",
    ),
    "KL blow-up of an update": (
        "kl",
        lambda step, m: {"actor/ppo_kl": later(step, 0.002, 0.9)},
        "actor_rollout_ref.actor.optim.lr",
    ),
    "KL blow-up against the reference": (
        "kl",
        lambda step, m: {"actor/kl_loss": later(step, 0.01, 3.0)},
        "actor_rollout_ref.actor.kl_loss_coef",
    ),
    "length blow-up": (
        "length",
        lambda step, m: {"response_length/mean": later(step, 100.0, 400.0), "critic/score/mean": 0.4},
        "data.max_response_length",
    ),
    "repetition": (
        "length",
        lambda step, m: {"reward_watch/repetition": 0.5},
        "reward.reward_kwargs.overlong_buffer_cfg.enable",
    ),
    "mismatch": (
        "log_probs",
        lambda step, m: {"training/rollout_log_probs_diff_max": 0.02},
        "algorithm.rollout_correction.rollout_is",
    ),
    "growing mismatch": (
        "log_probs",
        lambda step, m: {"training/rollout_probs_diff_mean": later(step, 1e-3, 1e-2)},
        "algorithm.rollout_correction.rollout_is",
    ),
    "idle engines": (
        "idle",
        lambda step, m: {"fully_async/rollouter/idle_ratio": 0.6},
        "trainer.async.run_ahead",
    ),
    "idle trainer": (
        "idle",
        lambda step, m: {"fully_async/trainer/idle_ratio": 0.7},
        "trainer.resource_pools",
    ),
    "cache thrash": (
        "cache",
        lambda step, m: {"rollout/preemptions": 40.0},
        "actor_rollout_ref.rollout.gpu_memory_utilization",
    ),
    "lost prefixes": (
        "cache",
        lambda step, m: {"rollout/prefix_hit_ratio": 0.02},
        "actor_rollout_ref.rollout.enable_prefix_caching",
    ),
    "hacking": (
        "hacking",
        lambda step, m: {name: 0.7 - 0.01 * step for name in m if name.startswith("val-core/")},
        "algorithm.use_kl_in_reward",
    ),
    "failed trajectories": (
        "failures",
        lambda step, m: {"training/num_failed/deadline": 20.0},
        "actor_rollout_ref.rollout.agent.deadline",
    ),
    "failed rewards": ("failures", lambda step, m: {"reward/num_errors": 20.0}, "reward.timeout"),
    "low MFU": (
        "mfu",
        lambda step, m: {"perf/mfu/actor": 0.05},
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    ),
    "skipped steps": (
        "skipped_steps",
        lambda step, m: {"actor/num_skipped_steps": 1.0},
        "actor_rollout_ref.actor.optim.lr",
    ),
}


@pytest.mark.parametrize(("rule", "plant", "key"), ILLNESSES.values(), ids=ILLNESSES)
def test_each_illness_is_found_by_its_rule_alone(
    rule: str, plant: Callable[[int, Metrics], Metrics], key: str
) -> None:
    found = found_in(plant)
    assert list(found) == [rule] and key in found[rule].keys
    assert key in str(found[rule]), "the message names the key"
    for name in found[rule].keys:
        assert_key_exists(name)


def assert_key_exists(path: str) -> None:
    config: object = PPOConfig()
    for part in path.split("."):
        assert dataclasses.is_dataclass(config), path
        names = {field.name.rstrip("_"): field.name for field in dataclasses.fields(config)}
        assert part in names, f"{path}: there is no {part}"
        config = getattr(config, names[part])


def test_a_healthy_run_gets_no_advice() -> None:
    assert found_in(lambda step, metrics: {}) == {}


def test_a_gap_that_is_corrected_is_no_illness() -> None:
    apart = {"training/rollout_log_probs_diff_max": 0.5}
    assert list(found_in(lambda step, metrics: apart)) == ["log_probs"]
    apart["rollout_corr/corrected"] = 1.0
    assert found_in(lambda step, metrics: {**apart, "rollout_corr/k3_kl": 0.05}) == {}
    far = found_in(lambda step, metrics: {**apart, "rollout_corr/k3_kl": 0.2})
    assert list(far) == ["log_probs"] and "0.2 nats a token apart" in str(far["log_probs"])
    for name in far["log_probs"].keys:
        assert_key_exists(name)


def test_runs_that_have_learned_get_no_advice() -> None:
    """Curves that `make learn` has recorded, of every algorithm and seed."""
    files = sorted(LEARNED.glob("*.json"))
    assert len(files) > 30
    for file in files:
        curves = json.loads(file.read_text())["curves"]
        watch = AdviceWatch()
        for step in range(len(curves["score"])):
            metrics = {
                "critic/score/mean": curves["score"][step],
                "response_length/mean": curves["length"][step],
            }
            if any(curves["entropy"]):  # else the algorithm has not measured it
                metrics["actor/entropy"] = curves["entropy"][step]
            assert watch.look(metrics, step) == [], file.name


def test_a_metric_that_is_no_number() -> None:
    found = found_in(lambda step, metrics: {"actor/pg_loss": math.nan})
    assert list(found) == ["not_finite"] and "actor/pg_loss" in found["not_finite"].message


def test_no_metrics_no_advice_and_hints_wait_for_health() -> None:
    assert AdviceWatch().look({}, 1) == []
    found = found_in(lambda step, m: {"rollout/preemptions": 99.0, "response_length/clip_ratio": 0.4})
    assert list(found) == ["truncated"], "tuning comes after what is wrong"


def test_advice_is_repeated_only_now_and_then() -> None:
    watch = AdviceWatch(repeat_every=3)
    bad = {"actor/entropy": 0.0}
    assert [bool(watch.look(bad, step)) for step in range(5)] == [True, False, False, True, False]


def test_a_resumed_run_compares_with_the_steps_before() -> None:
    watch = AdviceWatch()
    for _ in range(12):
        watch.history.add({"actor/ppo_kl": 0.002})
    said = [watch.look({"actor/ppo_kl": 2.0}, step) for step in range(13, 20)]
    assert [[advice.rule for advice in each] for each in said if each] == [["kl"]]


def test_a_part_of_a_step_that_takes_far_longer_than_before() -> None:
    running: Metrics = {}
    said: list[Advice] = []
    watch = StallWatch(lambda: dict(running), said.append)

    def after(seconds: float, section: str = "gen") -> int:
        running[section] = seconds
        watch.check()
        return len(said)

    assert after(1e6) == 0, "nothing is known of this section"
    running.clear()
    for _ in range(3):
        watch.finished({"timing_s/gen": 10.0, "timing_s/step": 20.0, "timing_s/adv": 0.01, "perf/x": 1.0})
    assert after(60.0) == 0 and after(25.0, "adv") == 0, "six times is allowed, and half a minute is no stall"
    assert after(61.0) == 1 and after(90.0) == 1, "it is said once"
    running.clear()
    watch.check()
    assert after(61.0) == 2, "and again in the next step"
    assert after(1e6, "step") == 2, "a step is as long as its parts"
    assert said[0].rule == "stall" and "timing_s/gen has taken 61 s" in said[0].message
    for name in said[0].keys:
        assert_key_exists(name)
