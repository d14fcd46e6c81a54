"""An engine's state, saved by any number of ranks and loaded by any other number.

    save_shards    each rank writes its share of {part: nested state, with DTensors where it is sharded}
    start_shards   the same from copies on the CPU, which a thread writes while the ranks go on
    load_shards    a folder and a template with the same names ──► the state, sharded like the template

torch.distributed.checkpoint (DCP) makes the plans. The loaded state equals the saved one bit by bit. Tied
weights are stored once. `shard_index.read_tensors` reads whole tensors without ranks.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
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

from hybridflow.checkpoint.manifest import FileDigest
from hybridflow.checkpoint.shard_index import SavedTensor, read_index, stored_tensors
from hybridflow.checkpoint.shard_storage import ShardReader, ShardWriter
from hybridflow.checkpoint.state import State, decode_tree, encode_tree
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
    """Return the tensors of which this rank holds something."""
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
