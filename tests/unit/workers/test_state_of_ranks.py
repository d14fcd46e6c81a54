"""What the ranks of one role do together with their state: files and failures of all are known to all,
weights go from rank to rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hybridflow.checkpoint import sharded
from hybridflow.checkpoint.manifest import FileDigest, file_digest
from hybridflow.checkpoint.state import write_tensors
from hybridflow.controller import LocalBackend
from hybridflow.errors import CheckpointError
from hybridflow.workers.state import StatefulGroup, StatefulWorker
from ranks import Ranks

PARTS = ("model", "scheduler")


class Sharded:
    """An engine of one parameter [5, 2], rows spread over two ranks."""

    def __init__(self, scale: float, rows: int = 5) -> None:
        whole = scale * torch.arange(2.0 * rows).reshape(rows, 2)
        self.weight = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])

    def state_dict(self) -> dict[str, Any]:
        return {"model": {"w": self.weight}, "optimizer": {}, "scheduler": {"num_steps": 3}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert isinstance(state["model"]["w"], DTensor)
        self.weight.copy_(state["model"]["w"])


def save_and_load(rank: int, folder: str) -> tuple[dict[str, FileDigest], dict[str, FileDigest], bool]:
    worker = StatefulWorker(Sharded(1.0))
    at_once = worker.save(f"{folder}/at_once", PARTS)
    worker.start_save(f"{folder}/beside", PARTS)
    worker.engine.weight.zero_()
    beside = worker.finish_save()
    worker.load(f"{folder}/beside", PARTS)
    return (
        dict(at_once),
        dict(beside),
        bool(worker.engine.weight.full_tensor().equal(Sharded(1.0).weight.full_tensor())),
    )


def test_every_rank_knows_the_digests_of_all(two_ranks: Ranks, tmp_path: Path) -> None:
    (at_once, beside, same), other = two_ranks.run(save_and_load, str(tmp_path))
    assert other == (at_once, beside, True) and same
    assert (
        at_once
        == beside
        == {
            path.name: FileDigest(path.stat().st_size, file_digest(path))
            for path in (tmp_path / "beside").iterdir()
        }
    )
    assert len(at_once) == 4


def fail_on_one(rank: int, folder: str) -> list[str]:
    def full_disk(path: Path, tensors: Any) -> Any:
        if rank == 1:
            raise OSError(28, "No space left on device", str(path))
        return write_tensors(path, tensors)

    told = []
    sharded.write_tensors = full_disk  # type: ignore[assignment]
    try:
        worker = StatefulWorker(Sharded(1.0))
        worker.start_save(folder, PARTS)
        for save in (worker.finish_save, lambda: worker.save(folder, PARTS)):
            try:
                save()
            except CheckpointError as error:
                told.append(str(error))
    finally:
        sharded.write_tensors = write_tensors
    return [*told, str(worker.save_done())]


def test_every_rank_is_told_which_could_not_write(two_ranks: Ranks, tmp_path: Path) -> None:
    for beside, at_once, done in two_ranks.run(fail_on_one, str(tmp_path / "actor")):
        assert beside.startswith("rank 1: ") and "No space left on device" in beside
        assert "rank 1: " in at_once and "No space left on device" in at_once and done == "True"


def take_over(rank: int) -> tuple[bool, str]:
    actor, reference, other = (
        StatefulWorker(engine) for engine in (Sharded(2.0), Sharded(0.0), Sharded(0.0, rows=7))
    )
    reference.take_weights(actor.weights())
    try:
        other.take_weights(actor.weights())
    except CheckpointError as error:
        return bool(reference.engine.weight.full_tensor().equal(actor.engine.weight.full_tensor())), str(
            error
        )
    raise AssertionError("weights of another shape were taken")


def test_weights_go_from_rank_to_rank(two_ranks: Ranks) -> None:
    for same, told in two_ranks.run(take_over):
        assert same and "w is not the same on rank" in told and "fsdp_size" in told


def test_a_group_copies_another() -> None:
    class Whole:
        def __init__(self, value: float) -> None:
            self.weight = torch.full((3,), value)

        def state_dict(self) -> dict[str, Any]:
            return {"model": {"w": self.weight}}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.weight.copy_(state["model"]["w"])

    engines = {"actor": Whole(2.0), "reference": Whole(1.0)}
    backend = LocalBackend(
        lambda host: {role: lambda info, role=role: StatefulWorker(engines[role]) for role in engines}
    )
    actor, reference = (StatefulGroup[StatefulWorker](backend, role) for role in engines)
    reference.copy_from(actor)
    assert engines["reference"].weight.eq(2.0).all()
    engines["actor"].weight.fill_(3.0)
    assert engines["reference"].weight.eq(2.0).all(), "a copy, not a view"
