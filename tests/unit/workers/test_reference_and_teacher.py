"""The frozen policies: what they say, and how a reference becomes the actor."""

from __future__ import annotations

import numpy as np
import torch
from worker_house import LIMITS, PLAN, House, llama, prepared, rows

from hybridflow.engines.fsdp.engine import FSDPEngine
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import TOP_OUTCOMES
from hybridflow.workers.reference import TEACHER_COLUMN, ReferenceWorker


def test_a_teacher_says_its_own_log_probs_in_its_own_column() -> None:
    house, batch = House(), rows()
    said = house.teacher.log_probs(batch)
    assert set(said.batch.keys()) == {"teacher_log_probs"}
    column = said.batch["teacher_log_probs"]
    assert column.shape == batch.batch["responses"].shape and column.dtype == torch.float32
    assert not column[~batch.batch["response_mask"]].any() and bool(
        (column[batch.batch["response_mask"]] < 0).all()
    )
    assert not torch.equal(column, house.actor.log_probs(batch).batch["old_log_probs"]), (
        "it has weights of its own"
    )


def test_a_reference_becomes_the_actor_in_place_and_then_stands_still() -> None:
    house = House()
    batch, storage = prepared(house), [parameter.data_ptr() for parameter in house.frozen.parameters()]
    house.actor.update(batch, PLAN)
    assert torch.equal(house.reference.log_probs(batch).batch["ref_log_prob"], batch.batch["ref_log_prob"])
    house.reference.copy_from(house.actor)
    moved = house.reference.log_probs(batch).batch["ref_log_prob"]
    assert torch.equal(moved, house.actor.log_probs(batch).batch["old_log_probs"])
    assert not torch.equal(moved, batch.batch["ref_log_prob"])
    house.actor.update(batch, PLAN)
    assert torch.equal(house.reference.log_probs(batch).batch["ref_log_prob"], moved), (
        "a copy, not the actor's own tensors"
    )
    assert [parameter.data_ptr() for parameter in house.frozen.parameters()] == storage
    assert not any(parameter.requires_grad for parameter in house.frozen.parameters())


def test_weights_are_the_model_alone() -> None:
    house = House()
    assert set(house.actor.weights()) == set(house.policy.state_dict())


def test_rows_have_the_teacher_of_their_data_source() -> None:
    engines = [
        FSDPEngine(PolicyModel(llama(seed=seed)).requires_grad_(False), name="teacher", optim=None)
        for seed in (1, 2, 3)
    ]

    def worker(engine: FSDPEngine, others: dict[str, FSDPEngine] | None = None) -> ReferenceWorker:
        return ReferenceWorker(
            engine, temperature=0.7, limits=LIMITS, column=TEACHER_COLUMN, top=(3, 32), others=others
        )

    batch = rows()
    sources = np.array(["maths", "code", "other", "maths", "other", "code"], dtype=object)
    batch |= DataProto.from_dict({}, {"data_source": sources})
    told = worker(engines[0], {"code": engines[1], "maths": engines[2], "nobody": engines[1]}).log_probs(
        batch
    )
    assert len(told) == len(batch)
    by_source = {"other": 0, "code": 1, "maths": 2}
    for place, source in enumerate(sources):
        alone = worker(engines[by_source[source]]).log_probs(batch)
        for name in (TEACHER_COLUMN, TOP_OUTCOMES):
            torch.testing.assert_close(told.batch[name][place], alone.batch[name][place])
