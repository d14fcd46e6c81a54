"""Copies between the host and a device, for which neither waits until the values are needed.

    host ──to_device, all_to_device──► device    queued behind what the device has to do
    device ──HostCopy──► host    queued too; `arrays` waits until that work, and no later one, is done

On a CPU both are the tensors themselves.
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
"""Tensors that are sent together begin at multiples of so many bytes."""


def to_device(values: Tensor | Sequence[Any], device: torch.device) -> Tensor:
    """Return a tensor of the host, or numbers, on `device`, without waiting for it."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    if features(device.type).pins_memory:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def all_to_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return tensors of the host on `device`, by a copy for each dtype, which nobody waits for.

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
            # by `data` each has a version of its own: a change of one is none of all for autograd
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
            torch.empty(tensor.shape, dtype=tensor.dtype).pin_memory().copy_(tensor, non_blocking=True)
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
