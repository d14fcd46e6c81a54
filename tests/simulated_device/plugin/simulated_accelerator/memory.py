"""Memory of the device: storages over host memory, counted as CUDA's allocator counts them.

A new tensor holds poison (NaN, or the most negative value), as uninitialised memory may. Memory that sharded
training has given back is filled anew, and its use is a fault.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from simulated_accelerator import counts, timeline
from simulated_accelerator.module import CPU_KEYS, SIM

ROUND = 512
"""Blocks are multiples of so many bytes, as those of CUDA's allocator."""
POISONED = 1_000_000
"""Elements up to which new memory is filled with poison."""
CAPACITY = int(os.environ.get("SIMULATED_MEMORY", str(8 * 2**30)))
"""Bytes of device memory."""

_now = 0
_peak = 0
_set = torch.ops.aten.set_.source_Storage_storage_offset


def taken() -> int:
    """Return the bytes of device memory that are taken now."""
    return _now


def peak() -> int:
    """Return the most bytes that were taken at a time since `reset_peak`."""
    return _peak


def reset_peak() -> None:
    """Count the peak from now on."""
    global _peak
    _peak = _now


def check_room(num_bytes: int) -> None:
    """Raise OutOfMemoryError where the device has not so many bytes left."""
    if _now + num_bytes > CAPACITY:
        raise torch.OutOfMemoryError(
            f"sim out of memory: {num_bytes} bytes wanted, {CAPACITY - _now} of {CAPACITY} are free"
        )


def _take(num_bytes: int) -> None:
    global _now, _peak
    check_room(num_bytes)
    _now += num_bytes
    _peak = max(_peak, _now)
    counts.used(_now)


def _give(num_bytes: int) -> None:
    global _now
    _now -= num_bytes


class Block:
    """The host memory under a storage of the device, which it keeps alive and counts."""

    __slots__ = (
        "__weakref__", "freed", "noted", "readers", "size", "storage", "stream", "where", "writer",
    )  # fmt: skip

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.size = -(-storage.nbytes() // ROUND) * ROUND
        self.freed = True
        timeline.check_pool(self.size)
        _take(self.size)
        self.storage = storage
        self.freed = False
        self.stream = timeline.current().stream_id
        self.writer: tuple[int, int, str] | None = None
        self.readers: dict[int, int] = {}
        self.noted: set[int] = set()
        tape = timeline.tape()
        if tape is not None:
            tape.own(storage)
        self.where = ""
        if len(timeline._streams) > 1:
            self.where = counts.place(1)

    def free(self) -> None:
        """Give the memory back, and keep the storage: what sharded training does between uses."""
        if not self.freed:
            torch.empty(0, dtype=torch.uint8).set_(self.storage).fill_(255)
            self.freed = True
            _give(self.size)

    def take_again(self) -> None:
        """Undo `free`."""
        if self.freed:
            _take(self.size)
            self.freed = False

    def __del__(self) -> None:
        if not self.freed:
            _give(self.size)
            timeline.give_back(self)


def make(cpu: Tensor, into: Tensor | None = None) -> Tensor:
    """Return a tensor of the device over the memory of a CPU tensor; `into` becomes that tensor."""
    below = cpu.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(below.data_ptr(), SIM, below.nbytes())
    storage.block = Block(below)
    tensor = torch._C._acc.create_empty_tensor([0], cpu.dtype) if into is None else into
    _set.redispatch(CPU_KEYS, tensor, storage, cpu.storage_offset(), list(cpu.shape), list(cpu.stride()))
    return tensor


def block_of(tensor: Tensor) -> Block | None:
    """Return the memory under a tensor of the device; None for one without any."""
    return getattr(tensor.untyped_storage(), "block", None)


def alias(tensor: Tensor) -> Tensor:
    """Return a CPU tensor over the memory of a tensor of the device."""
    block = block_of(tensor)
    out = torch.empty(0, dtype=tensor.dtype)
    if block is None:
        return out.resize_(tensor.shape)
    if block.freed:
        raise counts.fault("memory that was given back is used")
    with torch.no_grad():
        return out.set_(block.storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def poison(tensor: Tensor) -> None:
    """Fill a CPU tensor with values that a result must not depend on."""
    if tensor.numel() > POISONED:  # its ends only
        if tensor.is_contiguous():
            poison(tensor.view(-1)[:1000])
            poison(tensor.view(-1)[-1000:])
        return
    if tensor.dtype == torch.bool:
        tensor.fill_(True)
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype.is_signed:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def numbers(device: Any = None) -> tuple[int, int]:
    """Return the free and all bytes of device memory."""
    return CAPACITY - _now, CAPACITY
