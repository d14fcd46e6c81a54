"""Attention of chunked prefill: a row's new tokens see the cached ones before them, and each other.

    slot    [ cached 0..start-1 | new start..stop-1 | free ]
    query                         ▲ sees everything up to itself

A prompt longer than one pass is prefilled in such pieces, as is what follows a prefix hit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from hybridflow.models.attention import Kernel, Scores, attend_allowed, make_buckets
from hybridflow.models.kv_cache import KVCache, Places

QUERY_BLOCK = 512
"""Number of queries of one attention call, so that masks stay small beside the keys."""


@dataclass(frozen=True)
class _Bucket:
    """Pieces of similar length that share attention calls, padded to the longest."""

    slots: Tensor  # [n]
    # [n, Q] where each query lies among the packed tokens; padding repeats the last token of its piece
    index: Tensor
    places: Tensor  # [n, Q] position of each query in its row
    ends: list[int]  # keys that exist after each block of queries


class ChunkLayout:
    """The layout of pieces of rows that are packed one after the other, [1, N].

    Piece i has lengths[i] tokens, which come after the starts[i] cached ones of slots[i].
    """

    exact: Kernel | None = None
    """Replaces the device's own kernels; set in exact mode."""

    def __init__(
        self,
        cache: KVCache,
        slots: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        places: Places,
    ) -> None:
        """Lay out pieces; the new keys and values go to `places`, which must include these slots."""
        assert min(lengths) > 0 and max(a + b for a, b in zip(starts, lengths)) <= cache.capacity, (
            "pieces have tokens, and room in their slots"
        )
        device = places.slots.device
        self.cache = cache
        self.places = places
        self.num_tokens = sum(lengths)
        offsets = [0, *accumulate(lengths)]
        restore = torch.empty(self.num_tokens, dtype=torch.int64)  # the place of each token among padded ones
        padded = 0
        self._buckets = []
        for rows in make_buckets(lengths):
            longest = lengths[rows[-1]]
            step = torch.minimum(
                torch.arange(longest)[None], torch.tensor([lengths[row] - 1 for row in rows])[:, None]
            )
            start = torch.tensor([starts[row] for row in rows])
            ends = [
                max(starts[row] + min(lengths[row], block + QUERY_BLOCK) for row in rows)
                for block in range(0, longest, QUERY_BLOCK)
            ]
            self._buckets.append(
                _Bucket(
                    torch.tensor([slots[row] for row in rows]).to(device),
                    (torch.tensor([offsets[row] for row in rows])[:, None] + step).to(device),
                    (start[:, None] + step).to(device),
                    ends,
                )
            )
            for row in rows:
                restore[offsets[row] : offsets[row + 1]] = torch.arange(padded, padded + lengths[row])
                padded += longest
        self._restore = restore.to(device)
        self._allowed: dict[tuple[int, int, int | None], Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Attend and store: query [1, H, N, D], key [1, KV, N, D], value [1, KV, N, Dv] -> [1, N, H, Dv]."""
        assert query.shape[0] == 1 and query.shape[2] == self.num_tokens, (
            f"layout of {self.num_tokens} tokens, query {tuple(query.shape)}"
        )
        self.cache.write(scores.layer_idx, key[0].transpose(0, 1), value[0].transpose(0, 1), self.places)
        tokens = query[0].transpose(0, 1)
        done = [self._bucket(number, tokens, scores).flatten(0, 1) for number in range(len(self._buckets))]
        return torch.cat(done).index_select(0, self._restore)[None]

    def _bucket(self, number: int, tokens: Tensor, scores: Scores) -> Tensor:
        """Attend for the queries [N, H, D] of one bucket -> [n, Q, H, Dv]."""
        bucket = self._buckets[number]
        longest = max(bucket.ends)
        keys, values = self.cache.tokens_of(scores.layer_idx, bucket.slots, longest)
        queries = tokens[bucket.index].transpose(1, 2)
        parts = []
        for block, end in enumerate(bucket.ends):
            first = block * QUERY_BLOCK
            window = scores.window(end)
            allowed = self._mask(number, block, window)
            attend: Callable[..., Tensor] = attend_allowed
            if self.exact is not None:
                attend = self.exact.attend
            parts.append(
                attend(
                    queries[:, :, first : first + QUERY_BLOCK],
                    keys[:, :, :end],
                    values[:, :, :end],
                    allowed,
                    scores,
                )
            )
        return torch.cat(parts, dim=2).transpose(1, 2)

    def _mask(self, number: int, block: int, window: int | None) -> Tensor:
        """Return [n, Q of the block, K] bool: keys up to the query, and the newest `window` of them."""
        known = self._allowed.get((number, block, window))
        if known is None:
            bucket = self._buckets[number]
            queries = bucket.places[:, block * QUERY_BLOCK : (block + 1) * QUERY_BLOCK, None]
            places = torch.arange(bucket.ends[block], device=queries.device)
            known = places <= queries
            if window is not None:
                known &= places > queries - window
            self._allowed[(number, block, window)] = known
        return known
