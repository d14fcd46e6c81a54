"""An engine's state saved by any number of ranks and loaded by any other, through
torch.distributed.checkpoint.

    save_shards    ranks' {part: nested state, DTensors where sharded} ──plan──► each rank writes its own
    files
    start_shards   the same with copies on the CPU, written in a thread while the ranks go on
    load_shards    the folder + a template of the same names ──► the state, sharded as the template

What comes back equals what went in bit by bit. Tied weights are stored once.
Reading whole tensors without ranks: `shard_index.read_tensors`.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from hybridflow.checkpoint.manifest import FileDigest
from hybridflow.checkpoint.shard_index import SavedTensor, read_index, stored_tensors
from hybridflow.checkpoint.shard_storage import ShardReader, ShardWriter
from hybridflow.checkpoint.state import State, decode_tree, encode_tree
from hybridflow.distributed.process_group import rank_and_size
from hybridflow.errors import CheckpointError

Parts = Mapping[str, dict[str, Any]]
"""`model`, `optimizer`, …: each a nested state, the same names and numbers on all ranks."""


ROOM = "Make room or set trainer.default_local_dir to a writable place"
"""What to do about a save that failed."""


def save_shards(folder: Path, parts: Parts, group: dist.ProcessGroup | None = None) -> dict[str, FileDigest]:
    """Write a state into a folder; called by all ranks of the group. Gives the digests of the files that this
    rank wrote, by name.

    CheckpointError, on all ranks, names the first rank that could not write and why.
    """
    return _plan(folder, parts, group, None).digests


class CpuCopies:
    """Makes copies of tensors on the CPU. Those of device tensors go into page-locked memory, which is kept
    for the next save.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """A copy; whole only after `wait`, and where the tensor is not on the CPU only until the next copy
        under this name.
        """
        if tensor.device.type == "cpu":
            return tensor.detach().clone()
        kept = self._kept.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = self._kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return kept.copy_(tensor.detach(), non_blocking=True)

    def wait(self) -> None:
        """Wait until the copies are whole."""
        if self._kept:
            torch.accelerator.synchronize()


class PendingShards:
    """A state that a thread is writing."""

    def __init__(self, writer: ShardWriter) -> None:
        self._writer = writer
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """True when `wait` would not wait."""
        return not self._thread.is_alive()

    def wait(self) -> dict[str, FileDigest]:
        """Digests of the files that this rank wrote, by name; CheckpointError where it could not."""
        self._thread.join()
        if self._error is not None:
            raise CheckpointError(_told(self._error)) from self._error
        return self._writer.digests

    def _write(self) -> None:
        try:
            self._writer.write()
        except BaseException as error:  # raised by `wait`, in the thread that asks
            self._error = error


def start_shards(
    folder: Path, parts: Parts, copies: CpuCopies, group: dist.ProcessGroup | None = None
) -> PendingShards:
    """Like `save_shards`, but only until the state is copied: the writing needs no other rank, so it cannot
    cross the ranks' own traffic.

    `copies` must not be used again before the save is done.
    """
    writer = _plan(folder, parts, group, copies)
    copies.wait()
    return PendingShards(writer)


def load_shards(folder: Path, templates: Parts) -> dict[str, State]:
    """The saved parts that `templates` names, each tensor sharded as the template's of the same name; plain
    ones come on the CPU.

    All ranks call it, but none waits for another. Dtypes are those of the checkpoint. CheckpointError where a
    shape differs or a file cannot be read. A tensor that the template lacks comes sharded as its neighbours
    of the same shape.
    """
    index = read_index(folder)
    missing = sorted(set(templates) - set(index.structure))
    if missing:
        raise CheckpointError(f"the state in {folder} has no {' and no '.join(missing)}")
    _, places = encode_tree(dict(templates))
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
        load(targets, storage_reader=ShardReader(index), planner=planner, no_dist=True)
    try:
        return {part: decode_tree(index.structure[part], targets.__getitem__) for part in templates}
    except ValueError as error:
        raise CheckpointError(f"cannot load the engine's state from {folder}: {error}") from error


def _plan(
    folder: Path, parts: Parts, group: dist.ProcessGroup | None, copies: CpuCopies | None
) -> ShardWriter:
    rank, world_size = rank_and_size(group)
    structure, tensors = encode_tree(dict(parts))
    if world_size > 1:
        # which tensors are tied is seen where they have elements, and rank 0 always holds the first
        box = [(structure, list(tensors))]
        dist.broadcast_object_list(box, group=group, group_src=0)
        structure, names = box[0]
        tensors = {name: tensors[name] for name in names}
    writer = ShardWriter(folder, rank, world_size, structure, None if copies is None else copies.copy)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _explained(f"cannot save the engine's state into {folder}", f". {ROOM}"):
        if world_size > 1:
            save(tensors, storage_writer=writer, planner=planner, process_group=group)
        else:
            _save_alone(tensors, writer, planner)
    return writer


def _save_alone(tensors: dict[str, Tensor], writer: ShardWriter, planner: DefaultSavePlanner) -> None:
    """What DCP's `save` does where there is one rank, without its log record for every tensor (half the time
    of a small save).
    """
    planner.set_up_planner(tensors, is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    results = writer.write_data(planner.finish_plan(plans[0]), planner).wait()
    writer.finish(metadata, [results])


def _target(name: str, saved: SavedTensor, place: Tensor | None, neighbours: list[Tensor]) -> Tensor:
    if place is not None and tuple(place.shape) != saved.shape:
        raise CheckpointError(f"{name} is {saved.shape} in the checkpoint and {tuple(place.shape)} here.")
    for like in neighbours if place is None else [place]:
        if isinstance(like, DTensor) and tuple(like.shape) == saved.shape:
            return torch.empty_like(like.detach(), dtype=saved.dtype)
    return torch.empty(saved.shape, dtype=saved.dtype)


@contextmanager
def _explained(what: str, hint: str = "") -> Iterator[None]:
    """DCP's exception, which is not even an Exception, as ours; without its warning that a single process has
    no ranks.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise CheckpointError(f"{what}: rank {rank}: {_told(cause)}{hint}") from cause
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{what}: {_told(error)}{hint}") from error


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError | OSError) else f"{type(error).__name__}: {error}"
