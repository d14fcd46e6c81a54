"""The key-value cache of running rows, and how many rows of a given length fit into memory.

    spans of a pass ──write──► rows ──first_rows, tokens_of──► attention
    prefix hit, group ──copy (one row or kept copy to many rows)──┘  ▲ move (rows into holes)

`SlotCache`, below, is for CPU: one contiguous slot for each row, over which attention is fastest there, and a
prefix hit copies. `paged_cache.PagedCache` is for CUDA: blocks, which rows with the same first tokens share.
Row i of the running rows is row i of the cache. Sizes are bounded in tokens.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hybridflow.distributed.transfers import to_device
from hybridflow.models.attention.scores import Scores


class CacheSlots:
    """The row and the position [N] int64 at which each of N tokens is stored."""

    def __init__(self, rows: Tensor, positions: Tensor) -> None:
        self.rows = rows
        self.positions = positions
        self._flat: dict[tuple[int, int], Tensor] = {}

    @classmethod
    def of_spans(
        cls,
        rows: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> CacheSlots:
        """Return the places of spans one after the other: counts[i] tokens of rows[i], from starts[i] on."""
        count = torch.tensor(counts)
        shift = torch.tensor(starts) - (count.cumsum(0) - count)
        positions = torch.arange(sum(counts)) + shift.repeat_interleave(count)
        device = torch.device(device)
        return cls(
            to_device(torch.tensor(rows).repeat_interleave(count), device), to_device(positions, device)
        )

    def flat(self, kv_heads: int, capacity: int) -> Tensor:
        """Return the place of each token and head in a layer seen as [rows * KV * capacity, D]: [N * KV].

        It is computed once and serves all layers.
        """
        known = self._flat.get((kv_heads, capacity))
        if known is None:
            heads = torch.arange(kv_heads, device=self.rows.device) * capacity
            known = ((self.rows * (kv_heads * capacity) + self.positions)[:, None] + heads).reshape(-1)
            self._flat[(kv_heads, capacity)] = known
        return known

    def in_blocks(self, table: Tensor, block_size: int) -> Tensor:
        """Return the place of each token in a layer seen as [blocks * block_size, KV, D]: [N] int64.

        `table` [rows, n] has the blocks of each row.
        """
        known = self._flat.get((0, block_size))
        if known is None:
            blocks = table[self.rows, torch.div(self.positions, block_size, rounding_mode="floor")].long()
            known = self._flat[(0, block_size)] = blocks * block_size + self.positions % block_size
        return known


_PLACES = itertools.count()
AHEAD = 64
"""Tokens by which memory grows, at least."""
KEYS = 16
"""Slots have a multiple of this many tokens, where the rows are short."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes of the keys and values that one layer stores for a token; layers of a model may differ."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def dims(self) -> tuple[int, int]:
        """Sizes of one head's key and value."""
        return self.key_dim, self.value_dim

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's keys and values."""
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


def bytes_per_token(shapes: Mapping[int, LayerShape]) -> int:
    """Return the bytes of one more token in a cache of these layers, with the spare memory of slots."""
    own = sum(shape.bytes_per_token for shape in shapes.values())
    spare = {(shape.kv_heads * dim, shape.dtype) for shape in shapes.values() for dim in shape.dims}
    return own + sum(width * dtype.itemsize for width, dtype in spare)


