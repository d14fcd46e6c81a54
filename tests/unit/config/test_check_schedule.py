"""Schedules: what follows from their keys, what cannot be, and what has no effect."""

from __future__ import annotations

from typing import get_args

import pytest
from possible_run import problem

from hybridflow.config import PPOConfig
from hybridflow.config.load import load_config, prepare_config
from hybridflow.config.resolve import resolve
from hybridflow.config.trainer import ScheduleName

NAMES = get_args(ScheduleName)
AHEAD = "trainer.async.run_ahead"
BOUND = "trainer.async.max_staleness"
CORRECTED = "algorithm.rollout_correction.rollout_is=token"
FILTER = "algorithm.filter_groups.enable=true"


def resolved(*overrides: str) -> tuple[float, int | None]:
    loaded = load_config(PPOConfig, overrides)
    keys = resolve(loaded.config, loaded.given)[0].trainer.async_
    return keys.run_ahead, keys.max_staleness


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ([], (0, 0)),
        (["trainer.schedule=one_step_off"], (1, 1)),
        (["trainer.schedule=one_step_off", f"{AHEAD}=0"], (0, 0)),
        (["trainer.schedule=exact_async", f"{AHEAD}=2"], (2, 2)),
        (["trainer.schedule=fully_async"], (1, 3)),
        (["trainer.schedule=fully_async", f"{AHEAD}=0.1"], (0.1, 1)),
        (["trainer.schedule=fully_async", f"{AHEAD}=0.5"], (0.5, 2)),
        (["trainer.schedule=colocated_async", f"{AHEAD}=0"], (0, 0)),
        (["trainer.schedule=colocated_async", f"{BOUND}=7"], (1, 7)),
    ],
)
def test_staleness_follows_from_the_schedule(overrides: list[str], wanted: tuple[float, int]) -> None:
    assert resolved(*overrides) == wanted


@pytest.mark.parametrize("schedule", NAMES)
def test_a_resolved_configuration_is_resolved_again_to_itself(schedule: str) -> None:
    ahead, bound = resolved(f"trainer.schedule={schedule}")
    assert resolved(f"trainer.schedule={schedule}", f"{AHEAD}={ahead}", f"{BOUND}={bound}") == (ahead, bound)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([f"{AHEAD}=1"], "run_ahead=1.0 has no effect with trainer.schedule=sync"),
        ([f"{BOUND}=2"], "max_staleness=2 has no effect"),
        (["trainer.async.partial_rollout=false"], "partial_rollout=false has no effect"),
        (["trainer.async.max_concurrent_groups=9"], "max_concurrent_groups=9 has no effect"),
        (["async_training.staleness_threshold=0.1"], "set trainer.schedule=one_step_off"),
        (["trainer.schedule=one_step_off", CORRECTED, f"{AHEAD}=2"], "exact_async for more steps"),
        (["trainer.schedule=exact_async", CORRECTED, f"{AHEAD}=1.5"], "set a whole number"),
        (["trainer.schedule=exact_async", CORRECTED, f"{BOUND}=3"], "leave trainer.async.max_staleness out"),
        (["trainer.schedule=fully_async", CORRECTED, f"{AHEAD}=2.5", f"{BOUND}=2"], "set it to 3 or more"),
        (["trainer.schedule=fully_async", CORRECTED, f"{AHEAD}=inf"], "wanted a number of steps"),
        (["trainer.schedule=exact_async", CORRECTED, FILTER, "data.gen_batch_size=64"], "never replaces"),
        (
            [
                *("trainer.schedule=colocated_async", CORRECTED, "trainer.placement.rollout=gen"),
                "trainer.resource_pools={train: [1], gen: [1]}",
            ],
            "generates on the actor's devices",
        ),
        (
            [
                *("trainer.schedule=fully_async", "algorithm.rollout_correction.bypass_mode=true"),
                *("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=gpg"),
            ],
            "loss_mode=gpg does not have",
        ),
    ],
)
def test_what_cannot_be_is_refused(base: list[str], overrides: list[str], says: str) -> None:
    assert says in problem(base, *overrides)


