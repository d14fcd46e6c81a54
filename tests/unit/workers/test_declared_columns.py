"""The columns that worker methods declare: each is in the field table, each is read, and no other is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from worker_house import House, prepared

from hybridflow.algorithms.aggregation import LossScale
from hybridflow.controller.dispatch import registration_of
from hybridflow.protocol import FIELDS, BatchError, DataProto
from hybridflow.workers import ActorWorker, CriticWorker, ProcessRewardWorker, ReferenceWorker
from hybridflow.workers.sft import SFTWorker

METHODS: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "actor.log_probs": ("actor", ActorWorker.log_probs, {}),
    "actor.measure": ("actor", ActorWorker.measure, {}),
    "actor.update": ("actor", ActorWorker.update_mini_batch, {}),
    "critic.values": ("critic", CriticWorker.values, {}),
    "critic.update": ("critic", CriticWorker.update_mini_batch, {}),
    "reference.log_probs": ("reference", ReferenceWorker.log_probs, {}),
    "teacher.log_probs": ("teacher", ReferenceWorker.log_probs, {}),
    "process_reward.rewards": ("process_reward", ProcessRewardWorker.rewards, {}),
    "process_reward.update": ("process_reward", ProcessRewardWorker.update_mini_batch, {}),
    "sft.update": ("sft", SFTWorker.update, {}),
    "sft.evaluate": ("sft", SFTWorker.evaluate, {}),
}
NOT_NEEDED = {"uid"}
"""Columns that only the rows kept of a skipped step show."""


@pytest.mark.parametrize("name", METHODS)
def test_a_method_reads_the_columns_that_it_declares_and_no_others(name: str) -> None:
    role, method, arguments = METHODS[name]
    declared = registration_of(method)
    assert declared.reads is not None
    assert {*declared.reads, *(declared.writes or ())} <= FIELDS.keys()
    house = House()
    batch = prepared(house)
    if "update" in name:
        arguments = arguments | {"scale": LossScale.count(batch.batch["loss_mask"])}
    bound = getattr(house.backend.worker(role), method.__name__)

    rows = declared.columns_read(batch)
    assert {*rows.batch.keys(), *rows.non_tensor_batch} == {*declared.reads}
    declared.check_written(bound(rows, **arguments))
    for column in {*declared.reads} - NOT_NEEDED:
        with pytest.raises(KeyError, match=column):
            bound(_without(rows, column), **arguments)
        with pytest.raises(BatchError, match=f"'{column}'"):
            declared.columns_read(_without(rows, column))


def _without(rows: DataProto, column: str) -> DataProto:
    kept = rows.select()
    kept.pop([column])
    return kept
