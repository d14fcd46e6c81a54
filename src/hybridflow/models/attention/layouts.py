"""The one attention function, for packed training and for cached generation.

Transformers calls `attention` from every layer. The `layout` given to `model(..., layout=...)` decides which
tokens see which, so transformers never builds a mask. `PackedLayout` is for whole rows packed one after the
other (training, scoring, whole prompts); `SpanLayout` is for generation, and has the same `attend`. Sliding
windows, soft-capped scores, attention sinks, grouped key-value heads and value heads of another size are
honoured; an unknown keyword is an error and is never dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from hybridflow.distributed.transfers import all_to_device, to_device
from hybridflow.errors import ModelError
from hybridflow.models.attention.flex_kernel import FlexRows
from hybridflow.models.attention.kernels import (
    Over,
    choose_kernel,
    expand_heads,
    rows_by_varlen,
    window_by_varlen,
)
from hybridflow.models.attention.scores import Scores, causal_mask, masked_attention
from hybridflow.models.attention.shared_tokens import SharedTokens

if TYPE_CHECKING:
    from hybridflow.models.experts.routing import RouteTape

ATTENTION_NAME = "hybridflow"
LONG_ROW = 4096
"""The longest row that shares one call with others: for longer ones a faster kernel is to be worth a call for
each. Estimated, not measured.
"""
MOST_SCORES = 2**26
"""Scores of attention that is written out which are in memory at once: 256 MiB of float32."""

# Keywords of transformers that change nothing here: the layout has positions and causality, and rotary
# embeddings are applied already.
_WITHOUT_EFFECT = frozenset(
    {
        "position_ids",
        "position_embeddings",
        "cache_position",
        "past_key_values",
        "use_cache",
        "output_router_logits",
        "num_items_in_batch",
        "return_dict",
    }
)


class Kernel(Protocol):
    """Attention of a block of queries over keys that replaces the device's fastest kernels (`ExactMode`)."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, how: Scores) -> Tensor: ...


class Layout(Protocol):
    """The rule of which tokens see which: query [1|B, H, Q, D] in, attended values [1|B, Q, H, Dv] out."""

    routes: RouteTape | None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor: ...


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    layout: Layout | None = None,
    **unknown: Any,
) -> tuple[Tensor, None]:
    """Attend under `layout`: query [1|B, H, Q, D], key, value [1|B, KV, Q, D|Dv] -> ([1|B, Q, H, Dv], None).

    Raises ModelError without a layout, and for an argument that matters and is not implemented.
    """
    name = type(module).__name__
    if layout is None:
        raise ModelError(
            f"{name} called the {ATTENTION_NAME!r} attention without a layout, so it cannot tell rows "
            "apart: run the model through PolicyModel or ValueModel, or call "
            "model.set_attn_implementation('sdpa') to use it alone"
        )
    if attention_mask is not None:
        raise ModelError(
            f"{name} built an attention mask of shape {tuple(attention_mask.shape)}; the layout already "
            "says which tokens see which"
        )
    if dropout:
        raise ModelError(
            f"{name} asks for attention dropout {dropout}: log-probs would not be reproducible; set "
            "attention_dropout=0 in override_config"
        )
    if unknown.pop("is_causal", None) is False or getattr(module, "is_causal", True) is False:
        raise ModelError(
            f"{name} wants attention in both directions; only causal language models can be trained here"
        )
    told = [
        f"{key}={type(value).__name__}"
        for key, value in unknown.items()
        if key not in _WITHOUT_EFFECT and value is not None and value is not False
    ]
    if told:
        raise ModelError(
            f"{name} passes arguments to attention that are not implemented here ({', '.join(told)}); "
            "dropping them would change its log-probs, so this model cannot be trained"
        )
    scores = Scores(int(getattr(module, "layer_idx", 0)), scaling, sliding_window, softcap, s_aux)
    return layout.attend(query, key, value, scores), None


