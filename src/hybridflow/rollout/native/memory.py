"""Memory that could be allocated now, of which the KV cache gets a share."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hybridflow.distributed.accelerators import is_accelerator


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated on `device` now; on CPU within the limit of the container."""
    if is_accelerator(device.type):
        module = torch.get_device_module(device)
        unused = module.memory_reserved(device) - module.memory_allocated(device)
        return int(module.mem_get_info(device)[0] + unused)
    free = _available(Path("/proc/meminfo"))
    limit, used = (_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def _available(meminfo: Path) -> int:
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # no /proc (macOS): half of what is installed
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _number(path: Path) -> int | None:
    """The number in a control file; None where there is no such file or it says "max"."""
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdigit() else None
