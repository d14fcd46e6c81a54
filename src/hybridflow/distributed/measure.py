"""Measurements of this machine's CPU, and of the most memory that this process has taken."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from hybridflow.distributed.device import used_accelerator

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
_SIDE = 512
_NUMBERS = 4 * 2**20


class MeasuredCPU(NamedTuple):
    """Figures of one process with its threads, in float32."""

    peak: float
    """FLOPs a second of a matrix product."""
    bandwidth: float
    """Bytes a second read and written by a copy that no cache holds."""
    memory: float
    """Bytes of main memory."""


def measured_cpu() -> MeasuredCPU:
    """Measure for some hundredths of a second: the best of a few products and copies."""
    left = torch.ones(_SIDE, _SIDE)
    source = torch.ones(_NUMBERS)
    target = torch.empty_like(source)
    product = _best(lambda: torch.mm(left, left))
    copy = _best(lambda: target.copy_(source))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return MeasuredCPU(2.0 * _SIDE**3 / product, 2.0 * source.nbytes / copy, float(memory))


def _best(work: Callable[[], object]) -> float:
    """Return the fewest seconds of some tries, which other processes disturb least."""
    work()
    tries = []
    for _ in range(5):
        began = time.perf_counter()
        work()
        tries.append(time.perf_counter() - began)
    return max(min(tries), 1e-9)


def peak_since_asked() -> int:
    """Return the most bytes that this process has had since the last call: on its accelerator where it has
    one, else in main memory; 0 where the system does not tell.
    """
    device = used_accelerator()
    if device is not None:
        module = torch.get_device_module(device)
        peak = module.max_memory_allocated()
        module.reset_peak_memory_stats()
        return int(peak)
    try:
        lines = STATUS.read_text().splitlines()
        CLEAR.write_text("5")  # the kernel counts the peak anew
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
