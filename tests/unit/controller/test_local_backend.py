from __future__ import annotations

import pytest
import torch

from hybridflow.controller import Dispatch, LocalBackend, RankInfo, Worker, WorkerGroup, register
from hybridflow.controller.local import TensorVersions, isolate
from hybridflow.errors import RolloutError
from hybridflow.protocol import DataProto


class Holder(Worker):
    def __init__(self, weights: list[float]) -> None:
        self.weights = weights

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def scale(self, tensors: dict[str, list[torch.Tensor]]) -> None:
        tensors["w"][1].mul_(2)


def test_roles_are_built_when_first_needed_and_may_share() -> None:
    built: list[str] = []

    def actor(info: RankInfo) -> Worker:
        built.append(info.role)
        return Holder([1.0])

    def rollout(info: RankInfo) -> Worker:
        built.append(info.role)
        owner = backend.worker("actor")
        assert isinstance(owner, Holder)
        return Holder(owner.weights)

    backend = LocalBackend(lambda host: {"actor": actor, "rollout": rollout})
    assert built == []
    shared = backend.worker("rollout")
    assert built == ["rollout", "actor"]
    assert isinstance(shared, Holder) and shared.weights is backend.worker("actor").weights  # type: ignore[attr-defined]
    assert (shared.role, shared.rank, shared.world_size) == ("rollout", 0, 1)


def test_every_worker_is_closed_at_the_end_also_where_one_cannot_be() -> None:
    closed: list[str] = []

    class Closing(Worker):
        def close(self) -> None:
            closed.append(self.role)
            if self.role == "rollout":
                raise RolloutError("it does not end")

    backend = LocalBackend(lambda host: dict.fromkeys(("actor", "rollout"), lambda info: Closing()))
    for role in ("actor", "rollout"):
        backend.worker(role)
    with pytest.raises(RolloutError, match="it does not end"):
        backend.shutdown()
    assert sorted(closed) == ["actor", "rollout"]
    backend.shutdown()
    assert len(closed) == 2, "they were dropped"


def test_building_reports_cycles_unknown_roles_and_the_role_that_failed() -> None:
    def needs(role: str) -> Worker:
        return backend.worker(role)

    def broken(info: RankInfo) -> Worker:
        raise ValueError("no weights")

    backend = LocalBackend(
        lambda host: {"a": lambda info: needs("b"), "b": lambda info: needs("a"), "broken": broken}
    )
    with pytest.raises(AssertionError, match="a → b → a"):
        backend.worker("a")
    with pytest.raises(AssertionError, match="no role 'critic'"):
        backend.worker("critic")
    with pytest.raises(ValueError, match="no weights") as caught:
        backend.worker("broken")
    assert caught.value.__notes__ == ["while building role 'broken', rank 0"]


def test_in_place_writes_are_named_wherever_the_tensor_hides() -> None:
    group = WorkerGroup[Holder](LocalBackend(lambda host: {"holder": lambda info: Holder([])}), "holder")
    with pytest.raises(AssertionError, match=r"holder\.scale wrote in place into tensors\.w\[1\]"):
        group.call(Holder.scale, tensors={"w": [torch.ones(1), torch.ones(1)]})


def test_a_write_through_a_view_is_seen() -> None:
    batch = DataProto.from_dict({"x": torch.zeros(4, 2), "y": torch.zeros(4)})
    versions = TensorVersions(batch)
    isolate(batch).batch["x"][1:, 0].fill_(1.0)
    assert versions.changed() == ["x"]


def test_isolated_values_share_tensors_and_nothing_else() -> None:
    batch = DataProto.from_dict({"x": torch.zeros(2)}, {"extra_info": [{"a": [1]}, {"a": [2]}]})
    copy = isolate(batch)
    assert copy.batch["x"].data_ptr() == batch.batch["x"].data_ptr()
    copy.non_tensor_batch["extra_info"][0]["a"].append(3)
    assert batch.non_tensor_batch["extra_info"][0] == {"a": [1]}


def test_inference_tensors_pass() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(2)
    assert TensorVersions(tensor).changed() == []
