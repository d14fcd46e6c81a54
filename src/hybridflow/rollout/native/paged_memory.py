"""Memory of the paged KV cache: as many rows fit as there are blocks for their tokens.

No row holds the memory of the longest one, rows and kept prefixes that begin alike share those blocks, and
kept prefixes are evicted where rows need their blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hybridflow.models.kv_cache import LayerShape
from hybridflow.models.paged_cache import HeldBlocks, PagedCache, PagedKernel
from hybridflow.rollout.native.memory import KVMemory, Running

if TYPE_CHECKING:
    from hybridflow.protocol.prompt import Units
    from hybridflow.rollout.native.prefixes import Prefix, PrefixStore
    from hybridflow.rollout.native.scheduler import Admission


class PagedMemory(KVMemory):
    """Memory as blocks, for at most `max_rows` rows and a prompt in chunked prefill, in the last slot."""

    cache: PagedCache

    def __init__(
        self,
        shapes: dict[int, LayerShape],
        budget: int,
        device: torch.device,
        *,
        max_rows: int,
        block_size: int,
        kernel: PagedKernel | None = None,
    ) -> None:
        super().__init__(shapes, budget, device)
        max_blocks = max(1, self.max_tokens // block_size)
        self.max_tokens = (max_blocks - 1) * block_size
        self.cache = PagedCache(shapes, max_rows + 1, max_blocks, block_size, device)
        self.cache.kernel = kernel

    @property
    def max_kept(self) -> int:
        """All tokens: kept prefixes are evicted where rows need their blocks."""
        return self.max_tokens

    def capacity_for(self, length: int) -> int:
        """Return the tokens of the blocks of one row."""
        return self.cache.num_blocks(length) * self.cache.block_size

    def rows_of(self, length: int) -> int:
        """Return the number of all slots: a slot itself takes no memory."""
        return self.cache.num_slots

    def begin(self, prefixes: PrefixStore) -> None:
        """Evict these prefixes where no other blocks are free."""
        self.cache.evict = prefixes.drop_one

    def free_rows(
        self, now: Running, taken: int, batch: Sequence[Admission], context: Units, prefix: Prefix | None
    ) -> int:
        """Return how many rows may enter beside the running ones, the batch and the prefixes it uses."""
        cache = self.cache
        in_use = [_blocks_of(one.prefix) for one in batch] + [_blocks_of(prefix)]
        free = cache.num_obtainable(block for blocks in in_use for block in blocks)
        for one in batch:
            first, more = self._needs(now, len(one.prompt), one.prefix, one.continues)
            if one.entering:
                free -= first + more * (len(one.entering) - 1)
            else:
                free -= cache.num_blocks(one.stop) - one.start // cache.block_size
        first, more = self._needs(now, len(context), prefix, now.in_pieces > 0 and not batch)
        if free < first:
            return 0
        return 1 + (free - first) // more

    def _needs(self, now: Running, length: int, prefix: Prefix | None, continues: bool) -> tuple[int, int]:
        """Return the blocks for the first row of a context, and for each further one."""
        cache = self.cache
        total = cache.num_blocks(now.ahead(length + 1))
        have = 0 if prefix is None else prefix.length // cache.block_size
        if continues:
            have = len(cache.blocks[-1])
        return total - have, total - length // cache.block_size

    def has_next(self, now: Running) -> bool:
        """Whether there are blocks for the rows whose own ones are full."""
        cache = self.cache
        full = sum(cache.lengths[row] == len(cache.blocks[row]) * cache.block_size for row in range(now.rows))
        free = len(cache.pool.free) + cache.max_blocks - cache.pool.size
        return full <= free or full <= cache.num_obtainable()

    def fit(
        self, now: Running, rows: int, length: int, *, live: int, in_pieces: bool, prefixes: PrefixStore
    ) -> None:
        """Do nothing: slots are always there, and blocks are taken as tokens come."""


def _blocks_of(prefix: Prefix | None) -> Sequence[int]:
    """Return the blocks that must stay as long as a kept prefix is used."""
    if prefix is None or prefix.kept is None:
        return ()
    assert isinstance(prefix.kept.copy, HeldBlocks)
    return prefix.kept.copy.blocks
