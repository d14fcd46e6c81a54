"""An engine's state, saved by any number of ranks and loaded by any other number.

    save_shards    each rank writes its share of {part: nested state, with DTensors where it is sharded}
    start_shards   the same from copies on the CPU, which a thread writes while the ranks go on
    load_shards    a folder and a template with the same names ──► the state, sharded like the template

torch.distributed.checkpoint (DCP) makes the plans. The loaded state equals the saved one bit by bit. Tied
weights are stored once. `shard_index.read_tensors` reads whole tensors without ranks.

The storage under it is our own and puts no pickle on the disk.

    save   planner's items ─► a safetensors file for each part and rank, written now or in a thread; the
           coordinator writes shards.json
    load   shards.json ─► planner's items ─► slices of the files, copied into the target tensors

DCP's own safetensors storage keeps a rank's state in memory twice, takes no digests and writes no index.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from hybridflow.checkpoint.layout import SHARDS, STRUCTURE, shard_file
from hybridflow.checkpoint.manifest import FileDigest
from hybridflow.checkpoint.shard_index import (
    Chunk,
    SavedTensor,
    ShardIndex,
    index_text,
    key_in_file,
    opened,
    read_index,
    stored_slice,
    stored_tensors,
)
from hybridflow.checkpoint.state import (
    State,
    decode_tree,
    encode_tree,
    structure_text,
    write_tensors,
    write_text,
)
from hybridflow.distributed.process_group import rank_and_size
from hybridflow.distributed.shards import is_absent, is_sharded
from hybridflow.distributed.transfers import HostBuffers
from hybridflow.errors import CheckpointError

Parts = Mapping[str, dict[str, Any]]
"""A nested state for each of `model`, `optimizer`, …, with the same names and numbers on all ranks.

A tensor of which a rank holds nothing is absent there (`distributed.shards`): it neither writes nor reads it.
"""


ROOM = "Make room or set trainer.default_local_dir to a writable place"
"""The advice in the message of a save that failed."""


class _PlansAsTheyAre:
    """The part of DCP's interface in which a storage could change plans; it serves one save or load."""

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return a rank's plan."""
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        """Return the plans of all ranks."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return True: any folder is accepted."""
        return True


