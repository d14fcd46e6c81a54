"""Exact mode: log-probs of generation and of training equal to the bit, on CPU in float32.

    training    packed rows ──► run_backbone ──pad rows──► layers, one attention ──even chunks──► log-probs
    generation  new tokens  ──► run_backbone ──pad rows──► layers, one attention ──even chunks──► logits

A matrix product gives each row the same bits whatever other rows are computed with it, as long as no other
kernel is chosen for the shape. Therefore both sides use one attention that is written out (the fused kernels
are not the same for one query and for many), with the query heads of a key-value head folded into the rows,
never fewer rows than the kernels need, and sums over few enough keys that no library cuts them; where
several threads cut the sums of wide dense layers, these are added up in parts too. How much of that it takes
differs from machine to machine: `ExactMode` has the amount, and the self-check of the rollout engine tests
whether it holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from hybridflow.models.attention.layouts import Layout
from hybridflow.models.attention.scores import Scores
from hybridflow.models.nf4 import NF4Linear

MIN_ROWS = 16
"""Least number of rows of a dense layer; below it, matrix libraries choose other kernels."""
SUM_STEP = 768
"""Numbers that a dense layer sums in one product where longer sums are cut at places that depend on the
number of rows: with AVX-512 and two threads products of fewer than 257 rows, over 896 numbers and more.
"""
MIN_QUERIES = 8
"""Rows of the products inside attention that suffice everywhere; many machines need half of them."""
KEY_BLOCK = 128
"""Keys whose values are added up in one product; libraries cut longer sums at places that they choose."""
VALUE_STEP = 16
"""Multiple to which the length of values is padded: where rows of a result begin at odd places in memory, as
with values of 10 numbers, a row's bits depend on which row it is (AMD, AVX2).
"""
THRIFTY_KEYS = 32
TRIED_ROWS = (1, 32, 64, 128, 192, 320)
"""Numbers of rows that `uneven_layer` tries, before padding; libraries cut sums in other ways below 300."""
VECTOR = 32
"""Count of numbers that the widest vectorised loop takes at a time: two vectors of 512 bits in float32."""


@dataclass(frozen=True)
class ExactMode:
    """The padding of shapes with which a row's bits do not depend on its neighbours."""

    key_step: int
    """Multiple (of 32) to which keys are padded; as long as the longest row: all rows have one length."""
    row_step: int = 1
    """Rows of every dense layer are padded to a multiple of this, and to `min_rows` in any case."""
    min_queries: int = MIN_QUERIES
    """Rows of the products inside attention where `row_step` is 1; else multiples of MIN_QUERIES."""
    sum_step: int = 0
    """Most numbers that a dense layer sums in one product; 0: all at once."""

    @classmethod
    def choices(cls, module: nn.Module, longest: int) -> list[ExactMode]:
        """Return the modes to try for rows of up to `longest` tokens, from the cheapest to the safest."""
        common = -(-longest // 32) * 32
        step = even_rows(module)
        modes = [cls(THRIFTY_KEYS, step), cls(common, step), cls(common, math.lcm(step, 32))]
        if step == 1:
            modes.insert(0, cls(THRIFTY_KEYS, 1, MIN_QUERIES // 2))
        kinds = (nn.Linear, SplitLinear, NF4Linear)
        layers = [layer for layer in module.modules() if type(layer) in kinds]
        wide = [layer.in_features for layer in layers if isinstance(layer, nn.Linear)]
        wide += [max(weight.shape[1:]) for weight in module.parameters() if weight.dim() == 3]  # experts
        if max(wide, default=0) > SUM_STEP:
            modes += [replace(mode, sum_step=SUM_STEP) for mode in modes]
        return list(dict.fromkeys(modes))

    def joined(self, other: ExactMode) -> ExactMode:
        """Return the mode that satisfies both; both must be for rows of one longest length."""
        return ExactMode(
            max(self.key_step, other.key_step),
            math.lcm(self.row_step, other.row_step),
            max(self.min_queries, other.min_queries),
            max(self.sum_step, other.sum_step),
        )

    def num_rows(self, real: int) -> int:
        """Return the number of rows that a dense layer gets for `real` rows."""
        return max(MIN_ROWS, -(-real // self.row_step) * self.row_step)

    def num_keys(self, real: int) -> int:
        """Return the number of keys that attention gets for `real` keys; slots have this capacity."""
        return -(-real // self.key_step) * self.key_step

    @property
    def chunk_step(self) -> int:
        """Number of rows of which the log-prob head takes a multiple at a time, so that no chunk has few."""
        return max(MIN_ROWS, self.row_step)

    def product(self, states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return states [..., K] · weightᵀ [K, N] + bias, in parts of about equal length where K is large."""
        width = weight.shape[1]
        if not self.sum_step or width <= self.sum_step:
            return linear(states, weight, bias)
        step = -(-width // -(-width // self.sum_step) // VECTOR) * VECTOR
        out = linear(states[..., :step], weight[:, :step], bias)
        for start in range(step, width, step):
            part = slice(start, start + step)
            out = out.add_(linear(states[..., part], weight[:, part]))
        return out

    def split_sums(self, module: nn.Module) -> None:
        """Let the dense layers in `module` that sum more than `sum_step` numbers compute by `product`."""
        for layer in module.modules():
            if self.sum_step and type(layer) is nn.Linear and layer.in_features > self.sum_step:
                layer.__class__ = SplitLinear
                layer.exact_mode = self  # type: ignore[assignment]
            elif isinstance(layer, NF4Linear):
                layer.product = self.product

    def pad_tokens(
        self, input_ids: Tensor, position_ids: Tensor, layout: Layout
    ) -> tuple[Tensor, Tensor, Layout]:
        """Return a backbone's arguments with enough rows, [1, N'] or [B', C], and a layout in this mode."""
        assert hasattr(layout, "exact"), f"{type(layout).__name__} knows no exact mode"
        layout.exact = self
        batch, length = input_ids.shape
        missing = self.num_rows(batch * length) - batch * length
        if not missing:
            return input_ids, position_ids, layout
        more: tuple[int, ...] = (0, 0, 0, -(-missing // length))  # one new token of each row stays so
        if batch == 1 and length > 1:
            more = (0, missing)
        return pad(input_ids, more), pad(position_ids, more), RealRows(layout, batch, length)

    def pad_rows(self, rows: Tensor) -> Tensor:
        """Append zeros to rows [M, ...] -> [M', ...], as many as the log-prob head takes at a time."""
        missing = -rows.shape[0] % self.chunk_step
        if not missing:
            return rows
        return pad(rows, (*(0, 0) * (rows.dim() - 1), 0, missing))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, how: Scores) -> Tensor:
        """Attend in this mode: query [B, H, Q, D], key [B, KV, K, D], value [B, KV, K, Dv] -> [B, H, Q, Dv].

        `allowed` [Q, K'] or [B, Q, K'] bool, K' ≤ K, marks the keys that count and contains the sliding
        window; keys behind the first K' are padding and have to be finite. Zeros are added where K is less
        than this mode pads to.
        """
        batch, heads, queries, dim = query.shape
        kv_heads = key.shape[1]
        keys = self.num_keys(allowed.shape[-1])
        key, value = (_to_length(x, keys) for x in (key, value))
        scaling = how.scaling
        if scaling is None:
            scaling = dim**-0.5
        rows = query.reshape(batch, kv_heads, heads // kv_heads * queries, dim) * scaling
        missing = -rows.shape[2] % MIN_QUERIES
        if self.row_step == 1:
            missing = max(0, self.min_queries - rows.shape[2])
        if missing:
            rows = pad(rows, (0, 0, 0, missing))
        raw = rows @ key.transpose(-2, -1)
        weights = self._weights(
            raw[:, :, : raw.shape[2] - missing].unflatten(2, (-1, queries)), allowed, keys, how
        ).flatten(2, 3)
        if missing:
            weights = pad(weights, (0, 0, 0, missing))
        width = value.shape[-1]
        if width % VALUE_STEP:
            value = pad(value, (0, -width % VALUE_STEP))
        out = _weighted_sum(weights, value)[..., :width]
        return out[:, :, : out.shape[2] - missing].reshape(batch, heads, queries, width)

    def _weights(self, raw: Tensor, allowed: Tensor, keys: int, how: Scores) -> Tensor:
        """Return the softmax of raw scores [B, KV, H/KV, Q, K] over the allowed keys."""
        if how.softcap is not None:
            raw = torch.tanh(raw / how.softcap) * how.softcap
        if allowed.dim() == 3:
            allowed = allowed[:, None, None]
        hidden = torch.full((*allowed.shape[:-1], keys), float("-inf"), dtype=raw.dtype, device=raw.device)
        hidden[..., : allowed.shape[-1]].masked_fill_(allowed, 0.0)
        if how.sinks is None:
            if raw.requires_grad:
                return (raw + hidden).softmax(-1)
            return raw.add_(hidden).softmax(-1)
        sinks = how.sinks.to(raw.dtype).view(1, raw.shape[1], -1, 1, 1).expand(*raw.shape[:-1], 1)
        # the sink stands first, at the same place for every number of keys
        return torch.cat([sinks, raw + hidden], dim=-1).softmax(-1)[..., 1:]


class SplitLinear(nn.Linear):
    """A dense layer whose sums exact mode adds up in parts."""

    exact_mode: ExactMode

    def forward(self, input: Tensor) -> Tensor:
        """Project states [..., K] to [..., N]."""
        return self.exact_mode.product(input, self.weight, self.bias)


def join_sums(module: nn.Module) -> None:
    """Let all dense layers in `module` sum at once again."""
    for layer in module.modules():
        if type(layer) is SplitLinear:
            layer.__class__ = nn.Linear  # type: ignore[assignment]
            del layer.exact_mode
        elif isinstance(layer, NF4Linear):
            layer.product = linear


def even_rows(module: nn.Module, num_threads: int | None = None) -> int:
    """Return the step of rows with which activations (SiLU, GELU) get whole vectors in every thread.

    Numbers behind the last whole vector of a thread's part go through another formula, which differs by a
    rounding. Parts are even for up to 4 threads; with more, the self-check tests whether the mode holds.
    """
    threads = num_threads or torch.get_num_threads()
    wanted = VECTOR * math.lcm(*range(1, min(threads, 4) + 1))
    width = math.gcd(*(layer.out_features for layer in module.modules() if isinstance(layer, nn.Linear)))
    return wanted // math.gcd(wanted, width)


@torch.no_grad()
def uneven_layer(module: nn.Module, mode: ExactMode) -> str | None:
    """Return a text on a dense layer of `module` that gives a row other bits in the company of more rows, or
    None.

    One layer of each shape is tried, in milliseconds, with the numbers of rows that `mode` pads to. A layer
    that differs refuses the mode; where none does, the self-check still has to prove it.
    """
    dense = (layer for layer in module.modules() if isinstance(layer, nn.Linear))
    layers = {(layer.out_features, layer.in_features): layer for layer in dense}
    fewer = sorted({mode.num_rows(rows) for rows in TRIED_ROWS})
    most = fewer.pop()
    for (num_outputs, num_inputs), layer in layers.items():
        states = torch.sin(torch.arange(most * num_inputs, dtype=torch.float32)).view(1, most, num_inputs)
        weight = layer.weight
        together = mode.product(states, weight, layer.bias)
        for rows in fewer:
            found = mode.product(states[:, :rows], weight, layer.bias)
            if not torch.equal(found, together[:, :rows]):
                return (
                    f"a dense layer {num_inputs} -> {num_outputs} gives other bits to {rows} and {most} rows"
                )
    return None


class RealRows:
    """A layout that attends for the real rows only; rows that pad the dense layers come out as zeros."""

    def __init__(self, layout: Layout, batch: int, length: int) -> None:
        self.layout = layout
        self.routes = layout.routes
        self.batch = batch
        self.length = length

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Attend for query [B', H, Q', D] -> [B', Q', H, Dv]."""
        real_query, real_key, real_value = (x[: self.batch, :, : self.length] for x in (query, key, value))
        out = self.layout.attend(real_query, real_key, real_value, scores)
        return pad(out, (0, 0, 0, 0, 0, query.shape[2] - out.shape[1], 0, query.shape[0] - out.shape[0]))


def _weighted_sum(weights: Tensor, value: Tensor) -> Tensor:
    """Return weights [B, KV, M, K] @ value [B, KV, K, Dv] by blocks of keys: padding adds only zeros."""
    out = weights[..., :KEY_BLOCK] @ value[:, :, :KEY_BLOCK]
    for start in range(KEY_BLOCK, value.shape[2], KEY_BLOCK):
        out = out + weights[..., start : start + KEY_BLOCK] @ value[:, :, start : start + KEY_BLOCK]
    return out


def _to_length(states: Tensor, length: int) -> Tensor:
    """Cut or pad states [B, KV, K, D] to `length` tokens."""
    have = states.shape[2]
    if have >= length:
        return states[:, :, :length]
    return pad(states, (0, 0, 0, length - have))
