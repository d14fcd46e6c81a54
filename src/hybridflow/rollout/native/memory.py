"""Memory of the KV cache: how much is free, and how many rows of which length fit."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from hybridflow.distributed.accelerators import is_accelerator
from hybridflow.models.exact import ExactMode
from hybridflow.models.kv_cache import KVCache, LayerShape, SlotCache, bytes_per_token

if TYPE_CHECKING:
    from hybridflow.protocol.prompt import Units
    from hybridflow.rollout.native.prefixes import Prefix, PrefixStore
    from hybridflow.rollout.native.scheduler import Admission


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


AHEAD = 64
"""Tokens by which memory grows, at least."""
KEYS = 16
"""Slots have a multiple of so many tokens, where the rows are short."""


def slot_capacity(length: int) -> int:
    """Tokens that slots have where the longest row has `length`: up to an eighth more, so that they change
    seldom.

    It depends on nothing else, because a row's numbers depend on it in their last bits.
    """
    step = max(KEYS, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step


class Size(NamedTuple):
    """Size of a `SlotCache`."""

    slots: int
    capacity: int
    room: int
    """Tokens in each layer."""


class Running(NamedTuple):
    """The rows that decode."""

    rows: int
    longest: int
    """Tokens of the longest one."""
    longest_ever: int
    """That any request may come to."""
    in_pieces: int = 0
    """Tokens of the prompt in chunked prefill; 0: there is none."""

    def ahead(self, length: int) -> int:
        """Return `length` and some tokens more, so that a row that enters is not preempted at once."""
        return max(length, min(length + AHEAD, self.longest_ever))


class KVMemory(ABC):
    """The KV cache from the first use until `sleep`, within a bound in tokens, and the question who fits."""

    cache: KVCache
    exact: ExactMode | None = None
    """The mode that attends over what is stored."""

    def __init__(self, shapes: dict[int, LayerShape], budget: int, device: torch.device) -> None:
        """`budget`: bytes that rows and kept prefixes may take together."""
        self.shapes = shapes
        self.device = device
        self.bytes_per_token = bytes_per_token(shapes)
        self.max_tokens = budget // self.bytes_per_token

    def problem(self, length: int) -> str | None:
        """Return the reason why a row of `length` tokens can never be held, or None where it can."""
        taken = self.capacity_for(length)
        if taken <= self.max_tokens:
            return None
        return (
            f"the KV cache of 1 row of {length} tokens takes {taken * self.bytes_per_token / 2**20:.1f} "
            f"MiB, but it may use {self.max_tokens * self.bytes_per_token / 2**20:.1f} MiB: shorten "
            "data.max_prompt_length or data.max_response_length, or raise "
            "actor_rollout_ref.rollout.gpu_memory_utilization"
        )

    @abstractmethod
    def capacity_for(self, length: int) -> int:
        """Return the tokens whose memory one row of `length` tokens takes."""

    @abstractmethod
    def rows_of(self, length: int) -> int:
        """Return how many slots there can be for rows of `length` tokens."""

    @abstractmethod
    def begin(self, prefixes: PrefixStore) -> None:
        """Begin a session, which keeps these prefixes."""

    @abstractmethod
    def free_rows(
        self, now: Running, taken: int, batch: Sequence[Admission], context: Units, prefix: Prefix | None
    ) -> int:
        """Return how many rows of this context and prefix hit may enter after `batch` and `taken` slots."""

    @abstractmethod
    def has_next(self, now: Running) -> bool:
        """Whether every running row has room for one more token."""

    @abstractmethod
    def fit(
        self, now: Running, rows: int, length: int, *, live: int, in_pieces: bool, prefixes: PrefixStore
    ) -> None:
        """Allocate slots for `rows` of `length` tokens, which do fit. Running rows stay, and with `in_pieces`
        the last slot, which has the prompt in chunked prefill.

        `live`: number of rows that there will be.
        """

    @property
    @abstractmethod
    def max_kept(self) -> int:
        """Most tokens that kept prefixes may have now."""


class SlotMemory(KVMemory):
    """Memory as slots of one length, which grow with the rows; in exact mode as long as it attends over."""

    cache: SlotCache

    def __init__(self, shapes: dict[int, LayerShape], budget: int, device: torch.device) -> None:
        super().__init__(shapes, budget, device)
        self.cache = SlotCache(shapes, 0, 0, device)

    @property
    def max_kept(self) -> int:
        """Most tokens that kept prefixes may have: their copies take the memory that slots leave."""
        return max(0, self.max_tokens - self.cache.room)

    def begin(self, prefixes: PrefixStore) -> None:
        """Do nothing: slots are cleared as rows enter."""

    def free_rows(
        self, now: Running, taken: int, batch: Sequence[Admission], context: Units, prefix: Prefix | None
    ) -> int:
        """Return how many rows may enter: slots are all as long as the longest row."""
        longest = max(now.longest, len(context), *(len(one.prompt) for one in batch), 0)
        return self.rows_of(now.ahead(longest + 1)) - taken

    def has_next(self, now: Running) -> bool:
        """Whether there can be slots for the longest row, or the prompt in pieces, and one token more."""
        return now.rows + int(now.in_pieces > 0) <= self.rows_of(max(now.longest, now.in_pieces) + 1)

    def fit(
        self, now: Running, rows: int, length: int, *, live: int, in_pieces: bool, prefixes: PrefixStore
    ) -> None:
        """Resize the slots; kept prefixes are evicted for them."""
        size = self.size_for(rows, length, wanted=live, longest=now.longest_ever)
        assert size is not None, (
            f"{rows} rows of {length} tokens were let in, but memory holds {self.max_tokens} tokens"
        )
        cache = self.cache
        if size != Size(cache.num_slots, cache.capacity, cache.room):
            prefixes.shrink(max(0, self.max_tokens - size.room))
            kept = min(cache.capacity, size.capacity)
            cache.resize(
                size.slots, size.capacity, rows=now.rows, length=kept, last=in_pieces, room=size.room
            )

    def rows_of(self, length: int) -> int:
        """How many rows of `length` tokens fit."""
        return self.max_tokens // self.capacity_for(max(1, length))

    def capacity_for(self, length: int) -> int:
        """Tokens that slots have where the longest row has `length`."""
        if self.exact is not None:
            return self.exact.num_keys(length)
        return slot_capacity(length)

    def size_for(self, rows: int, length: int, *, wanted: int, longest: int) -> Size | None:
        """Return the size for `rows` of `length` tokens now and later `wanted` rows of up to `longest`
        tokens, or None where memory is too small.

        On CPU the capacity is what `length` asks for. Elsewhere, where attention reads parts of slots as fast
        as whole ones, slots take all the room there is, and stay as they are while the rows fit.
        """
        cache = self.cache
        capacity = self.capacity_for(length)
        follows = self.device.type == "cpu"
        if rows * capacity > self.max_tokens:
            return None
        if rows <= cache.num_slots and (
            capacity == cache.capacity if follows else capacity <= cache.capacity
        ):
            return Size(cache.num_slots, cache.capacity, cache.room)
        slots = min(max(cache.num_slots, rows, wanted), self.max_tokens // capacity)
        room = cache.room
        if slots * capacity > room:
            ahead = min(longest, max(length + AHEAD, 3 * room // (2 * slots)))
            room = min(self.max_tokens, slots * max(capacity, self.capacity_for(ahead)))
        return Size(slots, capacity if follows else room // slots, room)