@dataclass
class ShardWriter(_PlansAsTheyAre, StorageWriter):
    """The writer of the tensors that the plan gives to this rank.

    Without `copy` they are on the disk when the plan is done. With it the plan only takes copies, and `write`
    writes them later, in any thread: it needs no other rank.
    """

    folder: Path
    rank: int
    world_size: int
    structure: Any
    """The JSON half of the state."""
    copy: Callable[[str, Tensor], Tensor] | None = None
    digests: dict[str, FileDigest] = field(default_factory=dict)
    """The digests of the files that this rank has written, by name."""
    _files: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def write(self) -> None:
        """Write this rank's tensors and release the copies of them."""
        for name in sorted(self._files):
            self.digests[name] = write_tensors(self.folder / name, self._files.pop(name))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the folder (DCP's interface).

        DCP reports an error of this method to all ranks; an earlier one would leave the other ranks waiting.
        """
        self.folder.mkdir(parents=True, exist_ok=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors, or take copies of them (DCP's interface)."""
        results = []
        for item in plan.items:
            tensor = cast(Tensor, planner.resolve_data(item))
            name = shard_file(item.index.fqn.partition("/")[0], self.rank, self.world_size)
            tensors = self._files.setdefault(name, {})
            key = key_in_file(item.index.fqn)
            assert key not in tensors, f"two parts of {item.index.fqn} on rank {self.rank}"
            tensors[key] = tensor
            if self.copy is not None:
                tensors[key] = self.copy(item.index.fqn, tensor)
            results.append(WriteResult(item.index, tensor.numel() * tensor.element_size(), name))
        if self.copy is None:
            self.write()
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write structure and index, on the coordinator (DCP's interface)."""
        file_of = {
            (result.index.fqn, result.index.offset): result.storage_data
            for part in results
            for result in part
        }
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata), f"{name} is no tensor"
            chunks = tuple(
                Chunk(file_of[name, chunk.offsets], tuple(chunk.offsets), tuple(chunk.sizes))
                for chunk in entry.chunks
            )
            tensors[name] = SavedTensor(entry.properties.dtype, tuple(entry.size), chunks)
        self.digests[STRUCTURE] = write_text(self.folder / STRUCTURE, structure_text(self.structure))
        self.digests[SHARDS] = write_text(self.folder / SHARDS, index_text(tensors))


@dataclass
class ShardReader(_PlansAsTheyAre, StorageReader):
    """The reader of the boxes that a plan asks for."""

    index: ShardIndex

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index in DCP's form (DCP's interface)."""
        return Metadata({name: _metadata(tensor) for name, tensor in self.index.tensors.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing (DCP's interface)."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every box of the plan from its file into its target (DCP's interface)."""
        chunk_at = {
            (name, chunk.offsets): chunk
            for name in {item.storage_index.fqn for item in plan.items}
            for chunk in self.index.tensors[name].chunks
        }
        wanted: dict[str, list[tuple[ReadItem, Chunk]]] = {}
        for item in plan.items:
            chunk = chunk_at[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
            wanted.setdefault(chunk.file, []).append((item, chunk))
        for name, items in wanted.items():
            with opened(self.index.folder / name) as file:
                for item, chunk in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(self._read(file, item, chunk))
                    planner.commit_tensor(item, target)
        return _done(None)

    def _read(self, file: Any, item: ReadItem, chunk: Chunk) -> Tensor:
        name = item.storage_index.fqn
        stored = stored_slice(file, name, self.index.tensors[name], chunk)
        box = tuple(
            slice(start, start + size) for start, size in zip(item.storage_offsets, item.lengths, strict=True)
        )
        found: Tensor = file.get_tensor(key_in_file(name)) if not box else stored[box]
        return found


def _metadata(tensor: SavedTensor) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in tensor.chunks
    ]
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def save_shards(folder: Path, parts: Parts, group: dist.ProcessGroup | None = None) -> dict[str, FileDigest]:
    """Write a state into a folder; all ranks of the group call this.

    Returns the digests of the files that this rank wrote, by name. Where a rank cannot write, CheckpointError
    is raised on all ranks and names that rank and the reason.
    """
    return _plan(folder, parts, group, None).digests


