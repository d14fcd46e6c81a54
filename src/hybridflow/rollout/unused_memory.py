"""Return freed memory to the device or the system, which allocators would keep for later use."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from hybridflow.distributed.accelerators import is_accelerator


def give_back(device: torch.device) -> None:
    """Return unused memory to the device, or to the system; takes a few milliseconds.

    On Linux glibc keeps freed tensors of some megabytes: without this a process has the KV cache and the
    activations of training at once.
    """
    if is_accelerator(device.type):
        torch.get_device_module(device).empty_cache()
    elif (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> ctypes._NamedFuncPointer | None:
    """glibc's `malloc_trim`; None where the C library has none (macOS, musl)."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
