"""Pushes of what an update has changed (`rollout.delta_push`): bits, bytes, replicas with another base."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_rollout_worker import EOS, LIMITS, actor_engine, folder, model, requests, tokens

from hybridflow.config.actor_rollout_ref import ActorConfig, RolloutConfig
from hybridflow.config.model import FSDPConfig, ModelConfig
from hybridflow.controller.local import LocalBackend
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.distributed.shards import Box
from hybridflow.engines.fsdp.engine import FSDPEngine
from hybridflow.models.files.size import size_of
from hybridflow.planner.memory import RoleEngine, engine_needs
from hybridflow.weight_sync.push import Delta
from hybridflow.workers import ActorGroup, ActorWorker, RolloutGroup, RolloutWorker
from hybridflow.workers.rollout_build import build_rollout_worker

__all__ = ["folder"]


class Apart(LocalBackend):
    """One process that says it is two."""

    def are_colocated(self, role: str, other: str) -> bool:
        return False


def groups(folder: str) -> tuple[ActorGroup, RolloutGroup, FSDPEngine, RolloutWorker]:
    engine = actor_engine(folder)
    house = Apart(
        lambda host: {
            "actor": lambda info: ActorWorker(
                engine, ActorConfig(), temperature=1.0, log_prob_limits=LIMITS, delta_push=True
            ),
            "rollout": lambda info: build_rollout_worker(
                RolloutConfig(), actor_engine=None, model=model(folder), eos_token_ids=EOS
            ),
        }
    )
    worker = house.worker("rollout")
    assert isinstance(worker, RolloutWorker)
    return ActorGroup(house, "actor"), RolloutGroup(house, "rollout"), engine, worker


@torch.no_grad()
def learn_a_little(engine: FSDPEngine) -> None:
    """An update that changes one element in eight of each weight."""
    for parameter in engine.module.parameters():
        parameter.view(-1)[::8].add_(0.5)


def same_weights(engine: FSDPEngine, worker: RolloutWorker) -> bool:
    theirs = dict(worker.engine.policy.named_parameters())  # type: ignore[attr-defined]
    return all(torch.equal(own, theirs[name]) for name, own in engine.module.named_parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (7,), (6, 5), (3, 4, 5)])
def test_a_delta_is_the_difference_to_the_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(0)
    old = torch.randn(shape, generator=draw).to(dtype)
    new = old.clone()
    new.view(-1)[::9] *= -1
    delta = Delta.between(old, new)
    if not isinstance(delta, Delta):
        assert len(new.view(-1)) < 8 and torch.equal(delta, new)
        return
    assert len(delta.places) == -(-new.numel() // 9)
    assert delta.nbytes == len(delta.places) * (4 + new.element_size()) < new.nbytes
    assert torch.equal(delta.write(old, Box.whole(shape)), new)
    for dim in range(len(shape)):
        for part in range(2):
            box = Box.whole(shape).cut(dim, part, 2)
            place = box.within(Box.whole(shape))
            assert torch.equal(delta.write(old[place], box), new[place])


def test_negative_zero_and_nan_are_differences_of_bits() -> None:
    old = torch.zeros(20)
    new = old.clone()
    new[3] = -0.0
    new[5] = float("nan")
    delta = Delta.between(old, new)
    assert isinstance(delta, Delta) and delta.places.tolist() == [3, 5]
    same = Delta.between(new, new)
    assert isinstance(same, Delta) and same.nbytes == 0


def test_few_bytes_travel_and_the_replica_has_the_actors_weights(folder: str) -> None:
    actor, rollout, engine, worker = groups(folder)
    whole = sum(parameter.nbytes for parameter in engine.module.parameters())
    rollout.update_from(actor, 1)
    assert rollout.pushed_bytes() == whole
    for version in (2, 3):
        learn_a_little(engine)
        rollout.update_from(actor, version)
        assert 0 < rollout.pushed_bytes() < 0.2 * whole
        assert same_weights(engine, worker) and worker.engine.policy_version == version
    rollout.update_from(actor, 4)  # an update that changed nothing
    assert rollout.pushed_bytes() == 0 and worker.engine.policy_version == 4
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(1.5)
    rollout.update_from(actor, 5)
    assert rollout.pushed_bytes() == pytest.approx(whole, rel=0.01), "a whole tensor takes fewer bytes"
    assert same_weights(engine, worker)


def test_the_plan_has_the_copy_that_the_sender_keeps(folder: str) -> None:
    actor, rollout, _, _ = groups(folder)
    rollout.update_from(actor, 1)
    sent = actor.backend.worker("actor")._export._sent  # type: ignore[attr-defined]
    keys = ModelConfig(path=folder)
    size = size_of("policy", keys, dtype="float64", device=torch.device("cpu"))
    engine = RoleEngine("actor", ParallelLayout(), FSDPConfig(), keys, rows=8, longest=64, keeps_sent=True)
    (part,) = engine_needs(engine, size, device="cuda").parts[-1:]
    assert (part.label, part.size, part.on_host) == ("weights sent last", sent.nbytes, True)
    here = engine_needs(engine, size, device="cpu").between
    assert here == engine_needs(replace(engine, keeps_sent=False), size, device="cpu").between + sent.nbytes


@pytest.mark.parametrize("lost", ["version", "weight"])
def test_a_replica_with_another_base_gets_whole_weights(folder: str, lost: str) -> None:
    actor, rollout, engine, worker = groups(folder)
    whole = sum(parameter.nbytes for parameter in engine.module.parameters())
    rollout.update_from(actor, 1)
    learn_a_little(engine)
    rollout.pushed_bytes()
    if lost == "version":
        worker.engine.set_version(0)
    else:
        with torch.no_grad():
            next(worker.engine.policy.parameters()).view(-1)[1] += 1  # type: ignore[attr-defined]
    rollout.update_from(actor, 2)
    assert rollout.pushed_bytes() == whole
    assert same_weights(engine, worker) and worker.engine.policy_version == 2
    learn_a_little(engine)
    rollout.update_from(actor, 3)
    assert rollout.pushed_bytes() < whole and same_weights(engine, worker)


def test_staged_weights_are_whole_and_the_next_push_is_what_has_changed(folder: str) -> None:
    actor, rollout, engine, worker = groups(folder)
    whole = sum(parameter.nbytes for parameter in engine.module.parameters())
    rollout.update_from(actor, 1)
    learn_a_little(engine)
    first = rollout.stage(actor, 2)
    learn_a_little(engine)
    second = rollout.stage(actor, 3)
    rollout.pushed_bytes()
    rollout.take(first)
    rollout.take(second)
    assert same_weights(engine, worker) and rollout.pushed_bytes() == 2 * whole
    learn_a_little(engine)
    rollout.update_from(actor, 4)
    assert same_weights(engine, worker) and rollout.pushed_bytes() < 0.2 * whole


def test_a_damaged_delta_is_found(folder: str) -> None:
    actor, rollout, engine, worker = groups(folder)
    rollout.update_from(actor, 1)
    before = tokens(rollout.generate(requests()).outputs)
    weights = {name: each.clone() for name, each in worker.engine.policy.named_parameters()}  # type: ignore[attr-defined]
    learn_a_little(engine)
    (share,) = actor.call_each(ActorWorker.export_buckets, [2])
    name, delta = next((name, each) for name, each in share.tensors.items() if isinstance(each, Delta))
    wrong = replace(delta, places=delta.places + 1)
    assert worker.update_weights([replace(share, tensors={**share.tensors, name: wrong})], version=2) is None
    assert worker.engine.policy_version == 1
    assert tokens(rollout.generate(requests()).outputs) == before, "it goes on with its weights"
    now = dict(worker.engine.policy.named_parameters())  # type: ignore[attr-defined]
    assert all(torch.equal(each, now[name]) for name, each in weights.items())
