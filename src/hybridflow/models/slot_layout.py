"""Attention of decoding: one new token per row attends over the keys and values of its slot.

On CPU the query heads that share a key-value head are folded into the query axis and the attention is written
out (two matrix products around a masked softmax) over whole slots: with one query per row that is 1.5 times
as fast as the fused kernel with grouped heads, and products over whole slots are 2 to 4 times as fast as over
parts of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hybridflow.models.attention import Kernel, Scores, masked_attention
from hybridflow.models.kv_cache import KVCache, Places


class SlotLayout:
    """The layout of decoding: row i of the batch is in slot i.

    Its new token is at position lengths[i] and sees all tokens up to itself.
    """

    exact: Kernel | None = None
    """Replaces the device's own kernels; set in exact mode."""

    def __init__(self, cache: KVCache, lengths: Tensor, longest: int, num_keys: int | None = None) -> None:
        """Lay out rows with `lengths` [B] int64 tokens in their slots so far.

        `longest` is their maximum, given so that nothing waits for the device. `num_keys` is the number of
        places of each slot that are attended over, more than `longest`; by default it is all of them on CPU,
        and elsewhere those up to the newest token.
        """
        assert longest < cache.capacity, f"position {longest} is outside of slots of {cache.capacity} tokens"
        self.cache = cache
        self.lengths = lengths
        self.num_rows = lengths.shape[0]
        self.num_keys = longest + 1
        if num_keys is not None:
            self.num_keys = num_keys
        elif lengths.device.type == "cpu":
            self.num_keys = cache.capacity
        self.places = Places(torch.arange(self.num_rows, device=lengths.device), lengths)
        self._allowed: dict[int | None, Tensor] = {}
        self._bias: dict[int | None, Tensor] = {}
        self._of_heads: dict[tuple[int | None, int], Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Attend and store: query [B, H, 1, D], key [B, KV, 1, D], value [B, KV, 1, Dv] -> [B, 1, H, Dv]."""
        batch, heads, num_queries, dim = query.shape
        assert batch == self.num_rows and num_queries == 1, (
            f"slot layout of {self.num_rows} rows, query {tuple(query.shape)}"
        )
        self.cache.write(scores.layer_idx, key[:, :, 0], value[:, :, 0], self.places)
        keys, values = self._stored(scores.layer_idx)
        window = scores.window(self.num_keys)
        if self.exact is not None:
            return self.exact.attend(query, keys, values, self._mask(window)[:, None], scores).transpose(1, 2)
        if self.num_keys < self.cache.capacity:
            keys = keys[:, :, : self.num_keys]
            values = values[:, :, : self.num_keys]
        if not scores.plain:
            return masked_attention(query, keys, values, self._mask(window)[:, None], scores).transpose(1, 2)
        folded = query.reshape(batch, keys.shape[1], heads // keys.shape[1], dim)
        if query.device.type != "cpu":
            mask = self._additive(window, query.dtype)  # of a bool one, every layer would make this
            attended = scaled_dot_product_attention(
                folded, keys, values, attn_mask=mask, scale=scores.scaling
            )
        else:
            scale = scores.scaling
            if scale is None:
                scale = dim**-0.5
            bias = self._bias_of_heads(window, keys.shape[1], query.dtype)
            raw = torch.baddbmm(bias, folded.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), alpha=scale)
            weights = raw.softmax(-1, dtype=torch.promote_types(raw.dtype, torch.float32))
            attended = torch.bmm(weights.to(values.dtype), values.flatten(0, 1))
        return attended.reshape(batch, 1, heads, values.shape[-1])

    def _stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys [B, KV, K, D] and values [B, KV, K, Dv] of the rows, at least `num_keys` of each."""
        return self.cache.keys[layer][: self.num_rows], self.cache.values[layer][: self.num_rows]

    def _mask(self, window: int | None) -> Tensor:
        """Return [B, K] bool: positions up to the new token, and in the newest `window` of them."""
        known = self._allowed.get(window)
        if known is None:
            places = torch.arange(self.num_keys, device=self.lengths.device)
            known = places <= self.lengths[:, None]
            if window is not None:
                known &= places > self.lengths[:, None] - window
            self._allowed[window] = known
        return known

    def _additive(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the mask as [B, 1, 1, K] of 0 and -inf."""
        known = self._bias.get(window)
        if known is None:
            allowed = self._mask(window)
            known = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(
                ~allowed, float("-inf")
            )[:, None, None]
            self._bias[window] = known
        return known

    def _bias_of_heads(self, window: int | None, kv_heads: int, dtype: torch.dtype) -> Tensor:
        """Return the mask for each key-value head, [B * KV, 1, K]; it is made once and serves all layers."""
        known = self._of_heads.get((window, kv_heads))
        if known is None:
            known = self._additive(window, dtype)[:, 0].repeat_interleave(kv_heads, dim=0)
            self._of_heads[(window, kv_heads)] = known
        return known
