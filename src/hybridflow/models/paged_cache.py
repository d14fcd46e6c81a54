"""The paged key-value cache: [blocks, tokens, KV, D] in each layer, and a table of each slot's blocks.

    slot 0  [ 4 | 7 | 2 ]        full blocks and blocks that are only read may belong to several slots
    slot 1  [ 4 | 7 | 9 ]        and kept prefixes, so each counts its holders; the last block of a row
    kept    [ 4 | 7 | 2 ]        is its own, since it will be written

The host knows the blocks of every row and never waits for the device. Block 0 belongs to no row: unused
entries of the table point to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridflow.distributed.accelerators import features
from hybridflow.models.kv_cache import KVCache, LayerShape, Places, RowCopy

PagedKernel = Callable[..., Any]
"""A kernel that attends over blocks in place: `torch.nn.attention.varlen.varlen_attn`, or one like it."""

LEAST_BLOCKS = 16
"""Number of blocks that memory is allocated for at least."""


class BlockPool:
    """The free blocks, and the number of holders of each of the others."""

    def __init__(self) -> None:
        self.counts = [1]
        self.free: list[int] = []

    @property
    def size(self) -> int:
        """Number of blocks, block 0 included."""
        return len(self.counts)

    def grow(self, size: int) -> None:
        """Add free blocks until there are `size`."""
        self.free += range(self.size, size)
        self.counts += [0] * (size - self.size)

    def take(self, count: int) -> list[int]:
        """Take free blocks, each for one holder."""
        assert count <= len(self.free), f"{count} blocks were asked for, and {len(self.free)} are free"
        taken = [self.free.pop() for _ in range(count)]
        self.hold(taken)
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """Count one more holder of these blocks."""
        for block in blocks:
            self.counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Count one holder less of these blocks, and free those without any."""
        for block in blocks:
            self.counts[block] -= 1
            if self.counts[block] == 0:
                self.free.append(block)


class HeldBlocks(RowCopy):
    """The first tokens of a row, in blocks that are held as long as this object lives."""

    def __init__(self, pool: BlockPool, blocks: Sequence[int]) -> None:
        self.blocks = tuple(blocks)
        self._pool = pool
        pool.hold(self.blocks)

    def __del__(self) -> None:
        self._pool.release(self.blocks)


