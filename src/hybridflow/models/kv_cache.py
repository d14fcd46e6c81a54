"""The key-value cache of running rows: one contiguous slot per row, [slots, KV, capacity, D] in each layer.

    prefill ──write (a prompt's tokens to all its rows' slots)──► slots ◄──write (one token per row)── decode
                                       │ move (rows into holes), fork (one to many), read and load (prefixes)

A new row's slot is cleared first, since entries that a mask hides still have to be finite.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
    """Return the bytes of one more token in a `SlotCache` of these layers, its spare memory included."""
    own = sum(shape.bytes_per_token for shape in shapes.values())
    spare = {(shape.kv_heads * dim, shape.dtype) for shape in shapes.values() for dim in shape.dims}
    return own + sum(width * dtype.itemsize for width, dtype in spare)


class RowCopy:
    """Keys and values of a row's first tokens, kept outside of the slots."""


class KVCache(ABC):
    """Keys and values by layer of rows that have a slot each.

    Only the cache and the layouts of attention know how they lie in memory.
    """

    shares = False
    """Whether rows with the same first tokens share their keys and values."""
    num_slots: int
    capacity: int
    """Number of tokens that a slot can hold now."""
    room: int
    """Number of tokens that each layer has memory for now."""
    keys: dict[int, Tensor]
    values: dict[int, Tensor]

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory held, in bytes."""

    @abstractmethod
    def write(self, layer: int, key: Tensor, value: Tensor, places: Places) -> None:
        """Store key [N, KV, D] and value [N, KV, Dv] at `places`, in place."""

    @abstractmethod
    def tokens_of(self, layer: int, slots: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return keys [n, KV, length, D] and values [n, KV, length, Dv] of slots [n] int64."""

    @abstractmethod
    def read(self, slot: int, length: int) -> RowCopy:
        """Return the first `length` tokens of a slot, kept outside of it."""

    @abstractmethod
    def load(self, copy: RowCopy, destination: Sequence[int], length: int) -> None:
        """Put the first `length` tokens that `read` kept into slots of new rows."""

    @abstractmethod
    def clear(self, start: int, stop: int) -> None:
        """Prepare slots start..stop-1 for new rows."""

    @abstractmethod
    def move(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Move rows from slots `source` to slots `destination`; the two share no slot."""

    @abstractmethod
    def fork(self, source: int, destination: Sequence[int], length: int) -> None:
        """Put the first `length` tokens of one slot into slots of new rows."""

    def extend(self, slots: Sequence[int], stop: int | None = None) -> None:  # noqa: B027  slots have their room
        """Make room for tokens of these slots up to `stop`, or for one more of each."""

    def drop(self, start: int, stop: int) -> None:  # noqa: B027  the tokens stay until the next row comes
        """Free slots start..stop-1, whose rows have left."""

    def wipe(self, slots: Sequence[int]) -> None:  # noqa: B027  a slot is cleared before its next row comes
        """Clear these slots, whose contents are not finite and must not stay behind."""


class Places:
    """The slot and position [N] int64 at which each of N tokens is stored.

    `source` [N] picks the tokens among those that were computed; None takes them in order.
    """

    def __init__(self, slots: Tensor, positions: Tensor, source: Tensor | None = None) -> None:
        self.slots = slots
        self.positions = positions
        self.source = source
        self._flat: dict[tuple[int, int], Tensor] = {}

    @classmethod
    def of_pieces(
        cls,
        lengths: Sequence[int],
        starts: Sequence[int],
        slots: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> Places:
        """Return the places of pieces that are computed one after the other.

        All lengths[i] tokens of piece i go to each of slots[i], from position starts[i] on.
        """
        owner = torch.tensor([piece for piece, own in enumerate(slots) for _ in own])
        length = torch.tensor(lengths)
        start = torch.tensor(starts)
        counts = length[owner]
        ends = counts.cumsum(0)
        within = torch.arange(int(ends[-1])) - (ends - counts).repeat_interleave(counts)
        source = (length.cumsum(0) - length)[owner].repeat_interleave(counts) + within
        positions = start[owner].repeat_interleave(counts) + within
        slot = torch.tensor([slot for own in slots for slot in own]).repeat_interleave(counts)
        return cls(slot.to(device), positions.to(device), source.to(device))

    def flat(self, kv_heads: int, capacity: int) -> Tensor:
        """Return the row of each (token, head) in a layer seen as [slots * KV * capacity, D]: [N * KV] int64.

        It is computed once and serves all layers.
        """
        known = self._flat.get((kv_heads, capacity))
        if known is None:
            heads = torch.arange(kv_heads, device=self.slots.device) * capacity
            known = ((self.slots * (kv_heads * capacity) + self.positions)[:, None] + heads).reshape(-1)
            self._flat[(kv_heads, capacity)] = known
        return known

    def in_blocks(self, table: Tensor, block_size: int) -> Tensor:
        """Return the row of each token in a layer seen as [blocks * block_size, KV, D]: [N] int64.

        `table` [slots, n] has the blocks of each slot.
        """
        known = self._flat.get((0, block_size))
        if known is None:
            blocks = table[self.slots, torch.div(self.positions, block_size, rounding_mode="floor")].long()
            known = self._flat[(0, block_size)] = blocks * block_size + self.positions % block_size
        return known


@dataclass(frozen=True)
class SlotCopy(RowCopy):
    """Keys [KV, L, D] and values [KV, L, Dv] of the first tokens of a row, by layer."""

    keys: dict[int, Tensor]
    values: dict[int, Tensor]


class SlotCache(KVCache):
    """Keys and values of `num_slots` rows of at most `capacity` tokens each.

    A slot in use holds zeros behind its row's tokens. Each layer has one flat piece of memory, seen as
    [slots, KV, capacity, D]. To change the capacity, kept tokens are copied to a spare piece in the new
    shape, and the old piece becomes the spare one of the next layer. So the capacity can follow the longest
    row, attention reads whole slots, and nothing is allocated while there is room.
    """

    def __init__(
        self, shapes: dict[int, LayerShape], num_slots: int, capacity: int, device: torch.device | str = "cpu"
    ) -> None:
        self.num_slots = self.capacity = self.room = 0
        self._device = device
        self.keys, self.values = {}, {}
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
        """Memory held, in bytes."""
        return sum(x.nbytes for x in (*self._memory.values(), *self._spare.values()))

    def resize(
        self,
        num_slots: int,
        capacity: int,
        *,
        rows: int = 0,
        length: int = 0,
        last: bool = False,
        room: int = 0,
    ) -> None:
        """Change the number of slots and their capacity.

        The first `length` tokens of the first `rows` slots stay; with `last`, those of the last slot stay in
        the new last slot. Where memory has to grow, it gets room for `room` tokens in each layer.
        """
        assert length <= min(capacity, self.capacity), (
            f"{length} tokens are to stay, of {self.capacity} to {capacity}"
        )
        assert rows + int(last) <= min(num_slots, self.num_slots), (
            f"{rows} rows are to stay, of {self.num_slots} to {num_slots} slots"
        )
        if num_slots * capacity > self.room:
            self.room = max(room, num_slots * capacity)
            self._spare.clear()
        for which, tensors in enumerate((self.keys, self.values)):
            for layer, old in tensors.items():
                shape = (num_slots, old.shape[1], capacity, old.shape[3])
                size = math.prod(shape)
                memory = self._piece((layer, which), old.shape[1] * old.shape[3], copied=rows > 0 or last)
                tensors[layer] = new = memory[:size].view(shape)
                if rows:
                    new[:rows, :, :length] = old[:rows, :, :length]
                    new[:rows, :, length:] = 0
                if last:
                    new[-1, :, :length] = old[-1, :, :length]
                    new[-1, :, length:] = 0
        self.num_slots = num_slots
        self.capacity = capacity

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

    def read(self, slot: int, length: int) -> SlotCopy:
        """Return a copy of the first `length` tokens of a slot."""
        keys, values = (
            {layer: x[slot, :, :length].clone() for layer, x in stored.items()}
            for stored in (self.keys, self.values)
        )
        return SlotCopy(keys, values)

    def load(self, copy: RowCopy, destination: Sequence[int], length: int) -> None:
        """Write the first `length` tokens of a copy to these slots."""
        assert isinstance(copy, SlotCopy), f"slots cannot load {type(copy).__name__}"
        index = torch.tensor(destination, device=self._device)
        for stored, kept in ((self.keys, copy.keys), (self.values, copy.values)):
            for layer, new in kept.items():
                stored[layer][:, :, :length].index_copy_(
                    0, index, new[None, :, :length].expand(len(index), -1, -1, -1)
                )

    def clear(self, start: int, stop: int) -> None:
        """Fill slots start..stop-1 with zeros for new rows."""
        for stored in (*self.keys.values(), *self.values.values()):
            stored[start:stop] = 0

    def write(self, layer: int, key: Tensor, value: Tensor, places: Places) -> None:
        """Store key [N, KV, D] and value [N, KV, Dv] at `places`, in place."""
        for stored, new in ((self.keys[layer], key), (self.values[layer], value)):
            if places.source is not None:
                new = new.index_select(0, places.source)
            flat = places.flat(stored.shape[1], stored.shape[2])
            stored.view(-1, stored.shape[-1]).index_copy_(0, flat, new.reshape(-1, stored.shape[-1]))

    def tokens_of(self, layer: int, slots: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return a copy of the first tokens of some slots."""
        keys, values = (
            stored[layer][:, :, :length].index_select(0, slots) for stored in (self.keys, self.values)
        )
        return keys, values

    def move(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Copy slots `source` to slots `destination`; the two share no slot."""
        places, index = torch.tensor([source, destination], device=self._device)
        for stored in (*self.keys.values(), *self.values.values()):
            stored.index_copy_(0, index, stored.index_select(0, places))

    def fork(self, source: int, destination: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of one slot to slots `destination`."""
        index = torch.tensor(destination, device=self._device)
        for stored in (*self.keys.values(), *self.values.values()):
            used = stored[:, :, :length]
            used.index_copy_(0, index, used[source : source + 1].expand(len(index), -1, -1, -1))
