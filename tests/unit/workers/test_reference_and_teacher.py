"""The frozen policies: what they say, and how a reference becomes the actor."""

from __future__ import annotations

import torch
from worker_house import PLAN, House, prepared, rows


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
