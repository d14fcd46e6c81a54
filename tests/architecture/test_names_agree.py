"""The names that `config` checks without importing torch are those that the run finds in its tables."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, get_args

import pytest

from hybridflow.algorithms.advantages import ADVANTAGE_ESTIMATORS
from hybridflow.algorithms.aggregation import LossAggMode
from hybridflow.algorithms.kl import KL_KINDS
from hybridflow.algorithms.policy_losses import POLICY_LOSSES
from hybridflow.algorithms.policy_losses.types import GIVEN
from hybridflow.config import PPOConfig, SFTConfig, algorithm_names
from hybridflow.config.actor_rollout_ref import ActorConfig
from hybridflow.config.algorithm_names import ESTIMATORS
from hybridflow.config.checks.root import TRACKERS as TRACKER_NAMES
from hybridflow.config.data import TASKS, TaskConfig
from hybridflow.config.own_code import COLUMNS, LOSS_ARGUMENTS, loss_fault
from hybridflow.config.trainer import Tracker
from hybridflow.config.verl_keys import tables
from hybridflow.data.tasks import build_task
from hybridflow.observability.trackers.build import TRACKERS
from hybridflow.protocol.fields import FIELDS
from hybridflow.workers.losses import loss_parameters

PPO = ActorConfig()
FROM_THE_PAPER: dict[str, frozenset[str]] = {
    **dict.fromkeys(("gspo", "geo_mean", "gmpo", "cispo"), frozenset({"clip_low", "clip_high"})),
    **dict.fromkeys(("dppo_tv", "dppo_kl"), frozenset({"clip_c"})),
}
"""Parameters whose defaults in the loss are those of its paper and not of PPO."""


def test_estimators_and_what_they_need() -> None:
    assert list(ESTIMATORS) == list(ADVANTAGE_ESTIMATORS)
    for name, entry in ADVANTAGE_ESTIMATORS.items():
        facts = ESTIMATORS[name]
        assert set(facts.reads) == {*entry.needs, *entry.takes}, name
        assert facts.group == ("group_ids" in facts.reads and not facts.demonstration_rows), name


def test_arguments_and_columns_of_ones_own_estimator_and_loss() -> None:
    of_pairs = {"ref_log_prob_sum", "preference", "margin", "step_labels", "reference_point"}
    assert {name for name, row in FIELDS.items() if row.dtype != "object"} - of_pairs == {
        *COLUMNS,
        "repetition",
    }
    assert LOSS_ARGUMENTS == GIVEN
    signature = inspect.signature(POLICY_LOSSES["vanilla"].function)
    assert not loss_fault(signature, PPO) and "no uid" in loss_fault(inspect.signature(lambda uid: uid), PPO)


def test_losses_and_the_defaults_of_their_papers() -> None:
    assert list(algorithm_names.POLICY_LOSSES) == list(POLICY_LOSSES)
    for name, record in POLICY_LOSSES.items():
        facts = algorithm_names.POLICY_LOSSES[name]
        defaults = inspect.signature(record.function).parameters
        assert record.agg_mode == facts.agg_mode and record.agg_mode in get_args(LossAggMode), name
        shared = {"loss_agg_mode", "loss_scale_factor"}
        assert set(facts.reads) == {*record.keywords, *record.select_keywords} - shared, name
        assert set(facts.estimators) <= set(ESTIMATORS), name
        if "clip_low" in defaults:
            assert (facts.clip or (PPO.clip_low, PPO.clip_high)) == (
                defaults["clip_low"].default,
                defaults["clip_high"].default,
            ), name
        else:
            assert facts.clip is None, name


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_loss_gets_all_that_it_asks_for(name: str) -> None:
    """Its parameters come from the configuration under the same names, the rest are columns; and only what no
    key sets has no default.
    """
    record = POLICY_LOSSES[name]
    parameters = loss_parameters(PPO)
    assert {"loss_agg_mode", "loss_scale_factor"} <= set(record.keywords)
    columns = set(record.keywords) - set(parameters)
    assert columns == {"dpo": {"ref_log_prob", "group_ids", "trajectory_id"}}.get(
        name, {f"{name}_selected"} if record.select else set()
    )
    for keyword, argument in inspect.signature(record.function).parameters.items():
        if keyword in set(record.keywords) - columns - {
            "loss_agg_mode",
            "loss_scale_factor",
        } - FROM_THE_PAPER.get(name, frozenset()):
            assert argument.default == parameters[keyword], keyword
    if record.select is not None:
        assert set(record.select_arguments(parameters)) == keyword_only(record.select)


def test_kl_and_trackers() -> None:
    assert set(algorithm_names.KL_ESTIMATORS) == set(KL_KINDS)
    assert set(TRACKER_NAMES) == set(TRACKERS) == set(get_args(Tracker))


def keyword_only(function: Callable[..., Any]) -> set[str]:
    return {
        name
        for name, argument in inspect.signature(function).parameters.items()
        if argument.kind is argument.KEYWORD_ONLY
    }


@pytest.mark.parametrize("name", TASKS)
def test_tasks_are_built_by_their_names(name: str) -> None:
    assert len(build_task(TaskConfig(name=name)).rows("train", 2)) == 2


def test_no_name_is_both_there_and_refused() -> None:
    names: dict[str, Collection[str]] = {
        "algorithm.adv_estimator": ADVANTAGE_ESTIMATORS,
        "actor_rollout_ref.actor.policy_loss.loss_mode": POLICY_LOSSES,
    }
    for path, there in names.items():
        aliases = tables().value_aliases.get(path, {})
        assert not {*tables().refused_values.get(path, {}), *aliases} & set(there)
        assert set(aliases.values()) <= set(there)


def test_the_defaults_are_in_the_tables() -> None:
    ppo = PPOConfig()
    sft = SFTConfig()
    assert ppo.algorithm.adv_estimator in ADVANTAGE_ESTIMATORS
    assert ppo.actor_rollout_ref.actor.policy_loss.loss_mode in POLICY_LOSSES
    assert {*ppo.trainer.logger, *sft.trainer.logger} <= set(TRACKERS)
