"""How a layer scores the keys that a query sees, and plain attention by these scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Scores:
    """The way in which a layer scores the keys that a query sees; the defaults are plain attention."""

    layer_idx: int = 0
    scaling: float | None = None
    """Factor of the scores; None means 1/√D."""
    sliding_window: int | None = None
    """Number of newest tokens that a query sees, its own included; None means all."""
    softcap: float | None = None
    """Constant c by which a score x becomes c·tanh(x/c) (Gemma 2)."""
    sinks: Tensor | None = None
    """One more score for each head [H], which takes weight and gives no value (gpt-oss)."""

    @property
    def plain(self) -> bool:
        """Whether the device's own kernels know these scores, which have neither a cap nor sinks."""
        return self.softcap is None and self.sinks is None

    def window(self, length: int) -> int | None:
        """Return the sliding window where it hides some of `length` tokens, else None."""
        if self.sliding_window is not None and self.sliding_window < length:
            return self.sliding_window
        return None


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """Return [length, length] bool: not in the future, and among the `window` newest tokens."""
    places = torch.arange(length, device=device)
    behind = places[:, None] - places[None]
    allowed = behind >= 0
    if window is not None:
        allowed &= behind < window
    return allowed


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, how: Scores
) -> Tensor:
    """Compute plain attention, with the softmax in float32 or better.

    query [B, H, Q, D], key [B, KV, K, D], value [B, KV, K, Dv] -> [B, H, Q, Dv]. `allowed` is bool and
    broadcasts to [B, 1, 1, Q, K] from the right, or to [B, Q, K] when it has three axes; it already contains
    the sliding window.
    """
    batch, heads, num_queries, dim = query.shape
    kv_heads = key.shape[1]
    scaling = dim**-0.5 if how.scaling is None else how.scaling
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, num_queries, dim)
    scores = (grouped @ key[:, :, None].transpose(-2, -1)) * scaling
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if allowed is not None:
        if allowed.dim() == 3:
            allowed = allowed[:, None, None]
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    if how.sinks is not None:
        extra = how.sinks.to(scores.dtype).view(1, kv_heads, -1, 1, 1).expand(batch, -1, -1, num_queries, 1)
        weights = torch.cat([scores, extra], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights.to(value.dtype) @ value[:, :, None]).reshape(batch, heads, num_queries, value.shape[-1])
