"""Asynchronous copies between main memory and a device: neither side waits until the values are needed.

    main memory ──to_device, all_to_device──► device    queued behind what the device has to do
    device ──HostCopy──► main memory         queued too; `tensors` waits for that work, and for no later one
    device ──HostBuffers.copy──► main memory    queued too, to memory that a name keeps; complete after `wait`

Memory of the device that is let go after a copy was queued is free at once for what is queued later. Where a
device copies from page-locked memory no faster (`pins_memory` of its row), ordinary memory is used, and each
copy is complete when it returns. On a CPU copies are the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridflow.distributed.accelerators import features, is_accelerator

ALIGNMENT = 64
"""Tensors that lie in one block of memory begin at multiples of this many bytes."""
FIRST_SLAB = 16 * 2**20
"""Bytes of the first slab of a dtype; each further one has twice as many, up to the largest."""
LARGEST_SLAB = 2**30


def to_device(values: Tensor | Sequence[Any], device: torch.device) -> Tensor:
    """Return a tensor, or numbers, on `device`; from main memory without waiting for it."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    if tensor.device.type == "cpu" and features(device.type).pins_memory:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def all_to_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return tensors of the host on `device`, by an asynchronous copy for each dtype.

    Those of a dtype lie in one block of device memory, which is freed with the last of them. A block has one
    dtype because `torch.save`, for which a user's loss may have a use, takes no block of several. On a CPU
    they are the tensors themselves.
    """
    if not is_accelerator(device.type):
        return {name: tensor.to(device) for name, tensor in tensors.items()}
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        by_dtype.setdefault(tensor.dtype, []).append(name)
    found: dict[str, Tensor] = {}
    for dtype, names in by_dtype.items():
        step = ALIGNMENT // dtype.itemsize
        starts = [0, *accumulate(-(-tensors[name].numel() // step) * step for name in names)]
        packed = torch.empty(starts[-1], dtype=dtype)
        for name, start in zip(names, starts):
            _part(packed, start, tensors[name]).copy_(tensors[name])
        moved = to_device(packed, device)
        for name, start in zip(names, starts):
            # by `data` each has its own version: a change of one is none of all for autograd
            found[name] = _part(moved, start, tensors[name]).data
    return {name: found[name] for name in tensors}


def _part(packed: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the elements of `packed` [size] from `start` on in the shape of `like`."""
    return packed[start : start + like.numel()].view(like.shape)


class HostCopy:
    """Tensors of one device on their way to the host; on a CPU they must not change meanwhile."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self._event: Any = None
        self._tensors: list[Tensor] = []
        if tensors:
            self.add(tensors)

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Send more tensors of the same device after those that were sent."""
        if not tensors:
            return
        device = tensors[0].device
        if not features(device.type).pins_memory:
            self._tensors += [tensor.cpu() for tensor in tensors]
            return
        self._tensors += [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            for tensor in tensors
        ]
        module = torch.get_device_module(device)
        if self._event is None:
            self._event = module.Event()
        self._event.record(module.current_stream(device))  # this process may have another current device

    def tensors(self) -> list[Tensor]:
        """Return the tensors on the host, as soon as the device has computed and copied them."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._tensors

    def arrays(self) -> list[NDArray[np.generic]]:
        """Return the values of `tensors`."""
        return [tensor.numpy() for tensor in self.tensors()]


class HostBuffers:
    """Buffers in main memory by name, each of which is used again for the next copy of its name.

    They are parts of slabs, one after the other, whose sizes are powers of two: torch rounds page-locked
    memory up to such sizes, a tensor by itself to almost twice its own. A slab has one dtype, so that
    `torch.save` takes what lies in it.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._slabs: dict[torch.dtype, tuple[Tensor, int]] = {}
        """By dtype, the newest slab [size] and how many elements of it are in use."""
        self._waits_for: torch.device | None = None

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Return a copy in main memory, complete after `wait` and valid until the next copy of its name.

        A tensor that is in main memory is returned itself.
        """
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            return tensor
        if features(tensor.device.type).pins_memory:
            self._waits_for = tensor.device
        return copy_to_host(tensor, self._buffer(name, tensor, tensor.device))

    def _buffer(self, name: str, tensor: Tensor, device: torch.device) -> Tensor:
        """Return the memory of a name for copies of a tensor to or from a device."""
        strides = strides_of_copy(tensor)
        buffer = self._buffers.get(name)
        if (
            buffer is None
            or buffer.dtype != tensor.dtype
            or buffer.shape != tensor.shape
            or buffer.stride() != strides
        ):
            buffer = self._buffers[name] = self._part(tensor, device)
        return buffer

    def _part(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return main memory for a copy of a tensor: the next part of a slab, where memory is page-locked."""
        if not features(device.type).pins_memory:
            return empty_on_host(tensor)
        step = ALIGNMENT // tensor.element_size()
        count = -(-tensor.numel() // step) * step
        slab, used = self._slabs.get(tensor.dtype, (None, 0))
        if slab is None or used + count > len(slab):
            before = 0 if slab is None else slab.nbytes
            size = min(max(FIRST_SLAB, 2 * before), LARGEST_SLAB) // tensor.element_size()
            slab = torch.empty(max(size, count), dtype=tensor.dtype, pin_memory=True)
            used = 0
        self._slabs[tensor.dtype] = (slab, used + count)
        return slab.as_strided(tensor.shape, strides_of_copy(tensor), used)

    def move(self, name: str, tensor: Tensor, device: torch.device) -> Tensor:
        """Return a tensor on `device`: itself if it is there, else a copy, which is a buffer on a CPU.

        A tensor of ordinary memory goes to the device through the buffer, to which it comes back.
        """
        if device.type == "cpu":
            return self.copy(name, tensor)
        if tensor.device.type == "cpu" and features(device.type).pins_memory and not tensor.is_pinned():
            tensor = self._buffer(name, tensor, device).copy_(tensor)
        return to_device(tensor, device)

    def wait(self) -> None:
        """Wait until all copies are complete."""
        if self._waits_for is not None:
            module = torch.get_device_module(self._waits_for)
            module.current_stream(self._waits_for).synchronize()
            self._waits_for = None


def empty_on_host(tensor: Tensor) -> Tensor:
    """Return main memory for a copy of a device's tensor, in the same order as its own."""
    pinned = features(tensor.device.type).pins_memory
    memory = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=pinned)
    return memory.as_strided(tensor.shape, strides_of_copy(tensor))


def copy_to_host(tensor: Tensor, memory: Tensor) -> Tensor:
    """Copy a device's tensor to main memory of `empty_on_host`, without waiting where that is page-locked."""
    return memory.copy_(tensor, non_blocking=features(tensor.device.type).pins_memory)


def strides_of_copy(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides that torch gives a copy of a tensor: its own, unless it has gaps or overlaps."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()