class PagedCache(KVCache):
    """A cache whose rows lie in blocks, at most `max_blocks`.

    Memory grows by doubling; once it is full, `evict` is called to free blocks of kept prefixes.
    """

    shares = True
    kernel: PagedKernel | None = None
    """Kernel of decoding; None means that each row's tokens are gathered and attended over as in slots."""

    def __init__(
        self,
        shapes: dict[int, LayerShape],
        num_slots: int,
        max_blocks: int,
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_slots = num_slots
        self.max_blocks = max_blocks
        self.block_size = block_size
        self.device = torch.device(device)
        self.room = 0
        self.capacity = block_size
        self.pool = BlockPool()
        self.blocks: list[list[int]] = [[] for _ in range(num_slots)]
        self.lengths = [0] * num_slots
        """Number of tokens of each slot."""
        self.evict: Callable[[], bool] = lambda: False
        """Evicts one kept prefix; returns False if there is none."""
        self.table = torch.zeros(num_slots, 1, dtype=torch.int32, device=device)
        self._stale: set[int] = set()  # slots whose blocks the table does not say yet
        self.keys, self.values = {}, {}
        for layer, shape in shapes.items():
            for stored, dim in zip((self.keys, self.values), shape.dims):
                size = (1, block_size, shape.kv_heads, dim)
                stored[layer] = torch.zeros(size, dtype=shape.dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(x.nbytes for x in (*self.keys.values(), *self.values.values(), self.table))

    def num_blocks(self, length: int) -> int:
        """Return the number of blocks of a row of `length` tokens."""
        return -(-length // self.block_size)

    def num_obtainable(self, beside: Iterable[int] = ()) -> int:
        """Return how many blocks could be freed: those that neither a row nor `beside` holds."""
        return self.max_blocks - 1 - len(set(beside).union(*self.blocks))

    def extend(self, slots: Sequence[int], stop: int | None = None) -> None:
        """Take blocks for tokens of these slots up to `stop`, or for one more of each."""
        for slot in slots:
            length = stop
            if length is None:
                length = self.lengths[slot] + 1
            missing = self.num_blocks(length) - len(self.blocks[slot])
            if missing > 0:
                self.blocks[slot] += self._take(missing)
                self._stale.add(slot)
            self.lengths[slot] = max(self.lengths[slot], length)
        self._upload()

    def write(self, layer: int, key: Tensor, value: Tensor, places: Places) -> None:
        """Store key [N, KV, D] and value [N, KV, Dv] at `places`, in place."""
        flat = places.in_blocks(self.table, self.block_size)
        for stored, new in ((self.keys[layer], key), (self.values[layer], value)):
            if places.source is not None:
                new = new.index_select(0, places.source)
            stored.flatten(0, 1).index_copy_(0, flat, new)

    def tokens_of(self, layer: int, slots: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the first tokens of some slots, gathered from their blocks."""
        blocks = self.table[:, : self.num_blocks(length)].index_select(0, slots)
        keys, values = (
            stored[layer]
            .index_select(0, blocks.flatten())
            .unflatten(0, blocks.shape)
            .flatten(1, 2)[:, :length]
            .transpose(1, 2)
            for stored in (self.keys, self.values)
        )
        return keys, values

    def read(self, slot: int, length: int) -> HeldBlocks:
        """Hold the blocks of a row's first tokens; the row may go on to write behind them."""
        return HeldBlocks(self.pool, self.blocks[slot][: self.num_blocks(length)])

    def load(self, copy: RowCopy, destination: Sequence[int], length: int) -> None:
        """Put the first `length` kept tokens into slots of new rows."""
        assert isinstance(copy, HeldBlocks), f"blocks cannot load {type(copy).__name__}"
        self._share(copy.blocks, destination, length)

    def fork(self, source: int, destination: Sequence[int], length: int) -> None:
        """Put the first `length` tokens of one slot into slots of new rows."""
        self._share(self.blocks[source], destination, length)

    def move(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Move the blocks of slots `source` to slots `destination`."""
        for old, new in zip(source, destination, strict=True):
            self.drop(new, new + 1)
            self.blocks[new] = self.blocks[old]
            self.blocks[old] = []
            self.lengths[new] = self.lengths[old]
            self.lengths[old] = 0
            self._stale |= {old, new}

    def drop(self, start: int, stop: int) -> None:
        """Release the blocks of slots start..stop-1, whose rows have left."""
        for slot in range(start, stop):
            if self.blocks[slot]:
                self.pool.release(self.blocks[slot])
                self.blocks[slot] = []
                self.lengths[slot] = 0
                self._stale.add(slot)

    clear = drop

    def wipe(self, slots: Sequence[int]) -> None:
        """Zero the blocks that only these slots hold: entries that a mask hides still have to be finite."""
        held = Counter(block for slot in slots for block in self.blocks[slot])
        own = [block for block, count in held.items() if self.pool.counts[block] == count]
        index = torch.tensor([0, *own], device=self.device)
        for stored in (*self.keys.values(), *self.values.values()):
            stored.index_fill_(0, index, 0)

    def _share(self, blocks: Sequence[int], destination: Sequence[int], length: int) -> None:
        """Share whole blocks with slots of new rows, and copy the last block to each if it is not full."""
        whole = blocks[: length // self.block_size]
        last: list[int] = []
        if length % self.block_size:
            last = self._take(len(destination))
        for number, slot in enumerate(destination):
            assert not self.blocks[slot], f"slot {slot} is in use"
            self.pool.hold(whole)
            self.blocks[slot] = [*whole, *last[number : number + 1]]
            self.lengths[slot] = length
        self._stale.update(destination)
        if last:
            index = torch.tensor(last, device=self.device)
            source = blocks[len(whole)]
            for stored in (*self.keys.values(), *self.values.values()):
                stored.index_copy_(0, index, stored[source].clone().expand(len(last), -1, -1, -1))

    def _take(self, count: int) -> list[int]:
        """Take free blocks; if there are too few, grow the memory, then evict kept prefixes."""
        missing = count - len(self.pool.free)
        if missing > 0:
            self._grow(min(self.max_blocks, max(self.pool.size + missing, 2 * self.pool.size, LEAST_BLOCKS)))
        while len(self.pool.free) < count and self.evict():
            pass
        return self.pool.take(count)

    def _grow(self, num_blocks: int) -> None:
        """Allocate memory for so many blocks and copy those in use, one layer at a time."""
        if num_blocks <= self.pool.size:
            return
        for tensors in (self.keys, self.values):
            for layer, old in tensors.items():
                tensors[layer] = old.new_zeros(num_blocks, *old.shape[1:])
                tensors[layer][: len(old)] = old
        self.pool.grow(num_blocks)
        self.room = num_blocks * self.block_size

    def _upload(self) -> None:
        """Copy the changed rows of the table to the device in one transfer, without waiting for it."""
        if not self._stale:
            return
        width = max(len(self.blocks[slot]) for slot in self._stale)
        if width > self.table.shape[1]:
            self.table = self.table.new_zeros(self.num_slots, max(width, 2 * self.table.shape[1]))
            self.capacity = self.table.shape[1] * self.block_size
            self._stale = set(range(self.num_slots))
        slots = sorted(self._stale)
        width = self.table.shape[1]
        rows = torch.tensor(
            [[slot, *self.blocks[slot], *[0] * (width - len(self.blocks[slot]))] for slot in slots],
            dtype=torch.int32,
        )
        if features(self.device.type).pins_memory:
            rows = rows.pin_memory().to(self.device, non_blocking=True)
        self.table.index_copy_(0, rows[:, 0].long(), rows[:, 1:])
        self._stale.clear()
