"""Attention of a generation pass, which is a list of spans of rows whose earlier tokens are in the cache.

    row 0   [ cached 0..start-1 | span | free ]     a whole prompt (start 0), a chunk of one, or one new token
    row 1   [ cached ............ | span | free ]   query i of a span sees everything up to itself

Whole prompts need nothing of the cache, and are attended over as in training. Decoding is one token of each
of the first rows; verifying, one and those that were drafted behind it. On CPU the query heads that share a
key-value head are folded into the query axis, and the attention is written out over whole slots: with one
query per row that is 1.5 times as fast as the fused kernel with grouped heads, and products over whole slots
are 2 to 4 times as fast as over parts of them. On CUDA a kernel reads the blocks in place. All else are
chunks, in buckets of similar length.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hybridflow.distributed.transfers import to_device
from hybridflow.models.attention.layouts import Kernel, PackedLayout, attend_allowed, make_buckets
from hybridflow.models.attention.scores import Scores, masked_attention
from hybridflow.models.cache.kv_cache import CacheSlots, InPlace, KVCache

if TYPE_CHECKING:
    from hybridflow.models.experts.routing import RouteTape

QUERY_BLOCK = 512
"""Number of queries of one attention call, so that masks stay small beside the keys."""


@dataclass(frozen=True)
class _Bucket:
    """Chunks of similar length that share attention calls, padded to the longest."""

    rows: Tensor | None  # [n]; None: the first n rows, whose keys are read where they lie
    # [n, Q] where each query lies among the packed tokens; padding repeats the last token of its chunk
    index: Tensor
    places: Tensor  # [n, Q] position of each query in its row
    ends: list[int]  # keys that exist after each block of queries


class SpanLayout:
    """The layout of spans: packed one after the other, [1, N], or one token of each row, [B, 1].

    Tokens that are verified are several of each row, [N, 1].
    """

    exact: Kernel | None = None
    """Replaces the device's own kernels; set in exact mode."""
    routes: RouteTape | None = None
    """The routes of the tokens, where they are recorded or replayed."""

    def __init__(self, cache: KVCache, places: CacheSlots) -> None:
        """Store what is computed at `places`; use `packed` and `decoding` to make one."""
        self.cache = cache
        self.places = places
        self.num_keys = 0
        self._whole: PackedLayout | None = None
        self._in_place: InPlace | None = None
        self._buckets: list[_Bucket] = []
        self._restore = places.rows
        self._known: dict[Hashable, Tensor] = {}  # masks, which serve all layers

    @classmethod
    def packed(
        cls, cache: KVCache, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int]
    ) -> SpanLayout:
        """Return the layout of packed spans: counts[i] tokens of rows[i], behind its first starts[i] ones."""
        assert min(counts) > 0 and max(a + b for a, b in zip(starts, counts)) <= cache.capacity, (
            "spans have tokens, and room in the cache"
        )
        layout = cls(cache, CacheSlots.of_spans(rows, starts, counts, cache.device))
        if any(starts):
            layout._add_buckets(rows, starts, counts)
        else:
            layout._whole = PackedLayout.build(counts, cache.device)
        return layout

    @classmethod
    def decoding(
        cls, cache: KVCache, lengths: Tensor, longest: int, num_keys: int | None = None
    ) -> SpanLayout:
        """Return the layout of one new token for each of the first rows, with `lengths` [B] tokens so far.

        `longest` is their maximum, given so that nothing waits for the device. `num_keys` is the number of
        places of each row that are attended over, more than `longest`; by default it is all of a slot on CPU,
        and elsewhere those up to the newest token.
        """
        assert longest < cache.capacity, f"position {longest} is outside of a row of {cache.capacity} tokens"
        layout = cls(cache, CacheSlots(torch.arange(len(lengths), device=lengths.device), lengths))
        layout.num_keys = num_keys or cache.keys_read(longest + 1)
        layout._in_place = cache.in_place(lengths, layout.num_keys)
        return layout

    @classmethod
    def verifying(
        cls, cache: KVCache, starts: Sequence[int], counts: Sequence[int], places: CacheSlots
    ) -> SpanLayout:
        """Return the layout of counts[i] new tokens of row i, for each of the first rows, behind starts[i].

        `places` are those of all N tokens, row after row. What is computed has shape [N, 1].
        """
        layout = cls(cache, places)
        count = torch.tensor(counts)[:, None]
        step = torch.minimum(torch.arange(max(counts))[None], count - 1)
        first = count.cumsum(0) - count
        end = cache.keys_read(max(start + own for start, own in zip(starts, counts)))
        padded = torch.stack([first + step, torch.tensor(starts)[:, None] + step])
        index, positions = to_device(padded, cache.device)
        layout._buckets.append(_Bucket(None, index, positions, [end]))
        real = torch.arange(max(counts)) < count
        layout._restore = to_device(real.flatten().nonzero()[:, 0], cache.device)
        return layout

    def _add_buckets(self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> None:
        device = self.cache.device
        offsets = [0, *accumulate(counts)]
        restore = torch.empty(offsets[-1], dtype=torch.int64)  # place of each token among padded ones
        padded = 0
        for bucket in make_buckets(counts):
            longest = counts[bucket[-1]]
            last = torch.tensor([counts[span] - 1 for span in bucket])[:, None]
            step = torch.minimum(torch.arange(longest)[None], last)
            start = torch.tensor([starts[span] for span in bucket])[:, None]
            offset = torch.tensor([offsets[span] for span in bucket])[:, None]
            ends = [
                max(starts[span] + min(counts[span], block + QUERY_BLOCK) for span in bucket)
                for block in range(0, longest, QUERY_BLOCK)
            ]
            own = to_device([rows[span] for span in bucket], device)
            index = to_device(offset + step, device)
            self._buckets.append(_Bucket(own, index, to_device(start + step, device), ends))
            for span in bucket:
                restore[offsets[span] : offsets[span + 1]] = torch.arange(padded, padded + counts[span])
                padded += longest
        self._restore = to_device(restore, device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Attend and store: query [1, H, N, D] or [B, H, 1, D], key and value alike -> [1, N, H, Dv] or
        [B, 1, H, Dv].
        """
        batch, _, count, _ = query.shape
        assert batch * count == len(self.places.rows), (
            f"layout of {len(self.places.rows)} tokens, query {tuple(query.shape)}"
        )
        decodes = self._whole is None and not self._buckets
        apart = decodes or (self._buckets and self._buckets[0].rows is None)
        new_key, new_value = (x[:, :, 0] if apart else x[0].transpose(0, 1) for x in (key, value))
        self.cache.write(scores.layer_idx, new_key, new_value, self.places)
        if self._whole is not None:
            self._whole.exact = self.exact
            return self._whole.attend(query, key, value, scores)
        if decodes:
            return self._decode(query, scores)
        tokens = query[:, :, 0] if apart else query[0].transpose(0, 1)
        done = [self._chunks(number, tokens, scores) for number in range(len(self._buckets))]
        attended = torch.cat(done).index_select(0, self._restore)
        return attended[:, None] if apart else attended[None]

    def _chunks(self, number: int, tokens: Tensor, scores: Scores) -> Tensor:
        """Attend for the queries [N, H, D] of one bucket -> [n * Q, H, Dv]."""
        bucket = self._buckets[number]
        if bucket.rows is None:
            keys, values = self.cache.first_rows(scores.layer_idx, len(bucket.index), max(bucket.ends))
        else:
            keys, values = self.cache.tokens_of(scores.layer_idx, bucket.rows, max(bucket.ends))
        queries = tokens[bucket.index].transpose(1, 2)
        attend: Callable[..., Tensor] = attend_allowed
        if self.exact is not None:
            attend = self.exact.attend
        parts = []
        for block, end in enumerate(bucket.ends):
            part = slice(block * QUERY_BLOCK, (block + 1) * QUERY_BLOCK)
            allowed = self._mask((number, block), bucket.places[:, part], end, scores.window(end))
            parts.append(attend(queries[:, :, part], keys[:, :, :end], values[:, :, :end], allowed, scores))
        return torch.cat(parts, dim=2).transpose(1, 2).flatten(0, 1)

    def _decode(self, query: Tensor, scores: Scores) -> Tensor:
        """Attend for one query of each row: [B, H, 1, D] -> [B, 1, H, Dv]."""
        batch, heads, _, dim = query.shape
        window = scores.window(self.num_keys)
        if self._in_place is not None and self.exact is None and scores.plain:
            return self._in_place(query, scores, window)
        keys, values = self.cache.first_rows(scores.layer_idx, batch, self.num_keys)
        if self.exact is not None or not scores.plain:
            allowed = self.new_mask(window)
            attend: Callable[..., Tensor] = masked_attention
            if self.exact is not None:
                attend = self.exact.attend
            return attend(query, keys, values, allowed, scores).transpose(1, 2)
        kv_heads = keys.shape[1]
        folded = query.reshape(batch, kv_heads, heads // kv_heads, dim)
        bias = self._bias(window, kv_heads, query.dtype)
        if query.device.type != "cpu":
            attended = scaled_dot_product_attention(
                folded, keys, values, attn_mask=bias, scale=scores.scaling
            )
        else:
            scale = dim**-0.5 if scores.scaling is None else scores.scaling
            raw = torch.baddbmm(bias, folded.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), alpha=scale)
            weights = raw.softmax(-1, dtype=torch.promote_types(raw.dtype, torch.float32))
            attended = torch.bmm(weights.to(values.dtype), values.flatten(0, 1))
        return attended.reshape(batch, 1, heads, values.shape[-1])

    def _mask(self, name: Hashable, positions: Tensor, num_keys: int, window: int | None) -> Tensor:
        """Return [n, Q, K] bool for queries at positions [n, Q]: the newest `window` keys up to each."""
        known = self._known.get((name, window))
        if known is None:
            places = torch.arange(num_keys, device=positions.device)
            known = places <= positions[..., None]
            if window is not None:
                known &= places > positions[..., None] - window
            self._known[(name, window)] = known
        return known

    def new_mask(self, window: int | None) -> Tensor:
        """Return the mask of decoding, [B, 1, K] bool."""
        return self._mask("new", self.places.positions[:, None], self.num_keys, window)

    def _bias(self, window: int | None, kv_heads: int, dtype: torch.dtype) -> Tensor:
        """Return the mask of decoding as numbers, 0 and -inf; of a bool one, every layer would make this.

        [B * KV, 1, K] on CPU, elsewhere [B, 1, 1, K].
        """
        known = self._known.get(("bias", window, kv_heads))
        if known is None:
            allowed = self.new_mask(window)
            known = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
            known.masked_fill_(~allowed, float("-inf"))
            if known.device.type == "cpu":
                known = known.repeat_interleave(kv_heads, dim=0)
            else:
                known = known[:, None]
            self._known[("bias", window, kv_heads)] = known
        return known