def slot_capacity(length: int) -> int:
    """Tokens that slots have where the longest row has `length`: up to an eighth more, so that they change
    seldom.

    It depends on nothing else, because a row's numbers depend on it in their last bits.
    """
    step = max(KEYS, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step


InPlace = Callable[[Tensor, Scores, int | None], Tensor]
"""Attention of decoding over keys where they lie: (query [B, H, 1, D], scores, window) -> [B, 1, H, Dv]."""


class RowCopy:
    """Keys and values of a row's first tokens, kept apart from the rows."""


class KeptPrefixes(Protocol):
    """The kept copies, which give way to rows."""

    num_tokens: int

    def evict(self) -> bool:
        """Evict the least recently used copy; False where there is none."""
        ...


class KVCache(ABC):
    """Keys and values of running rows, by layer; only the cache knows how they lie in memory."""

    kept: KeptPrefixes | None = None
    """Copies that are evicted where rows need the memory."""
    num_slots: int
    """Number of rows that the tensors have a place for now."""
    capacity: int
    """Number of tokens that a row can hold now."""
    room: int
    """Number of tokens that each layer has memory for now."""
    place: int
    """Number that no cache had before; another one whenever a tensor has got another address or shape."""
    reads_lengths = False
    """Whether decoding attends to as many tokens as each row has, whatever the number of keys it is given."""
    keys: dict[int, Tensor]
    values: dict[int, Tensor]

    def __init__(self, shapes: Mapping[int, LayerShape], device: torch.device | str, max_tokens: int) -> None:
        """`max_tokens` is the most that rows and kept copies may have together."""
        self.device = torch.device(device)
        self.max_tokens = max_tokens
        self.bytes_per_token = bytes_per_token(shapes)
        self._moved()

    def _moved(self) -> None:
        """Note that tensors have other addresses or shapes now."""
        self.place = next(_PLACES)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a decode step reads and writes."""
        return [*self.keys.values(), *self.values.values()]

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory held, in bytes."""

    def problem(self, length: int) -> str | None:
        """Return the reason why a row of `length` tokens can never be held, or None where it can."""
        taken = self.tokens_for(length)
        if taken <= self.max_tokens:
            return None
        return (
            f"the KV cache of 1 row of {length} tokens takes {taken * self.bytes_per_token / 2**20:.1f} "
            f"MiB, but it may use {self.max_tokens * self.bytes_per_token / 2**20:.1f} MiB: shorten "
            "data.max_prompt_length or data.max_response_length, or raise "
            "actor_rollout_ref.rollout.gpu_memory_utilization"
        )

    @abstractmethod
    def tokens_for(self, length: int) -> int:
        """Return the tokens whose memory one row of `length` tokens takes."""

    @abstractmethod
    def plan(self, rows: int, longest: int) -> None:
        """Start to plan a pass beside `rows` running rows, which shall reach `longest` tokens at most."""

    @abstractmethod
    def admit(self, count: int, length: int, longest: int, source: int | RowCopy | None, shared: int) -> int:
        """Return how many of `count` rows of one context of `length` tokens fit, and plan with them.

        They shall reach `longest` tokens, and the first `shared` ones are those of `source`.
        """

    def grow(self, running: int, rows: int, length: int, *, live: int = 0, longest: int = 0) -> bool:
        """Make room for `rows` rows, the longest of `length` tokens, of which the first `running` stay.

        New rows are empty. `live` is the number of rows that there may soon be, `longest` the most tokens of
        any request. False where memory ends; then nothing has changed. Blocks are taken in `extend`.
        """
        return True

    def extend(self, rows: Sequence[int], length: int) -> bool:
        """Take memory for these rows up to `length` tokens; False where it ends."""
        return True

    def advance(self, count: int) -> bool:
        """Take memory for one more token of each of the first `count` rows; False where it ends."""
        return True

    def take_back(self, rows: Sequence[int], counts: Sequence[int]) -> None:  # noqa: B027  slots need nothing
        """Shorten each of these rows by its count of tokens; new ones are written over them."""

    @abstractmethod
    def write(self, layer: int, key: Tensor, value: Tensor, places: CacheSlots) -> None:
        """Store key [N, KV, D] and value [N, KV, Dv] at `places`, in place."""

    def keys_read(self, longest: int) -> int:
        """Return how many positions of each row decoding attends to if the longest has `longest` tokens."""
        return longest

    @abstractmethod
    def first_rows(self, layer: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return keys [n, KV, length, D] and values [n, KV, length, Dv] of the first `rows` rows."""

    @abstractmethod
    def tokens_of(self, layer: int, rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values as `first_rows` does, of rows [n] int64."""

    def in_place(self, lengths: Tensor, num_keys: int) -> InPlace | None:
        """Return attention over up to `num_keys` tokens of the first rows where they lie, or None."""
        return None

    @abstractmethod
    def read(self, row: int, length: int) -> RowCopy | None:
        """Return the first `length` tokens of a row, kept apart from it; None where no memory is left."""

    @abstractmethod
    def copy(self, source: int | RowCopy, rows: Sequence[int], length: int) -> None:
        """Put the first `length` tokens of a row, or of what `read` kept, into new rows."""

    def fork(self, groups: Sequence[tuple[int, Sequence[int], int]]) -> None:
        """For each (row, new rows, length), put the first `length` tokens of the row into the new ones."""
        for source, rows, length in groups:
            self.copy(source, rows, length)

    @abstractmethod
    def move(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Move rows `source` to `destination`; a row may be in both."""

    def drop(self, rows: Iterable[int]) -> None:  # noqa: B027  slots need nothing
        """Free these rows, which have left."""

    def wipe(self, rows: Sequence[int]) -> None:  # noqa: B027  a slot is cleared before its next row comes
        """Clear these rows, whose contents are not finite and must not stay behind."""

    def _evict_to(self, num_tokens: int) -> None:
        """Evict kept copies until they have at most `num_tokens` tokens."""
        while self.kept is not None and self.kept.num_tokens > num_tokens and self.kept.evict():
            pass


@dataclass(frozen=True)
class SlotCopy(RowCopy):
    """Keys [KV, L, D] and values [KV, L, Dv] of the first tokens of a row, by layer."""

    keys: dict[int, Tensor]
    values: dict[int, Tensor]


class SlotCache(KVCache):
    """A cache with `num_slots` slots of `capacity` tokens each.

    A slot in use holds zeros behind its row's tokens: entries that a mask hides have to be finite. Each layer
    has one flat piece of memory, seen as [slots, KV, capacity, D]. To change the capacity, tokens are copied
    to a spare piece in the new shape, and the old piece becomes the spare one of the next layer. So the
    capacity can follow the longest row, attention reads whole slots, and nothing is allocated while there is
    room.
    """

    capacity_of: Callable[[int], int] = staticmethod(slot_capacity)
    """Function from the tokens of the longest row to the capacity; exact mode has its own."""

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        num_slots: int = 0,
        capacity: int = 0,
        device: torch.device | str = "cpu",
        max_tokens: int = 1 << 62,
    ) -> None:
        super().__init__(shapes, device, max_tokens)
        self.num_slots = self.capacity = self.room = 0
        self.keys, self.values = {}, {}
        self._planned = (0, 0)
        self._memory: dict[tuple[int, int], Tensor] = {}
        for layer, shape in shapes.items():
            for which, stored in enumerate((self.keys, self.values)):
                size = (0, shape.kv_heads, 0, shape.dims[which])
                stored[layer] = torch.zeros(size, dtype=shape.dtype, device=device)
                self._memory[(layer, which)] = stored[layer].view(-1)
        self._spare: dict[tuple[int, torch.dtype], Tensor] = {}
        self.resize(num_slots, capacity)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self._memory.values(), *self._spare.values()))

    @property
    def _follows(self) -> bool:
        """Whether slots are no longer than the longest row needs: on CPU, where attention reads whole slots.

        Elsewhere they take all the room there is, and stay as they are while the rows fit.
        """
        return self.device.type == "cpu"

    def keys_read(self, longest: int) -> int:
        """Return over how many places of each slot decoding attends."""
        return self.capacity if self._follows else longest

    def tokens_for(self, length: int) -> int:
        """Return the capacity of slots where the longest row has `length` tokens."""
        return self.capacity_of(max(1, length))

    def plan(self, rows: int, longest: int) -> None:
        self._planned = (rows, longest)

    def admit(self, count: int, length: int, longest: int, source: int | RowCopy | None, shared: int) -> int:
        """Return how many rows fit, and plan with them: slots are all as long as the longest row."""
        rows, before = self._planned
        most = max(before, longest)
        fitting = max(0, min(count, self.max_tokens // self.tokens_for(most) - rows))
        if fitting:
            self._planned = (rows + fitting, most)
        return fitting

    def grow(self, running: int, rows: int, length: int, *, live: int = 0, longest: int = 0) -> bool:
        """Resize the slots where they must be longer or more, and clear those of new rows."""
        capacity = self.tokens_for(length)
        if rows * capacity > self.max_tokens:
            return False
        fits = capacity == self.capacity if self._follows else capacity <= self.capacity
        if rows > self.num_slots or not fits:
            slots = min(max(self.num_slots, rows, live), self.max_tokens // capacity)
            room = self.room
            if slots * capacity > room:
                ahead = min(longest, max(length + AHEAD, 3 * room // (2 * slots)))
                room = min(self.max_tokens, slots * max(capacity, self.tokens_for(ahead)))
            if not self._follows:
                capacity = room // slots
            self._evict_to(self.max_tokens - room)
            self.resize(slots, capacity, rows=running, length=min(capacity, self.capacity), room=room)
        if rows > running:
            for stored in (*self.keys.values(), *self.values.values()):
                stored[running:rows] = 0
        return True

    def resize(self, num_slots: int, capacity: int, *, rows: int = 0, length: int = 0, room: int = 0) -> None:
        """Change the number of slots and their capacity.

        The first `length` tokens of the first `rows` slots stay. Where memory has to grow, it gets room for
        `room` tokens in each layer.
        """
        assert length <= min(capacity, self.capacity), (
            f"{length} tokens are to stay, of {self.capacity} to {capacity}"
        )
        assert rows <= min(num_slots, self.num_slots), (
            f"{rows} rows are to stay, of {self.num_slots} to {num_slots} slots"
        )
        if num_slots * capacity > self.room:
            self.room = max(room, num_slots * capacity)
            self._spare.clear()
        for which, tensors in enumerate((self.keys, self.values)):
            for layer, old in tensors.items():
                shape = (num_slots, old.shape[1], capacity, old.shape[3])
                size = math.prod(shape)
                memory = self._piece((layer, which), old.shape[1] * old.shape[3], copied=rows > 0)
                tensors[layer] = new = memory[:size].view(shape)
                if rows:
                    new[:rows, :, :length] = old[:rows, :, :length]
                    new[:rows, :, length:] = 0
        self.num_slots = num_slots
        self.capacity = capacity
        self._moved()

    def _piece(self, name: tuple[int, int], width: int, *, copied: bool) -> Tensor:
        """Return memory for the keys or values of a layer, `width` numbers a token.

        It is another piece than they are in now if they are to be `copied`.
        """
        now = self._memory[name]
        size = self.room * width
        if now.numel() < size:
            self._memory[name] = now.new_zeros(size)
        elif copied:
            spare = self._spare.pop((width, now.dtype), None)
            if spare is None:
                spare = now.new_zeros(size)
            self._memory[name] = spare
            self._spare[(width, now.dtype)] = now
        return self._memory[name]

    def write(self, layer: int, key: Tensor, value: Tensor, places: CacheSlots) -> None:
        for stored, new in ((self.keys[layer], key), (self.values[layer], value)):
            flat = places.flat(stored.shape[1], stored.shape[2])
            stored.view(-1, stored.shape[-1]).index_copy_(0, flat, new.reshape(-1, stored.shape[-1]))

    def first_rows(self, layer: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the first tokens of the first rows, without a copy."""
        keys, values = (stored[layer][:rows] for stored in (self.keys, self.values))
        if length == self.capacity:
            return keys, values
        return keys[:, :, :length], values[:, :, :length]

    def tokens_of(self, layer: int, rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return a copy of the first tokens of some rows."""
        keys, values = (
            stored[layer][:, :, :length].index_select(0, rows) for stored in (self.keys, self.values)
        )
        return keys, values

    def read(self, row: int, length: int) -> SlotCopy | None:
        """Return a copy of the first tokens of a row, for which older ones are evicted; None: no room."""
        left = self.max_tokens - self.room - length
        if left < 0:
            return None
        self._evict_to(left)
        keys, values = (
            {layer: x[row, :, :length].clone() for layer, x in stored.items()}
            for stored in (self.keys, self.values)
        )
        return SlotCopy(keys, values)

    def copy(self, source: int | RowCopy, rows: Sequence[int], length: int) -> None:
        """Copy the first tokens of a row or of a kept copy to these rows."""
        index = to_device(rows, self.device)
        for which, stored in (("keys", self.keys), ("values", self.values)):
            for layer, x in stored.items():
                first = x[source] if isinstance(source, int) else getattr(source, which)[layer]
                first = first[None, :, :length].expand(len(rows), -1, -1, -1)
                x[:, :, :length].index_copy_(0, index, first)

    def fork(self, groups: Sequence[tuple[int, Sequence[int], int]]) -> None:
        """Copy all rows at once: behind a row's tokens there are zeros, in the new rows too."""
        source = [first for first, rows, _ in groups for _ in rows]
        destination = [row for _, rows, _ in groups for row in rows]
        if source:
            self._move(source, destination, max(length for _, _, length in groups))

    def move(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Copy slots `source` to slots `destination`."""
        self._move(source, destination, self.capacity)

    def _move(self, source: Sequence[int], destination: Sequence[int], length: int) -> None:
        places, index = to_device([source, destination], self.device)
        for stored in (*self.keys.values(), *self.values.values()):
            used = stored[:, :, :length]
            used.index_copy_(0, index, used.index_select(0, places))