def kernel_of(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> str:
    """Return the name of the kernel that a layer has for long rows, with the shapes of `Layout.attend`."""
    return choose_kernel(query, key, value, _hides(scores.sliding_window), scores)


def _hides(window: int | None) -> Over:
    if window is None:
        return "causal"
    return "window"


def attend_allowed(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, how: Scores) -> Tensor:
    """Attend to the allowed keys by the fastest kernel that knows these scores.

    query [n, H, Q, D], key [n, KV, K, D], value [n, KV, K, Dv], allowed [Q, K] or [n, Q, K] bool
    -> [n, H, Q, Dv].
    """
    if not how.plain:
        return _written_out(query, key, value, allowed, how)
    if allowed.dim() == 3:
        allowed = allowed[:, None]
    if choose_kernel(query, key, value, "mask", how) == "expanded":
        key, value = expand_heads(query, key, value)
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(
        query, key, value, attn_mask=allowed, scale=how.scaling, enable_gqa=grouped
    )


def _written_out(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, how: Scores) -> Tensor:
    """Compute plain attention; where scores are many, a part of the queries at a time, twice in training."""
    rows, heads, num_queries, _ = query.shape
    at_once = max(1, MOST_SCORES // (rows * heads * key.shape[2]))
    if at_once >= num_queries:
        return masked_attention(query, key, value, allowed, how)
    done = []
    for queries, part in zip(query.split(at_once, dim=2), allowed.split(at_once, dim=-2), strict=True):
        attended = checkpoint(
            masked_attention, queries, key, value, part, how, use_reentrant=False, preserve_rng_state=False
        )
        done.append(attended)
    return torch.cat(done, dim=2)


class PackedLayout:
    """Causal attention inside each of the rows that lie packed in one sequence [1, N].

    Where a kernel takes rows of any length, they are one call. Elsewhere rows of similar length share a
    bucket, right-padded to its longest; every bucket is one attention call.
    Results of padding are never read: causality hides padded keys from real queries, and padded queries are
    dropped. Index tensors are made once per micro-batch and serve all layers.
    """

    exact: Kernel | None = None
    """Replaces the device's own kernels; set in exact mode."""
    routes: RouteTape | None = None
    """The routes of the tokens, where they are recorded or replayed."""

    def __init__(
        self,
        num_tokens: int,
        buckets: list[tuple[int, int]],
        gather: Tensor | None,
        restore: Tensor | None,
        padding: Tensor | None,
        lengths: Sequence[int] = (),
    ) -> None:
        self.num_tokens = num_tokens
        self.buckets = buckets  # (rows, longest)
        self._gather = gather
        self._restore = restore
        self._padding = padding
        self._lengths = lengths  # of rows that share no tokens
        self._flex: FlexRows | None = None
        self._ends: Tensor | None = None
        self._windows: dict[tuple[int, int], Tensor] = {}
        self._shared: SharedTokens | None = None

    @classmethod
    def build(
        cls,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        places: Tensor | None = None,
    ) -> PackedLayout:
        """Return the layout of rows with these token counts, in the order in which they are packed.

        `places` [sum of lengths] int64, on the CPU, is for rows that share tokens: the index in the sequence
        of each token of each row.
        """
        device = torch.device(device)
        assert len(lengths) > 0 and min(lengths) > 0, (
            f"a packed row needs at least one token, got lengths {list(lengths)}"
        )
        starts = [0, *accumulate(lengths)]
        if len(set(lengths)) == 1 and places is None:  # no padding and no reordering: a plain reshape
            return cls(starts[-1], [(len(lengths), lengths[0])], None, None, None, lengths)
        buckets = make_buckets(lengths)
        parts: list[Tensor] = []
        for bucket in buckets:
            longest = lengths[bucket[-1]]
            first = torch.tensor([starts[row] for row in bucket])[:, None]
            last = torch.tensor([lengths[row] - 1 for row in bucket])[:, None]
            # a padded place repeats the row's last token: finite, and never read
            offsets = torch.arange(longest)[None]
            place = torch.where(offsets <= last, first + offsets, -(first + last) - 1)
            parts.append(place.reshape(-1))
        signed = torch.cat(parts)
        real = signed >= 0
        gather = torch.where(real, signed, -signed - 1)
        shapes = [(len(bucket), lengths[bucket[-1]]) for bucket in buckets]
        if places is not None:
            return cls._sharing(places[gather], real, shapes, device)
        restore = torch.empty(starts[-1], dtype=torch.int64)
        restore[gather[real]] = real.nonzero()[:, 0]
        padding: Tensor | None = None
        if not bool(real.all()):
            padding = to_device((~real).nonzero()[:, 0], device)
        return cls(
            starts[-1], shapes, to_device(gather, device), to_device(restore, device), padding, lengths
        )

    @classmethod
    def _sharing(
        cls, gather: Tensor, real: Tensor, buckets: list[tuple[int, int]], device: torch.device
    ) -> PackedLayout:
        """Return the layout of rows that share tokens: keys of every row, queries of the first only."""
        shared = SharedTokens(gather, real, device)
        unread = torch.ones(len(gather), dtype=torch.bool)
        unread[shared.first_places] = False
        places = {"gather": gather, "restore": shared.first_places, "padding": unread.nonzero()[:, 0]}
        moved = all_to_device(places, device)
        layout = cls(len(shared.first_places), buckets, moved["gather"], moved["restore"], moved["padding"])
        layout._shared = shared
        return layout

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """query [1, H, N, D], key [1, KV, N, D], value [1, KV, N, Dv] -> [1, N, H, Dv]."""
        assert query.shape[0] == 1 and query.shape[2] == self.num_tokens, (
            f"layout of {self.num_tokens} tokens, query {tuple(query.shape)}"
        )
        if self._lengths and self.exact is None:
            longest = self.buckets[-1][1]
            window = scores.window(longest)
            over = _hides(window)
            if over == "causal" and self._gather is not None and longest <= LONG_ROW:
                over = "packed"
            kernel = choose_kernel(query, key, value, over, scores)
            if kernel == "flex":
                self._flex = self._flex or FlexRows(self._lengths, query.device)
                return self._flex.attend(query, key, value, scores).transpose(1, 2)
            if kernel == "varlen":
                if self._ends is None:
                    starts = torch.tensor([0, *accumulate(self._lengths)], dtype=torch.int32)
                    self._ends = to_device(starts, query.device)
                query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
                return rows_by_varlen(query, key, value, self._ends, longest, window, scores.scaling)[None]
        tokens = [x[0].transpose(0, 1) for x in (query, key, value)]  # [N, heads, D]
        if self._gather is not None:
            assert self._restore is not None
            tokens = [self._spread(x, of_keys=number > 0) for number, x in enumerate(tokens)]
        done = []
        offset = 0
        for rows, longest in self.buckets:
            q, k, v = (
                x[offset : offset + rows * longest].unflatten(0, (rows, longest)).transpose(1, 2)
                for x in tokens
            )
            # [rows * longest, H, Dv]
            done.append(self._bucket(q, k, v, scores).transpose(1, 2).flatten(0, 1))
            offset += rows * longest
        out = done[0]
        if len(done) > 1:
            out = torch.cat(done)
        if self._gather is not None:
            out = _Collect.apply(out, self._gather, self._restore, self._padding)  # type: ignore[no-untyped-call]
        return out[None]

    def _spread(self, tokens: Tensor, *, of_keys: bool) -> Tensor:
        if self._shared is not None and of_keys:
            return self._shared.spread(tokens, self._gather)  # type: ignore[arg-type]
        spread: Tensor = _Spread.apply(tokens, self._gather, self._restore)  # type: ignore[no-untyped-call]
        return spread

    def _bucket(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        length = query.shape[2]
        window = scores.window(length)
        if self.exact is not None:
            allowed = self._allowed(length, window, query.device)
            return self.exact.attend(query, key, value, allowed, scores)
        kernel = choose_kernel(query, key, value, _hides(window), scores)
        if kernel == "varlen":
            assert window is not None, "it is chosen for windows"
            return window_by_varlen(query, key, value, window, scores.scaling)
        if window is None and scores.plain:
            if kernel == "expanded":
                key, value = expand_heads(query, key, value)
            grouped = query.shape[1] != key.shape[1]
            return scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scores.scaling, enable_gqa=grouped
            )
        return attend_allowed(query, key, value, self._allowed(length, window, query.device), scores)

    def _allowed(self, length: int, window: int | None, device: torch.device) -> Tensor:
        """Return [length, length] bool: not in the future, and among the `window` newest tokens."""
        known = self._windows.get((length, window or 0))
        if known is None:
            known = causal_mask(length, window, device)
            self._windows[(length, window or 0)] = known
        return known


def make_buckets(lengths: Sequence[int], *, waste: float = 1.15, tiny: int = 256) -> list[list[int]]:
    """Cut rows, sorted by length, into buckets that hold at most `waste` times their real tokens once padded.

    A bucket of up to `tiny` padded tokens is never cut: one more attention call would cost more.
    """
    buckets: list[list[int]] = []
    real = 0
    for row in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        length = lengths[row]
        if buckets:
            padded = (len(buckets[-1]) + 1) * length
            if padded <= waste * (real + length) or padded <= tiny:
                buckets[-1].append(row)
                real += length
                continue
        buckets.append([row])
        real = length
    return buckets


class _Spread(torch.autograd.Function):
    """Gather of tokens [N, ...] into padded buckets [P, ...].

    Padding gets no gradient, so the backward pass is a gather too. An indexed addition, torch's own backward
    of a gather, is about twenty times slower on CPU.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, gather: Tensor, restore: Tensor) -> Tensor:
        ctx.save_for_backward(restore)
        return tokens.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (restore,) = ctx.saved_tensors
        return grads[0].index_select(0, restore), None, None


class _Collect(torch.autograd.Function):
    """Gather of tokens [N, ...] from padded buckets [P, ...]; the inverse of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, gather: Tensor, restore: Tensor, padding: Tensor | None) -> Tensor:
        ctx.save_for_backward(gather, padding)
        return padded.index_select(0, restore)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        gather, padding = ctx.saved_tensors
        out = grads[0].index_select(0, gather)
        if padding is not None:
            out.index_fill_(0, padding, 0)
        return out, None, None, None
