"""Names that `config` checks without importing torch are those of the tables that the run looks them up in."""

from __future__ import annotations

from typing import get_args

import pytest

from hybridflow.algorithms.advantages import ADVANTAGE_ESTIMATORS
from hybridflow.algorithms.kl import KL_KINDS
from hybridflow.algorithms.policy_losses import POLICY_LOSSES
from hybridflow.config import PPOConfig, SFTConfig, algorithm_names
from hybridflow.config import check as checks
from hybridflow.config.algorithm_names import ESTIMATORS
from hybridflow.config.aliases import VALUE_ALIASES
from hybridflow.config.check_paths import TASKS
from hybridflow.config.data import TaskConfig
from hybridflow.config.trainer import Tracker
from hybridflow.config.verl_rules import REFUSED_VALUES
from hybridflow.data.tasks import build_task
from hybridflow.observability.trackers.build import TRACKERS


def test_estimators_and_what_they_need() -> None:
    assert list(ESTIMATORS) == list(ADVANTAGE_ESTIMATORS)
    for name, entry in ADVANTAGE_ESTIMATORS.items():
        facts = ESTIMATORS[name]
        assert (facts.critic, facts.group) == (entry.needs_critic, entry.needs_group), name
        assert facts.teacher == ("teacher_log_probs" in entry.needs), name
        assert facts.process_rewards == ("process_rewards" in entry.needs), name


def test_losses_kl_and_trackers() -> None:
    assert set(algorithm_names.POLICY_LOSSES) == set(POLICY_LOSSES)
    assert set(algorithm_names.KL_ESTIMATORS) == set(KL_KINDS)
    assert set(checks.TRACKERS) == set(TRACKERS) == set(get_args(Tracker))


@pytest.mark.parametrize("name", TASKS)
def test_tasks_are_built_by_their_names(name: str) -> None:
    assert len(build_task(TaskConfig(name=name)).rows("train", 2)) == 2


def test_no_name_is_both_there_and_refused() -> None:
    names = {"algorithm.adv_estimator": ADVANTAGE_ESTIMATORS, "actor_rollout_ref.actor.policy_loss.loss_mode": POLICY_LOSSES}
    for path, there in names.items():
        assert not {*REFUSED_VALUES.get(path, {}), *VALUE_ALIASES.get(path, {})} & set(there)
        assert set(VALUE_ALIASES.get(path, {}).values()) <= set(there)


def test_the_defaults_are_in_the_tables() -> None:
    ppo, sft = PPOConfig(), SFTConfig()
    assert ppo.algorithm.adv_estimator in ADVANTAGE_ESTIMATORS
    assert ppo.actor_rollout_ref.actor.policy_loss.loss_mode in POLICY_LOSSES
    assert {*ppo.trainer.logger, *sft.trainer.logger} <= set(TRACKERS)
