"""Keys and values of the running rows: one contiguous slot per row, [slots, KV, capacity, D] in each layer.

    prefill ──write (a prompt's tokens to all its rows' slots)──► slots ◄──write (one token per row)── decode
                                                                    │
                                                 move (rows into holes), fork (one slot to many), read and load (a kept prefix)

Slots hold zeros from the start: what a mask hides still has to be finite.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class Places:
    """Where N tokens go: slot and position [N] int64 of each; `source` [N] picks them among those computed (None: in order)."""

    def __init__(self, slots: Tensor, positions: Tensor, source: Tensor | None = None) -> None:
        self.slots, self.positions, self.source = slots, positions, source
        self._flat: dict[tuple[int, int], Tensor] = {}

    def flat(self, kv_heads: int, capacity: int) -> Tensor:
        """Row of each (token, head) in a layer seen as [slots * KV * capacity, D]: [N * KV] int64; made once, serves all layers."""
        known = self._flat.get((kv_heads, capacity))
        if known is None:
            heads = torch.arange(kv_heads, device=self.slots.device) * capacity
            known = ((self.slots * (kv_heads * capacity) + self.positions)[:, None] + heads).reshape(-1)
            self._flat[(kv_heads, capacity)] = known
        return known


@dataclass(frozen=True)
class SlotCopy:
    """Keys [KV, L, D] and values [KV, L, Dv] of the first tokens of a row, by layer."""

    keys: dict[int, Tensor]
    values: dict[int, Tensor]


class SlotCache:
    """Keys and values of `num_slots` rows of at most `capacity` tokens each."""

    def __init__(self, shapes: dict[int, LayerShape], num_slots: int, capacity: int, device: torch.device | str = "cpu") -> None:
        self.num_slots, self.capacity = num_slots, capacity
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        for layer, shape in shapes.items():
            self.keys[layer] = torch.zeros(num_slots, shape.kv_heads, capacity, shape.key_dim, dtype=shape.dtype, device=device)
            self.values[layer] = torch.zeros(num_slots, shape.kv_heads, capacity, shape.value_dim, dtype=shape.dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(x.nbytes for x in (*self.keys.values(), *self.values.values()))

    def resize(self, num_slots: int, capacity: int, moves: Sequence[tuple[int, int]], length: int) -> None:
        """Another size; for each (old slot, new slot) of `moves` the first `length` tokens stay.

        A layer at a time, so that memory holds the old and the new of one layer only.
        """
        assert length <= min(capacity, self.capacity), f"{length} tokens are to stay, of {self.capacity} to {capacity}"
        self.num_slots, self.capacity = num_slots, capacity
        for tensors in (self.keys, self.values):
            for layer, old in tensors.items():
                new = old.new_zeros(num_slots, old.shape[1], capacity, old.shape[3])
                if moves and length:
                    source, destination = torch.tensor(list(zip(*moves)), device=old.device)
                    new[:, :, :length].index_copy_(0, destination, old[:, :, :length].index_select(0, source))
                tensors[layer] = new

    def read(self, slot: int, length: int) -> SlotCopy:
        """A copy of the first `length` tokens of a slot."""
        keys, values = ({layer: x[slot, :, :length].clone() for layer, x in stored.items()} for stored in (self.keys, self.values))
        return SlotCopy(keys, values)

    def load(self, copy: SlotCopy, destination: Tensor, length: int) -> None:
        """The first `length` tokens of a copy go to slots destination [n]."""
        for stored, kept in ((self.keys, copy.keys), (self.values, copy.values)):
            for layer, new in kept.items():
                stored[layer][:, :, :length].index_copy_(0, destination, new[None, :, :length].expand(len(destination), -1, -1, -1))

    def clear(self, slots: Sequence[int]) -> None:
        """Back to zeros, where what is there is not finite."""
        index = torch.tensor(slots, device=next(iter(self.keys.values())).device)
        for stored in (*self.keys.values(), *self.values.values()):
            stored.index_fill_(0, index, 0)

    def write(self, layer: int, key: Tensor, value: Tensor, places: Places) -> None:
        """Store key [N, KV, D] and value [N, KV, Dv] at `places`, in place."""
        for stored, new in ((self.keys[layer], key), (self.values[layer], value)):
            if places.source is not None:
                new = new.index_select(0, places.source)
            flat = places.flat(stored.shape[1], stored.shape[2])
            stored.view(-1, stored.shape[-1]).index_copy_(0, flat, new.reshape(-1, stored.shape[-1]))

    def move(self, source: Tensor, destination: Tensor, length: int) -> None:
        """Copy the first `length` tokens of slots source [n] to slots destination [n]; the two share no slot."""
        for stored in (*self.keys.values(), *self.values.values()):
            used = stored[:, :, :length]
            used.index_copy_(0, destination, used.index_select(0, source))

    def fork(self, source: int, destination: Tensor, length: int) -> None:
        """Copy the first `length` tokens of one slot to slots destination [n]."""
        for stored in (*self.keys.values(), *self.values.values()):
            used = stored[:, :, :length]
            used.index_copy_(0, destination, used[source : source + 1].expand(len(destination), -1, -1, -1))
