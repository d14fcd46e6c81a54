"""Memory that could be allocated now, of which the KV cache gets a share; and freed memory, which allocators
would keep, handed back to the device or the system.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

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


MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")
_FILES_OF_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
"""Files of cgroups of version 2 and 1 with the limit, what is used and statistics, and the line of the latter
with copies of files, which count as used and give way.
"""


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated on `device` now; on CPU within the limit of the container."""
    if is_accelerator(device.type):
        module = torch.get_device_module(device)
        unused = module.memory_reserved(device) - module.memory_allocated(device)
        return int(module.mem_get_info(device)[0] + unused)
    available = _entry(MEMINFO, "MemAvailable:")
    if available is None:  # no /proc (macOS): half of what is installed
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    else:
        free = available * 1024
    for limit_file, used_file, statistics, line in _FILES_OF_CGROUPS:
        limit = _number(CGROUPS / limit_file)
        used = _number(CGROUPS / used_file)
        if limit is not None and used is not None:
            files = _entry(CGROUPS / statistics, line) or 0
            free = min(free, max(0, limit - used + files))
    return free


def _entry(path: Path, name: str) -> int | None:
    """Return the number behind a name that begins a line of a file; None where there is no such line."""
    if path.exists():
        for line in path.read_text().splitlines():
            if line.split()[:1] == [name]:
                return int(line.split()[1])
    return None


def _number(path: Path) -> int | None:
    """Return the number in a control file; None where there is no such file or it says "max"."""
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdigit() else None
