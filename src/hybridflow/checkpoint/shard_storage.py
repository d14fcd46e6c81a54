"""The storage under torch.distributed.checkpoint (DCP), which puts no pickle on the disk.

    save   planner's items ─► a safetensors file for each part and rank, written now or in a thread; the
           coordinator writes shards.json
    load   shards.json ─► planner's items ─► slices of the files, copied into the target tensors

DCP's own safetensors storage keeps a rank's state in memory twice, takes no digests and writes no index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
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
    stored_slice,
)
from hybridflow.checkpoint.state import structure_text
from hybridflow.checkpoint.tensor_file import write_tensors, write_text


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
