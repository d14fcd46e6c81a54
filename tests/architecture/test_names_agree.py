"""What stands at two places of the source because one of them must not import the other agrees."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Collection
from typing import get_args

import pytest

from hybridflow.algorithms.advantages import ADVANTAGE_ESTIMATORS
from hybridflow.algorithms.catalog import AGGREGATIONS, ESTIMATORS, LossAggMode
from hybridflow.algorithms.catalog import POLICY_LOSSES as LOSS_FACTS
from hybridflow.algorithms.policy_losses import POLICY_LOSSES
from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.actor_rollout_ref import ActorConfig
from hybridflow.config.checks.root import TRACKERS as TRACKER_NAMES
from hybridflow.config.data import TASKS, TaskConfig
from hybridflow.config.own_code import COLUMNS, loss_fault
from hybridflow.config.trainer import Tracker
from hybridflow.config.verl_keys import tables
from hybridflow.data.tasks import build_task
from hybridflow.observability.trackers.build import TRACKERS
from hybridflow.protocol.fields import FIELDS
from hybridflow.workers.losses import loss_parameters

PPO = ActorConfig()


def test_the_catalog_is_read_without_torch_and_a_function_imports_its_module_alone() -> None:
    code = (
        "import sys\n"
        "from hybridflow.algorithms.catalog import ESTIMATORS, POLICY_LOSSES, load\n"
        "for facts in (*ESTIMATORS.values(), *POLICY_LOSSES.values()):\n"
        "    assert facts.described.formula and facts.described.papers and facts.described.arguments\n"
        "assert 'torch' not in sys.modules\n"
        "assert load(ESTIMATORS['rloo'].path).__name__ == 'rloo'\n"
        "modules = {name.rpartition('.')[2] for name in sys.modules if '.algorithms.advantages.' in name}\n"
        "assert modules == {'groups', 'rloo', 'types'}, modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_what_the_source_of_an_estimator_says_is_its_signature(name: str) -> None:
    entry = ADVANTAGE_ESTIMATORS[name]
    assert set(ESTIMATORS[name].reads) == {*entry.needs, *entry.takes}


def test_columns_of_ones_own_estimator_and_loss() -> None:
    of_pairs = {"ref_log_prob_sum", "preference", "margin", "step_labels", "reference_point"}
    assert {name for name, row in FIELDS.items() if row.dtype != "object"} - of_pairs == {
        *COLUMNS,
        "repetition",
    }
    signature = inspect.signature(POLICY_LOSSES["vanilla"].function)
    assert not loss_fault(signature, PPO) and "no uid" in loss_fault(inspect.signature(lambda uid: uid), PPO)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_loss_gets_all_that_it_asks_for(name: str) -> None:
    """Its parameters come from the configuration under the same names, the rest are columns; and the defaults
    of both are the same but for those of its paper.
    """
    record = POLICY_LOSSES[name]
    facts = LOSS_FACTS[name]
    parameters = loss_parameters(PPO)
    assert record.agg_mode in AGGREGATIONS and set(facts.estimators) <= set(ESTIMATORS)
    assert set(facts.reads) == {*record.keywords, *facts.selects} - {"loss_agg_mode"}
    columns = set(record.keywords) - set(parameters)
    assert columns == {"dpo": {"ref_log_prob", "group_ids", "trajectory_id"}}.get(
        name, {f"{name}_selected"} if record.select else set()
    )
    of_the_paper = {"loss_agg_mode"}
    if facts.clip is not None:
        of_the_paper |= {"clip_low", "clip_high"}
    if facts.clip_c is not None:
        of_the_paper.add("clip_c")
    for keyword, argument in inspect.signature(record.function).parameters.items():
        if keyword in set(record.keywords) - columns - of_the_paper:
            assert argument.default == parameters[keyword], keyword
    assert set(record.select_arguments(parameters)) == set(facts.selects)


def test_ways_to_aggregate_and_trackers() -> None:
    assert set(AGGREGATIONS) == set(get_args(LossAggMode))
    assert set(TRACKER_NAMES) == set(TRACKERS) == set(get_args(Tracker))


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
