"""Checkpointing and copying of weights, for every worker with an engine.

driver: group.save(folder, parts) ──► all ranks write their own files ──► digests of all files
driver: group.start_save(...) ──► copies taken ··· training goes on ··· group.save_done() ──►
group.finish_save() ──► digests
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from hybridflow.checkpoint.manifest import FileDigest
from hybridflow.checkpoint.sharded import PendingShards, load_shards, save_shards, start_shards
from hybridflow.controller import Dispatch, Worker, WorkerGroup, register
from hybridflow.distributed.process_group import gather_objects
from hybridflow.distributed.shards import is_absent, local, placed_like
from hybridflow.distributed.transfers import HostBuffers
from hybridflow.engines import TrainEngine
from hybridflow.errors import CheckpointError

Digests = Mapping[str, FileDigest]
"""By name of the file in the folder."""


class StatefulWorker(Worker):
    """A worker that owns one training engine; the ranks of its role form its process group."""

    _saving: PendingShards | None = None
    _copies: HostBuffers | None = None

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save(self, folder: str, parts: Sequence[str]) -> Digests:
        """Write the named parts of the engine's state (`model`, `optimizer`, `scheduler`).

        Returns the digests of the files of all ranks.
        """
        return _of_all_ranks(save_shards(Path(folder), self._parts(parts)))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_save(self, folder: str, parts: Sequence[str]) -> None:
        """Copy the state as `save` does, and let a thread write the copy."""
        assert self._saving is None, f"{self.role} is saving: call finish_save first"
        self._copies = self._copies or HostBuffers()
        self._saving = start_shards(Path(folder), self._parts(parts), self._copies)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_done(self) -> bool:
        """Return True when no rank is writing any more."""
        return all(gather_objects(self._saving is None or self._saving.done()))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_save(self) -> Digests:
        """Wait until all ranks have written, and return the digests as `save` does.

        Raises CheckpointError with the first rank that could not write, and why.
        """
        assert self._saving is not None, f"{self.role} is not saving: call start_save first"
        saving = self._saving
        self._saving = None
        try:
            mine: Digests | str = saving.wait()
        except CheckpointError as error:
            mine = str(error)
        return _of_all_ranks(mine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load(self, folder: str, parts: Sequence[str]) -> None:
        """Load saved parts of a state in place, each rank its share, whatever number of ranks saved them."""
        self.engine.load_state_dict(load_shards(Path(folder), self._parts(parts)))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights(self) -> dict[str, Tensor]:
        """Return this rank's share of the parameters, by name; they go on changing with the model."""
        return {name: local(tensor) for name, tensor in self._held().items()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_weights(self, weights: dict[str, Tensor]) -> None:
        """Load, in place, the `weights` of the rank of the same number of another role."""
        model = self._held()
        odd = sorted(set(model) ^ set(weights))
        odd += [
            name
            for name in sorted(set(model) & set(weights))
            if local(model[name]).shape != weights[name].shape
        ]
        if odd:
            raise CheckpointError(
                f"{self.role} cannot take over weights: {odd[0]} is not the same on rank {self.rank} of "
                "both roles. Both must be the same "
                "model, cut alike: give them the same fsdp_config.fsdp_size and parallel sizes"
            )
        own = {
            name: placed_like(weights[name].to(local(tensor).device), tensor)
            for name, tensor in model.items()
        }
        self.engine.load_state_dict({"model": {**self.engine.state_dict()["model"], **own}})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def write_huggingface(self, folder: str, *, with_weights: bool) -> None:
        """Write the policy's Hugging Face folder without the tokenizer, each rank its share.

        It holds the configuration, and the weights if asked for.
        """
        self.engine.export_hf(folder, with_weights=with_weights)

    def _held(self) -> dict[str, Tensor]:
        """Return the parameters that this rank holds a part of, by name."""
        model: dict[str, Tensor] = self.engine.state_dict()["model"]
        return {name: tensor for name, tensor in model.items() if not is_absent(tensor)}

    def _parts(self, parts: Sequence[str]) -> dict[str, Any]:
        state = self.engine.state_dict()
        return {part: state[part] for part in parts}


W = TypeVar("W", bound=StatefulWorker)


class StatefulGroup(WorkerGroup[W]):
    """The driver's view of workers with an engine."""

    def save(self, folder: Path, parts: Sequence[str]) -> Digests:
        """See `StatefulWorker.save`."""
        return self.call(StatefulWorker.save, str(folder.absolute()), parts)

    def start_save(self, folder: Path, parts: Sequence[str]) -> None:
        """See `StatefulWorker.start_save`."""
        self.call(StatefulWorker.start_save, str(folder.absolute()), parts)

    def save_done(self) -> bool:
        """See `StatefulWorker.save_done`."""
        return self.call(StatefulWorker.save_done)

    def wait_saved(self, seconds: float) -> bool:
        """Wait at most `seconds` until no rank is writing any more; return whether none is.

        Raises WorkerError where a rank does not answer.
        """
        end = time.monotonic() + seconds
        while not self.submit(StatefulWorker.save_done).result(max(0.0, end - time.monotonic())):
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def finish_save(self) -> Digests:
        """See `StatefulWorker.finish_save`."""
        return self.call(StatefulWorker.finish_save)

    def load(self, folder: Path, parts: Sequence[str]) -> None:
        """See `StatefulWorker.load`."""
        self.call(StatefulWorker.load, str(folder.absolute()), parts)

    def weights(self) -> dict[str, Tensor]:
        """Return `StatefulWorker.weights` of rank 0."""
        return self.call(StatefulWorker.weights)

    def write_huggingface(self, folder: Path, *, with_weights: bool) -> None:
        """See `StatefulWorker.write_huggingface`."""
        self.call(StatefulWorker.write_huggingface, str(folder.absolute()), with_weights=with_weights)

    def copy_from(self, other: StatefulGroup[Any]) -> None:
        """Take over the current weights of another role of the same model.

        Each rank's share goes straight to the rank of the same number, not through the driver.
        """
        assert other.world_size == self.world_size, (
            f"{other.role} has {other.world_size} ranks, {self.role} {self.world_size}"
        )
        self.call(StatefulWorker.take_weights, other.submit(StatefulWorker.weights).by_reference())


def _of_all_ranks(mine: Digests | str) -> Digests:
    """Return the digests of all ranks.

    A rank that could not write gives the reason in place of its digests, which is raised as
    CheckpointError.
    """
    found: dict[str, FileDigest] = {}
    for rank, told in enumerate(gather_objects(mine)):
        if isinstance(told, str):
            raise CheckpointError(f"rank {rank}: {told}")
        found.update(told)
    return found
