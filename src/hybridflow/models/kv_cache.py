"""Keys and values of the running rows: one contiguous slot per row, [slots, KV, capacity, D] in each layer.

    prefill ──write (a prompt's tokens to all its rows' slots)──► slots ◄──write (one token per row)── decode
                                                                    │
                                                 move (rows into holes), fork (one slot to many), read and
                                                 load (a kept prefix)

A new row's slot is cleared first: what a mask hides still has to be finite.
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
    """What one layer stores per token; layers of a model may differ."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values."""
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


def bytes_per_token(shapes: Mapping[int, LayerShape]) -> int:
    """What one more token takes in a `SlotCache` of these layers: in each of them, and in the spare memory of
    each size.
    """
    spare = {
        (shape.kv_heads * dim, shape.dtype)
        for shape in shapes.values()
        for dim in (shape.key_dim, shape.value_dim)
    }
    return sum(shape.bytes_per_token for shape in shapes.values()) + sum(
        width * dtype.itemsize for width, dtype in spare
    )


class RowCopy:
    """The first tokens of a row, kept outside of the slots."""


class KVCache(ABC):
    """Keys and values by layer, of rows that are each in a slot; how they lie is for the cache and the
    layouts of attention to know.
    """

    shares = False
    """Rows that begin alike have those tokens once."""
    num_slots: int
    capacity: int
    """Tokens that a slot can have now."""
    room: int
    """Tokens in each layer that there is memory for now."""
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
        """Keys [n, KV, length, D] and values [n, KV, length, Dv] of the first tokens of slots [n] int64."""

    @abstractmethod
    def read(self, slot: int, length: int) -> RowCopy:
        """Keep the first `length` tokens of a slot."""

    @abstractmethod
    def load(self, copy: RowCopy, destination: Sequence[int], length: int) -> None:
        """The first `length` tokens of what `read` kept go to slots of new rows."""

    @abstractmethod
    def clear(self, start: int, stop: int) -> None:
        """Slots start..stop-1 are for new rows."""

    @abstractmethod
    def move(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """What is in slots `source` goes to slots `destination`; the two share no slot."""

    @abstractmethod
    def fork(self, source: int, destination: Sequence[int], length: int) -> None:
        """The first `length` tokens of one slot go to slots of new rows."""

    @abstractmethod
    def extend(self, slots: Sequence[int], stop: int | None = None) -> None:
        """Tokens of these slots are to be written, up to `stop` (left out: one more of each)."""

    @abstractmethod
    def drop(self, start: int, stop: int) -> None:
        """No row is in slots start..stop-1 any longer."""

    @abstractmethod
    def wipe(self, slots: Sequence[int]) -> None:
        """What is in these slots is not finite, and must not stay behind."""


class Places:
    """Where N tokens go: slot and position [N] int64 of each; `source` [N] picks them among those computed
    (None: in order).
    """

    def __init__(self, slots: Tensor, positions: Tensor, source: Tensor | None = None) -> None:
        self.slots, self.positions, self.source = slots, positions, source
        self._flat: dict[tuple[int, int], Tensor] = {}

    @classmethod
    def of_pieces(
        cls,
        lengths: Sequence[int],
        starts: Sequence[int],
        slots: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> Places:
        """Of pieces that are computed one after the other: all lengths[i] tokens of piece i to each of
        slots[i], from starts[i] on.
        """
        owner = torch.tensor([piece for piece, own in enumerate(slots) for _ in own])
        length, start = torch.tensor(lengths), torch.tensor(starts)
        counts = length[owner]
        ends = counts.cumsum(0)
        within = torch.arange(int(ends[-1])) - (ends - counts).repeat_interleave(counts)
        source = (length.cumsum(0) - length)[owner].repeat_interleave(counts) + within
        positions = start[owner].repeat_interleave(counts) + within
        slot = torch.tensor([slot for own in slots for slot in own]).repeat_interleave(counts)
        return cls(slot.to(device), positions.to(device), source.to(device))

    def flat(self, kv_heads: int, capacity: int) -> Tensor:
        """Row of each (token, head) in a layer seen as [slots * KV * capacity, D]: [N * KV] int64; made once,
        serves all layers.
        """
        known = self._flat.get((kv_heads, capacity))
        if known is None:
            heads = torch.arange(kv_heads, device=self.slots.device) * capacity
            known = ((self.slots * (kv_heads * capacity) + self.positions)[:, None] + heads).reshape(-1)
            self._flat[(kv_heads, capacity)] = known
        return known

    def in_blocks(self, table: Tensor, block_size: int) -> Tensor:
        """Place of each token in a layer seen as [blocks * block_size, KV, D], by the blocks [slots, n] of
        each slot: [N] int64.
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
    """Keys and values of `num_slots` rows of at most `capacity` tokens each; a slot in use holds zeros behind
    its row's tokens.

    Each layer has room in one flat piece of memory, which is seen as [slots, KV, capacity, D]. Another
    capacity is another way to see it: what stays is copied to a spare piece in the new way, and the old piece
    is the spare one of the next layer. So the capacity can follow the longest row, attention reads whole
    slots, and nothing is allocated while there is room.
    """

    def __init__(
        self, shapes: dict[int, LayerShape], num_slots: int, capacity: int, device: torch.device | str = "cpu"
    ) -> None:
        self.num_slots = self.capacity = self.room = 0
        self._device = device
        self.keys, self.values = {}, {}
        for layer, shape in shapes.items():
            self.keys[layer] = torch.zeros(
                0, shape.kv_heads, 0, shape.key_dim, dtype=shape.dtype, device=device
            )
            self.values[layer] = torch.zeros(
                0, shape.kv_heads, 0, shape.value_dim, dtype=shape.dtype, device=device
            )
        self._memory = {
            (layer, which): x[layer].view(-1)
            for which, x in enumerate((self.keys, self.values))
            for layer in shapes
        }
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
        """Another size; the first `length` tokens of the first `rows` slots stay, and those of the `last`
        slot, as the last again.

        Where memory is too small for it, there will be room for `room` tokens in each layer.
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
        self.num_slots, self.capacity = num_slots, capacity

    def _piece(self, name: tuple[int, int], width: int, *, copied: bool) -> Tensor:
        """Memory for keys or values of a layer, `width` numbers a token; another piece than they are in now
        where these are `copied`.
        """
        now, size = self._memory[name], self.room * width
        if now.numel() < size:
            self._memory[name] = now.new_zeros(size)
        elif copied:
            spare = self._spare.pop((width, now.dtype), None)
            self._memory[name], self._spare[(width, now.dtype)] = (
                now.new_zeros(size) if spare is None else spare,
                now,
            )
        return self._memory[name]

    def read(self, slot: int, length: int) -> SlotCopy:
        """A copy of the first `length` tokens of a slot."""
        keys, values = (
            {layer: x[slot, :, :length].clone() for layer, x in stored.items()}
            for stored in (self.keys, self.values)
        )
        return SlotCopy(keys, values)

    def load(self, copy: RowCopy, destination: Sequence[int], length: int) -> None:
        """The first `length` tokens of a copy go to these slots."""
        assert isinstance(copy, SlotCopy), f"slots cannot load {type(copy).__name__}"
        index = torch.tensor(destination, device=self._device)
        for stored, kept in ((self.keys, copy.keys), (self.values, copy.values)):
            for layer, new in kept.items():
                stored[layer][:, :, :length].index_copy_(
                    0, index, new[None, :, :length].expand(len(index), -1, -1, -1)
                )

    def clear(self, start: int, stop: int) -> None:
        """Zeros in slots start..stop-1, for new rows."""
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
        """A copy of the first tokens of some slots."""
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

    def extend(self, slots: Sequence[int], stop: int | None = None) -> None:
        """Slots have their room already."""

    def drop(self, start: int, stop: int) -> None:
        """What is there stays until the next row."""

    def wipe(self, slots: Sequence[int]) -> None:
        """The next row's slot is cleared in any case."""
