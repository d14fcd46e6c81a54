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
Value = float | tuple[float, float]


def healthy(step: int) -> Metrics:
    """The metrics of a step of a run that learns."""
    part = step / STEPS
    return {
        "actor/entropy": 0.8 - 0.5 * part,
        "actor/ppo_kl": 0.002,
        "actor/kl_loss": 0.01 + 0.1 * part,
        "actor/kl_clamped_fraction": 0.01,
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


ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
FLAT: dict[str, Value] = {"critic/score/mean": 0.4}
ILLNESSES: dict[str, tuple[str, str, dict[str, Value]]] = {
    "no variance at all": ("rewards", f"{ROLLOUT}.n", {"critic/score/max": 0.0}),
    "zero variance": (
        *("zero_variance", "algorithm.filter_groups.enable"),
        {"training/zero_variance_groups": 0.6},
    ),
    "truncation": ("truncated", "data.max_response_length", {"response_length/clip_ratio": 0.3}),
    "entropy gone": ("entropy", f"{ACTOR}.optim.lr", {"actor/entropy": 1e-5}),
    "entropy collapse": ("entropy", f"{ACTOR}.optim.lr", {"actor/entropy": (0.8, 0.01), **FLAT}),
    "KL blow-up of an update": ("kl", f"{ACTOR}.optim.lr", {"actor/ppo_kl": (0.002, 0.9)}),
    "KL blow-up against the reference": ("kl", f"{ACTOR}.kl_loss_coef", {"actor/kl_loss": (0.01, 3.0)}),
    "KL at its clamp in the loss": (
        *("kl_clamped", f"{ACTOR}.kl_loss_type"),
        {"actor/kl_clamped_fraction": 0.2},
    ),
    "KL at its clamp in the reward": (
        *("kl_clamped", "algorithm.kl_penalty"),
        {"actor/reward_kl_clamped_fraction": 0.2},
    ),
    "length": ("length", "data.max_response_length", {"response_length/mean": (100.0, 400.0), **FLAT}),
    "repetition": (
        *("length", "reward.reward_kwargs.overlong_buffer_cfg.enable"),
        {"reward_watch/repetition": 0.5},
    ),
    "mismatch": (
        *("log_probs", "algorithm.rollout_correction.rollout_is"),
        {"training/rollout_log_probs_diff_max": 0.02},
    ),
    "growing mismatch": (
        *("log_probs", "algorithm.rollout_correction.rollout_is"),
        {"training/rollout_probs_diff_mean": (1e-3, 1e-2)},
    ),
    "idle engines": ("idle", "trainer.async.run_ahead", {"fully_async/rollouter/idle_ratio": 0.6}),
    "idle trainer": ("idle", "trainer.resource_pools", {"fully_async/trainer/idle_ratio": 0.7}),
    "cache thrash": ("cache", f"{ROLLOUT}.gpu_memory_utilization", {"rollout/preemptions": 40.0}),
    "lost prefixes": ("cache", f"{ROLLOUT}.enable_prefix_caching", {"rollout/prefix_hit_ratio": 0.02}),
    "hacking": ("hacking", "algorithm.use_kl_in_reward", {"val-core/task/acc/mean@1": (0.7, 0.4)}),
    "failed trajectories": (
        *("failures", f"{ROLLOUT}.agent.deadline"),
        {"training/num_failed/deadline": 20.0},
    ),
    "failed rewards": ("failures", "reward.timeout", {"reward/num_errors": 20.0}),
    "low MFU": ("mfu", f"{ACTOR}.ppo_max_token_len_per_gpu", {"perf/mfu/actor": 0.05}),
    "skipped steps": ("skipped_steps", f"{ACTOR}.optim.lr", {"actor/num_skipped_steps": 1.0}),
}
"""The rule that finds it, a key that it names, and metrics: always, or before and after step 12."""


@pytest.mark.parametrize(("rule", "key", "values"), ILLNESSES.values(), ids=ILLNESSES)
def test_each_illness_is_found_by_its_rule_alone(rule: str, key: str, values: dict[str, Value]) -> None:
    def plant(step: int, metrics: Metrics) -> Metrics:
        return {
            name: value[step > 12] if isinstance(value, tuple) else value
            for name, value in values.items()
            if not name.startswith("val-core/") or name in metrics
        }

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
    for step in range(1, 13):
        watch.history.add({"actor/ppo_kl": 0.002}, step)
    said = [watch.look({"actor/ppo_kl": 2.0}, step) for step in range(13, 20)]
    assert [[advice.rule for advice in each] for each in said if each] == [["kl"]]


def test_a_late_validation_is_compared_with_the_training_score_of_its_step() -> None:
    said = {}
    for late in (0, 4):
        watch = AdviceWatch()
        for step in range(1, 24):
            score = 0.4 if step < 10 else 0.8
            found = watch.look({"critic/score/mean": score}, step)
            for validated, value in ((6, 0.7), (16, 0.3)):
                if step == validated + late:
                    found += watch.look({"val-core/task/acc/mean@1": value}, validated)
            said |= {(late, advice.rule): advice.message for advice in found}
    assert {rule for _, rule in said} == {"hacking"}
    assert "score rose from 0.4 to 0.8" in said[0, "hacking"] and said[4, "hacking"] == said[0, "hacking"]


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