class PendingShards:
    """A state that a thread of this rank is writing."""

    def __init__(self, writer: ShardWriter) -> None:
        self._writer = writer
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Return True when the thread has ended."""
        return not self._thread.is_alive()

    def wait(self) -> dict[str, FileDigest]:
        """Wait, and return the digests of the files by name; CheckpointError where writing failed."""
        self._thread.join()
        if self._error is not None:
            raise CheckpointError(_text(self._error)) from self._error
        return self._writer.digests

    def _write(self) -> None:
        try:
            self._writer.write()
        except BaseException as error:  # `wait` raises it in the thread that calls it
            self._error = error


def start_shards(
    folder: Path, parts: Parts, buffers: HostBuffers, group: dist.ProcessGroup | None = None
) -> PendingShards:
    """Copy a state, and write it in a thread; all ranks of the group call this, as for `save_shards`.

    The writing needs no other rank, so it cannot disturb the ranks' own communication. `buffers` hold the
    copies of a device's tensors, and must not be used again before the save is done.
    """
    writer = _plan(folder, parts, group, buffers)
    buffers.wait()
    return PendingShards(writer)


def load_shards(folder: Path, templates: Parts) -> dict[str, State]:
    """Return the saved parts that `templates` names, each tensor sharded like the template's of its name.

    Tensors that are not sharded are on the CPU, and dtypes are those of the checkpoint. A tensor that the
    template lacks is sharded like its neighbours of the same shape. Every rank calls this, but none waits for
    another. Raises CheckpointError where a shape differs or a file cannot be read.
    """
    index = read_index(folder)
    missing = sorted(set(templates) - set(index.structure))
    if missing:
        raise CheckpointError(f"the state in {folder} has no {' and no '.join(missing)}")
    _, places = encode_tree(dict(templates), partial=True)
    neighbours: dict[str, list[Tensor]] = {}
    for name, place in places.items():
        neighbours.setdefault(name.rpartition("/")[0], []).append(place)
    wanted = sorted({name for part in templates for _, name in stored_tensors(index.structure[part])})
    targets = {
        name: _target(
            name, index.tensors[name], places.get(name), neighbours.get(name.rpartition("/")[0], [])
        )
        for name in wanted
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _explained(f"cannot load the engine's state from {folder}"):
        load(_here(targets), storage_reader=ShardReader(index), planner=planner, no_dist=True)
    try:
        return {part: decode_tree(index.structure[part], targets.__getitem__) for part in templates}
    except ValueError as error:
        raise CheckpointError(f"cannot load the engine's state from {folder}: {error}") from error


def _plan(
    folder: Path, parts: Parts, group: dist.ProcessGroup | None, buffers: HostBuffers | None
) -> ShardWriter:
    rank, world_size = rank_and_size(group)
    structure, tensors = encode_tree(dict(parts), partial=True)
    if world_size > 1:
        # tied tensors are recognised only where they have elements, and rank 0 always holds the first ones
        box = [(structure, list(tensors))]
        dist.broadcast_object_list(box, group=group, group_src=0)
        structure, names = box[0]
        tensors = _here({name: tensors[name] for name in names})
    writer = ShardWriter(folder, rank, world_size, structure)
    if buffers is not None:
        writer.copy = partial(_copy, buffers)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _explained(f"cannot save the engine's state into {folder}", f". {ROOM}"):
        if world_size > 1:
            save(tensors, storage_writer=writer, planner=planner, process_group=group)
        else:
            # save as DCP's `save` does, without its log record of each tensor: half the time of a small save
            planner.set_up_planner(tensors, is_coordinator=True)
            writer.set_up_storage_writer(is_coordinator=True)
            plans, metadata = planner.create_global_plan([planner.create_local_plan()])
            results = writer.write_data(planner.finish_plan(plans[0]), planner).wait()
            writer.finish(metadata, [results])
    return writer


def _copy(buffers: HostBuffers, name: str, tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in main memory; one of a device's tensor is complete after `buffers.wait`."""
    if tensor.device.type == "cpu":
        return tensor.detach().clone()
    return buffers.copy(name, tensor)


def _target(name: str, saved: SavedTensor, place: Tensor | None, neighbours: list[Tensor]) -> Tensor:
    if place is not None and tuple(place.shape) != saved.shape:
        raise CheckpointError(f"{name} is {saved.shape} in the checkpoint and {tuple(place.shape)} here.")
    if place is not None:
        neighbours = [place]
    if neighbours and all(map(is_absent, neighbours)):
        return torch.empty(saved.shape, dtype=saved.dtype, device="meta")
    for like in neighbours:
        if is_sharded(like) and tuple(like.shape) == saved.shape:
            return torch.empty_like(like.detach(), dtype=saved.dtype)
    return torch.empty(saved.shape, dtype=saved.dtype)


def _here(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that this rank holds a part of."""
    return {name: tensor for name, tensor in tensors.items() if not is_absent(tensor)}


@contextmanager
def _explained(what: str, hint: str = "") -> Iterator[None]:
    """Turn DCP's exception, which is no subclass of Exception, into a CheckpointError.

    DCP's warning that a single process has no ranks is suppressed.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise CheckpointError(f"{what}: rank {rank}: {_text(cause)}{hint}") from cause
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{what}: {_text(error)}{hint}") from error


def _text(error: BaseException) -> str:
    if isinstance(error, CheckpointError | OSError):
        return str(error)
    return f"{type(error).__name__}: {error}"
