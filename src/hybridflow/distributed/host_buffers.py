"""Copies of a device's tensors in main memory, for which neither side waits one by one.

    tensor on the device ──HostBuffers.copy──► buffer in main memory    queued; complete after `wait`
    tensor in main memory ──bring──► device                          queued; the host goes on

Memory of the device that is let go after a copy was queued is free at once for what is queued later. Where a
device copies from page-locked memory no faster (`pins_memory` of its row), buffers are ordinary memory, and
each copy is complete when it returns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.distributed.accelerators import features

ALIGNMENT = 64
"""Buffers begin at multiples of so many bytes."""
FIRST_SLAB = 16 * 2**20
"""Bytes of the first slab of a dtype; each further one has twice as many, up to the largest."""
LARGEST_SLAB = 2**30


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
        strides = strides_of_copy(tensor)
        buffer = self._buffers.get(name)
        if (
            buffer is None
            or buffer.dtype != tensor.dtype
            or buffer.shape != tensor.shape
            or buffer.stride() != strides
        ):
            buffer = self._buffers[name] = self._part(tensor)
        if features(tensor.device.type).pins_memory:
            self._waits_for = tensor.device
        return copy_to_host(tensor, buffer)

    def _part(self, tensor: Tensor) -> Tensor:
        """Return main memory for a copy of a tensor: the next part of a slab, where memory is page-locked."""
        if not features(tensor.device.type).pins_memory:
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
        """Return a tensor on `device`: itself if it is there, else a copy, which is a buffer on a CPU."""
        if device.type == "cpu":
            return self.copy(name, tensor)
        return bring(tensor, device)

    def wait(self) -> None:
        """Wait until all copies are complete."""
        if self._waits_for is not None:
            module = torch.get_device_module(self._waits_for)
            module.current_stream(self._waits_for).synchronize()
            self._waits_for = None


def bring(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on `device`, queued there behind what it has to do."""
    if tensor.device.type == "cpu" and features(device.type).pins_memory:
        # buffers are page-locked and copied as they are; a state that was loaded meanwhile may not be
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


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
