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
