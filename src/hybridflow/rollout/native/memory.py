"""How many rows the memory at hand can hold."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch

from hybridflow.errors import RolloutError
from hybridflow.models.kv_cache import LayerShape


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated on `device` now; on CPU what the system calls available, within the limit of the container."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
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


def rows_that_fit(wanted: int, *, shapes: Iterable[LayerShape], capacity: int, budget: int, spare: int) -> int:
    """At most `wanted` slots of `capacity` tokens, besides `spare` ones, within `budget` bytes; RolloutError if not even one fits."""
    per_row = capacity * sum(shape.bytes_per_token for shape in shapes)
    rows = min(wanted, budget // per_row - spare)
    if rows < 1:
        raise RolloutError(
            f"the KV cache of {1 + spare} row(s) of {capacity} tokens takes {(1 + spare) * per_row / 2**20:.1f} MiB, but it may use "
            f"{budget / 2**20:.1f} MiB: shorten data.max_prompt_length or data.max_response_length, or raise "
            "actor_rollout_ref.rollout.gpu_memory_utilization"
        )
    return rows
