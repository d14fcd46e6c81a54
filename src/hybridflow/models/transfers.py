"""Copies between the host and a device, for which neither waits until the values are needed.

    host ──to_device──► device        queued behind what the device has to do
    device ──HostCopy──► host         queued too; `arrays` waits until that work, and no later one, is done

On a CPU both are the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridflow.distributed.accelerators import features


def to_device(values: Tensor | Sequence[Any], device: torch.device) -> Tensor:
    """Return a tensor of the host, or numbers, on `device`, without waiting for it."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    if features(device.type).pins_memory:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class HostCopy:
    """Tensors of one device on their way to the host; on a CPU they must not change meanwhile."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: Any = None
        device = tensors[0].device
        if not features(device.type).pins_memory:
            self._tensors = [tensor.cpu() for tensor in tensors]
            return
        self._tensors = [
            torch.empty(tensor.shape, dtype=tensor.dtype).pin_memory().copy_(tensor, non_blocking=True)
            for tensor in tensors
        ]
        module = torch.get_device_module(device)
        self._event = module.Event()
        self._event.record(module.current_stream(device))  # this process may have another current device

    def arrays(self) -> list[NDArray[np.generic]]:
        """Return the values, as soon as the device has computed and copied them."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return [tensor.numpy() for tensor in self._tensors]
