"""The paged key-value cache: [blocks, tokens, KV, D] in each layer, and a block table.

    row 0   [ 4 | 7 | 2 ]        full blocks and blocks that are only read may belong to several rows
    row 1   [ 4 | 7 | 9 ]        and kept copies, so each counts its holders; the last block of a row
    kept    [ 4 | 7 | 2 ]        is its own, since it will be written

The host knows the blocks of every row and never waits for the device. Block 0 belongs to no row: unused
entries of the table point to it. No row takes the memory of the longest one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridflow.distributed.transfers import to_device
from hybridflow.models.attention.scores import Scores
from hybridflow.models.cache.kv_cache import CacheSlots, InPlace, KVCache, LayerShape, RowCopy

PagedKernel = Callable[..., Any]
"""A kernel that attends over blocks in place: `torch.nn.attention.varlen.varlen_attn`, or one like it."""

LEAST_BLOCKS = 16
"""Number of blocks that memory is allocated for at least."""


class BlockPool:
    """The free blocks, and how many rows and kept copies hold each of the others."""

    def __init__(self) -> None:
        self.ref_counts = [1]
        self.row_counts = [1]
        self.free: list[int] = []
        self.in_rows = 0
        """Number of blocks that rows hold; all others are free, or can be by eviction."""

    @property
    def size(self) -> int:
        """Number of blocks, block 0 included."""
        return len(self.ref_counts)

    def grow(self, size: int) -> None:
        """Add free blocks until there are `size`."""
        more = size - self.size
        self.free += range(self.size, size)
        self.ref_counts += [0] * more
        self.row_counts += [0] * more

    def hold(self, blocks: Iterable[int], *, by_row: bool) -> None:
        """Count one more holder of these blocks."""
        for block in blocks:
            self.ref_counts[block] += 1
            if by_row:
                self.in_rows += self.row_counts[block] == 0
                self.row_counts[block] += 1

    def release(self, blocks: Iterable[int], *, by_row: bool) -> None:
        """Count one holder less of these blocks, and free those without any."""
        for block in blocks:
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free.append(block)
            if by_row:
                self.row_counts[block] -= 1
                self.in_rows -= self.row_counts[block] == 0


class HeldBlocks(RowCopy):
    """The first tokens of a row, in blocks that are held as long as this object lives."""

    def __init__(self, pool: BlockPool, blocks: Sequence[int]) -> None:
        self.blocks = tuple(blocks)
        self._pool = pool
        pool.hold(self.blocks, by_row=False)

    def __del__(self) -> None:
        self._pool.release(self.blocks, by_row=False)


class PagedCache(KVCache):
    """A cache whose rows lie in blocks, at most `max_blocks`; where they end, kept copies are evicted."""

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        num_slots: int,
        max_blocks: int,
        block_size: int,
        device: torch.device | str = "cpu",
        kernel: PagedKernel | None = None,
        reserve: int | None = None,
    ) -> None:
        """`kernel` decodes; None means that each row's tokens are gathered and attended over as in slots.

        `reserve`: take all memory now, with a table for rows of that many tokens, so that nothing moves while
        no row is longer; None: memory grows with the rows, by doubling.
        """
        super().__init__(shapes, device, (max_blocks - 1) * block_size)
        self.num_slots = num_slots
        self.max_blocks = max_blocks
        self.block_size = block_size
        self.kernel = kernel
        self.reads_lengths = kernel is not None
        self.room = 0
        self.capacity = block_size
        self.pool = BlockPool()
        self.blocks: list[list[int]] = [[] for _ in range(num_slots)]
        self.lengths = np.zeros(num_slots, np.int64)
        """Number of tokens that each row has memory for or has."""
        self._held = np.zeros(num_slots, np.int64)  # tokens that its blocks can hold
        self.table = torch.zeros(num_slots, 0, dtype=torch.int32, device=device)
        self._stale: set[int] = set()  # rows whose blocks the table does not have yet
        self._planned = 0  # blocks
        self.keys, self.values = {}, {}
        for layer, shape in shapes.items():
            for stored, dim in zip((self.keys, self.values), shape.dims):
                size = (1, block_size, shape.kv_heads, dim)
                stored[layer] = torch.zeros(size, dtype=shape.dtype, device=device)
        self._widen(1)
        if reserve is not None:
            self._widen(self.num_blocks(min(reserve, self.max_tokens)))
            self._allocate(max_blocks)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a decode step reads and writes, the table too."""
        return [*super().tensors(), self.table]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.keys.values(), *self.values.values(), self.table))

    @property
    def num_obtainable(self) -> int:
        """Number of blocks that no row holds: free ones, and those of kept copies alone."""
        return self.max_blocks - 1 - self.pool.in_rows

    def num_blocks(self, length: int) -> int:
        """Return the number of blocks of a row of `length` tokens."""
        return -(-length // self.block_size)

    def tokens_for(self, length: int) -> int:
        """Return the tokens of the blocks of one row."""
        return self.num_blocks(length) * self.block_size

    def plan(self, rows: int, longest: int) -> None:
        self._planned = 0

    def admit(self, count: int, length: int, longest: int, source: int | RowCopy | None, shared: int) -> int:
        """Return how many rows fit, and plan with them: they share the full blocks of their context.

        The blocks of a kept copy cannot be evicted while it is shared.
        """
        kept = sum(self.pool.row_counts[block] == 0 for block in self._blocks_of(source))
        blocks_of_first = kept + self.num_blocks(longest) - shared // self.block_size
        # each other row has the full blocks of the context in common with the first
        blocks_of_each_other = self.num_blocks(longest) - length // self.block_size
        free = self.num_obtainable - self._planned
        if free < blocks_of_first:
            return 0
        fitting = count
        if blocks_of_each_other:
            fitting = min(count, 1 + (free - blocks_of_first) // blocks_of_each_other)
        self._planned += blocks_of_first + blocks_of_each_other * (fitting - 1)
        return fitting

    def extend(self, rows: Sequence[int], length: int) -> bool:
        """Take blocks for these rows up to `length` tokens; False where they end."""
        missing = [(row, self.num_blocks(length) - len(self.blocks[row])) for row in rows]
        missing = [(row, count) for row, count in missing if count > 0]
        if sum(count for _, count in missing) > self.num_obtainable:
            return False
        for row, count in missing:
            self._set(row, self.blocks[row] + self._take(count))
        self.lengths[rows] = np.maximum(self.lengths[rows], length)
        self._upload()
        return True

    def advance(self, count: int) -> bool:
        """Take a block for each of the first rows whose blocks are full; False where they end."""
        full = (self.lengths[:count] >= self._held[:count]).nonzero()[0].tolist()
        if len(full) > self.num_obtainable:
            return False
        for row in full:
            self._set(row, self.blocks[row] + self._take(1))
        self.lengths[:count] += 1
        self._upload()
        return True

    def take_back(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Count these tokens out; a row keeps its blocks."""
        self.lengths[rows] -= counts

    def _set(self, row: int, blocks: list[int]) -> None:
        """Give a row these blocks in place of its own."""
        self.blocks[row] = blocks
        self._held[row] = len(blocks) * self.block_size
        self._stale.add(row)

    def write(self, layer: int, key: Tensor, value: Tensor, places: CacheSlots) -> None:
        flat = places.in_blocks(self.table, self.block_size)
        for stored, new in ((self.keys[layer], key), (self.values[layer], value)):
            stored.flatten(0, 1).index_copy_(0, flat, new)

    def first_rows(self, layer: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the first tokens of the first rows, gathered from their blocks."""
        return self._gathered(layer, self.table[:rows, : self.num_blocks(length)], length)

    def tokens_of(self, layer: int, rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the first tokens of some rows, gathered from their blocks."""
        self._upload()
        return self._gathered(layer, self.table[:, : self.num_blocks(length)].index_select(0, rows), length)

    def _gathered(self, layer: int, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
        keys, values = (
            stored[layer]
            .index_select(0, blocks.flatten())
            .unflatten(0, blocks.shape)
            .flatten(1, 2)[:, :length]
            .transpose(1, 2)
            for stored in (self.keys, self.values)
        )
        return keys, values

    def in_place(self, lengths: Tensor, num_keys: int) -> InPlace | None:
        """Return attention by the kernel, which reads the table; None where there is no kernel."""
        kernel = self.kernel
        if kernel is None:
            return None
        count = len(lengths)
        rows = torch.arange(count + 1, dtype=torch.int32, device=lengths.device)
        used = (lengths + 1).to(torch.int32)
        # places of rows that lie one after the other; the kernel reads the table instead
        begins = rows * self.capacity

        def attend(query: Tensor, scores: Scores, window: int | None) -> Tensor:
            keys = self.keys[scores.layer_idx]
            attended: Tensor = kernel(
                query[:, :, 0],
                keys,
                self.values[scores.layer_idx],
                rows,
                begins,
                1,
                num_keys,
                scale=scores.scaling,
                # the one query is the newest token
                window_size=(-1, -1) if window is None else (window - 1, 0),
                enable_gqa=query.shape[1] != keys.shape[2],
                seqused_k=used,
                block_table=self.table[:count],
            )
            return attended[:, None]

        return attend

    def read(self, row: int, length: int) -> HeldBlocks:
        """Hold the blocks of a row's first tokens; the row may go on to write behind them."""
        return HeldBlocks(self.pool, self.blocks[row][: self.num_blocks(length)])

    def copy(self, source: int | RowCopy, rows: Sequence[int], length: int) -> None:
        """Share the full blocks of a row or a kept copy with new rows, and copy a last one that is not."""
        blocks = self._blocks_of(source)
        whole = blocks[: length // self.block_size]
        last: list[int] = []
        if length % self.block_size:
            last = self._take(len(rows))
        for number, row in enumerate(rows):
            assert not self.blocks[row], f"row {row} is in use"
            self.pool.hold(whole, by_row=True)
            self._set(row, [*whole, *last[number : number + 1]])
            self.lengths[row] = length
        if last:
            index = to_device(last, self.device)
            for stored in (*self.keys.values(), *self.values.values()):
                first = stored[blocks[len(whole)]].clone()
                stored.index_copy_(0, index, first.expand(len(last), -1, -1, -1))

    def move(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """Move the blocks of rows `source` to rows `destination`, which have none of their own."""
        moved = [(self.blocks[row], self.lengths[row]) for row in source]
        for row in source:
            self._set(row, [])
            self.lengths[row] = 0
        self.drop([row for row in destination if row not in source])
        for row, (blocks, length) in zip(destination, moved, strict=True):
            self._set(row, blocks)
            self.lengths[row] = length

    def drop(self, rows: Iterable[int]) -> None:
        """Release the blocks of these rows."""
        for row in rows:
            if self.blocks[row]:
                self.pool.release(self.blocks[row], by_row=True)
                self._set(row, [])
                self.lengths[row] = 0

    def wipe(self, rows: Sequence[int]) -> None:
        """Zero the blocks that only these rows hold: entries that a mask hides still have to be finite."""
        held = Counter(block for row in rows for block in self.blocks[row])
        own = [block for block, count in held.items() if self.pool.ref_counts[block] == count]
        index = to_device([0, *own], self.device)
        for stored in (*self.keys.values(), *self.values.values()):
            stored.index_fill_(0, index, 0)

    def _blocks_of(self, source: int | RowCopy | None) -> Sequence[int]:
        if isinstance(source, int):
            return self.blocks[source]
        if source is None:
            return ()
        assert isinstance(source, HeldBlocks), f"blocks cannot be shared with {type(source).__name__}"
        return source.blocks

    def _take(self, count: int) -> list[int]:
        """Take free blocks for a row; if there are too few, grow the memory, then evict kept copies."""
        pool = self.pool
        missing = count - len(pool.free)
        if missing > 0:
            self._allocate(min(self.max_blocks, max(pool.size + missing, 2 * pool.size, LEAST_BLOCKS)))
        while len(pool.free) < count and self.kept is not None and self.kept.evict():
            pass
        assert count <= len(pool.free), f"{count} blocks were asked for, and {len(pool.free)} are free"
        taken = [pool.free.pop() for _ in range(count)]
        pool.hold(taken, by_row=True)
        return taken

    def _allocate(self, num_blocks: int) -> None:
        """Allocate memory for `num_blocks` blocks and copy those in use, one layer at a time."""
        if num_blocks <= self.pool.size:
            return
        for tensors in (self.keys, self.values):
            for layer, old in tensors.items():
                tensors[layer] = old.new_zeros(num_blocks, *old.shape[1:])
                tensors[layer][: len(old)] = old
        self.pool.grow(num_blocks)
        self.room = num_blocks * self.block_size
        self._moved()

    def _widen(self, width: int) -> None:
        """Give the table `width` blocks for each row; its rows have to be uploaded again."""
        self.table = self.table.new_zeros(self.num_slots, width)
        self.capacity = width * self.block_size
        self._stale = {row for row, blocks in enumerate(self.blocks) if blocks}
        self._moved()

    def _upload(self) -> None:
        """Copy the changed rows of the table to the device in one transfer, without waiting for it."""
        if not self._stale:
            return
        width = max(len(self.blocks[row]) for row in self._stale)
        if width > self.table.shape[1]:
            self._widen(max(width, 2 * self.table.shape[1]))
        rows = torch.zeros(len(self._stale), 1 + self.table.shape[1], dtype=torch.int32)
        for own, row in zip(rows.numpy(), sorted(self._stale)):
            own[0] = row
            own[1 : 1 + len(self.blocks[row])] = self.blocks[row]
        rows = to_device(rows, self.device)
        self.table.index_copy_(0, rows[:, 0].long(), rows[:, 1:])
        self._stale.clear()
