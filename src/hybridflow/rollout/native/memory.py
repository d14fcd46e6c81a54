"""How much memory is at hand, and how many rows of which length it holds."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hybridflow.models.kv_cache import LayerShape, SlotCache


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


STEP = 64
"""Tokens by which slots grow, at least."""


class SlotMemory:
    """The KV cache between a start and `sleep`: it grows with the rows and their longest, within a bound in tokens."""

    def __init__(self, shapes: dict[int, LayerShape], budget: int, device: torch.device) -> None:
        """`budget`: bytes that slots and kept prefixes may take together."""
        self.shapes, self.device = shapes, device
        self.bytes_per_token = sum(shape.bytes_per_token for shape in shapes.values())
        self.max_tokens = budget // self.bytes_per_token
        self.cache = SlotCache(shapes, 0, 0, device)

    @property
    def num_tokens(self) -> int:
        """Tokens that the slots hold room for now."""
        return self.cache.num_slots * self.cache.capacity

    def problem(self, length: int) -> str | None:
        """Why a row of `length` tokens can never be held, if so."""
        if length <= self.max_tokens:
            return None
        return (
            f"the KV cache of 1 row of {length} tokens takes {length * self.bytes_per_token / 2**20:.1f} MiB, but it may use "
            f"{self.max_tokens * self.bytes_per_token / 2**20:.1f} MiB: shorten data.max_prompt_length or data.max_response_length, or "
            "raise actor_rollout_ref.rollout.gpu_memory_utilization"
        )

    def rows_of(self, length: int) -> int:
        """How many rows of `length` tokens fit."""
        return self.max_tokens // max(1, length)

    def size_for(self, rows: int, length: int, *, wanted: int, longest: int) -> tuple[int, int] | None:
        """Slots and capacity to hold `rows` of `length` tokens now, and as it goes on `wanted` rows of up to `longest`; None: no room."""
        if rows * length > self.max_tokens:
            return None
        slots, capacity = self.cache.num_slots, self.cache.capacity
        if rows <= slots and length <= capacity:
            return slots, capacity
        if length > capacity:
            ahead = max(length + STEP, capacity + capacity // 2)
            capacity = max(length, min(longest, -(-ahead // STEP) * STEP))
        slots = min(max(slots, rows, wanted), self.max_tokens // capacity)
        if slots < rows:
            slots, capacity = rows, self.max_tokens // rows
        return slots, capacity