REPLAY = ("algorithm.use_pf_ppo=true", "algorithm.pf_ppo.max_age=2")


@pytest.mark.parametrize("schedule", NAMES)
def test_rows_that_are_trained_again_want_a_correction(base: list[str], schedule: str) -> None:
    keys = [*REPLAY, f"trainer.schedule={schedule}"]
    said = problem(base, *keys)
    assert "max_age=2 trains rows again that are up to 2 steps older, and nothing corrects" in said
    for key in ("rollout_is=token", "rollout_rs=token_k1", "bypass_mode=true"):
        assert f"algorithm.rollout_correction.{key}" in said
    for corrected in (CORRECTED, "algorithm.rollout_correction.bypass_mode=true"):
        prepare_config(PPOConfig, [*base, *keys, corrected])
    if schedule == "sync":
        prepare_config(PPOConfig, [*base, "algorithm.use_pf_ppo=true"])
        prepare_config(PPOConfig, [*base, "algorithm.pf_ppo.max_age=2"])  # a note says that nothing reads it


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            [
                *("algorithm.rollout_correction.bypass_mode=true", "algorithm.adv_estimator=grpo"),
                "actor_rollout_ref.actor.policy_loss.loss_mode=gpg",
            ],
            "max_age=2 trains rows again that are up to 2 steps older, and algorithm.rollout_correction."
            "bypass_mode=true leaves the correction to the ratio of the loss",
        ),
        (
            [
                CORRECTED,
                *(
                    "actor_rollout_ref.rollout.skip.enable=true",
                    "actor_rollout_ref.rollout.skip.action=repeat",
                ),
                "actor_rollout_ref.rollout.skip.dump_dir=/tmp/dumps",
            ],
            "skip.action=repeat gives the same rows again as new ones: set max_age=0",
        ),
        (
            [CORRECTED, "trainer.controller=ray", "trainer.num_collectors=3"],
            "max_age=2 keeps the rows of earlier steps in the driver and in checkpoints, and "
            "trainer.num_collectors=3 keeps them elsewhere: set one of them to 0",
        ),
    ],
)
def test_a_replay_buffer_excludes(base: list[str], overrides: list[str], says: str) -> None:
    assert says in problem(base, *REPLAY, *overrides)


@pytest.mark.parametrize("schedule", NAMES[1:])
def test_stale_tokens_want_a_correction_and_none_are_stale_without_run_ahead(
    base: list[str], schedule: str
) -> None:
    said = problem(base, f"trainer.schedule={schedule}")
    for key in ("rollout_is=token", "rollout_rs=token_k1", "bypass_mode=true"):
        assert f"algorithm.rollout_correction.{key}" in said
    for keys in (
        [CORRECTED],
        [
            "algorithm.rollout_correction.rollout_rs=token_k1",
            "algorithm.rollout_correction.rollout_rs_threshold=2",
        ],
        ["algorithm.rollout_correction.bypass_mode=true"],
        [f"{AHEAD}=0"],
    ):
        prepare_config(PPOConfig, [*base, f"trainer.schedule={schedule}", *keys])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["trainer.schedule=exact_async", "trainer.async.partial_rollout=true"], "is not read with"),
        (
            ["trainer.schedule=one_step_off", FILTER, "actor_rollout_ref.rollout.n=2"],
            "groups that are dropped are not replaced",
        ),
        (["trainer.schedule=fully_async", f"{AHEAD}=0.0001"], "less than one group"),
    ],
)
def test_keys_with_less_effect_than_they_seem_to_have_are_told(
    base: list[str], overrides: list[str], says: str
) -> None:
    notes = prepare_config(PPOConfig, [*base, CORRECTED, *overrides]).notes
    assert any(says in note for note in notes), notes
