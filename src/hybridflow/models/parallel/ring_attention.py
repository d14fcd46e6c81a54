"""Ring attention (arXiv:2310.01889) over packed rows: keys and values go round among ranks that share tokens.

    rank r keeps the queries of its part ─ round 0: its own keys ─ round 1: those of part r − 1 ─ …
    partial results are merged by the logarithm of their sums of weights (log-sum-exp)

It needs no heads to divide, unlike Ulysses (`sequence_parallel`), and no more memory for more ranks. Rows lie
one behind the other, so at most one row has tokens in both of two parts, and all keys of the earlier part are
before all queries of the later one: between parts no mask is needed but a window's. Rounds end where no row
reaches further. Ranks hold parts in order, so that of one long row the last rank has the most pairs.

The gradient recomputes weights from the log-sums, as FlashAttention does. Gradients of keys travel along with
the keys, and come home in one message at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.distributed.accelerators import RING_QUERIES
from hybridflow.models.attention.scores import Scores

if TYPE_CHECKING:
    from hybridflow.models.experts.routing import RouteTape

QUERIES = RING_QUERIES
"""Queries that are scored at a time, which bounds the memory of scores (`config --explain` counts them)."""


@dataclass(frozen=True)
class RingPiece:
    """Tokens of one row: queries of this rank's part, and keys of the part that a round brings."""

    queries: slice
    keys: slice
    ahead: int
    """Number of tokens by which the first query comes after the first key."""


class RingLayout:
    """The layout of this rank's part of packed rows, whose other keys come from the ranks before it."""

    routes: RouteTape | None = None
    """The routes of this part's tokens, where they are recorded or replayed."""

    def __init__(self, lengths: Sequence[int], part: int, group: dist.ProcessGroup) -> None:
        self.group = group
        self.part = part
        rank = group.rank()
        starts = [0, *accumulate(lengths)]
        rows = list(pairwise(starts))
        rounds = max((end - 1) // part - start // part for start, end in rows)
        self.pieces = [list(_pieces(rows, rank, rank - behind, part)) for behind in range(rounds + 1)]
        """The pieces of each round, of which the first is with this rank's own keys."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """query [1, H, P, D], key [1, KV, P, D], value [1, KV, P, Dv] -> [1, P, H, Dv]."""
        out: Tensor = _Ring.apply(query[0], key[0], value[0], scores.sinks, self, scores)  # type: ignore[no-untyped-call]
        return out.transpose(0, 1)[None]


def _pieces(rows: Sequence[tuple[int, int]], mine: int, other: int, part: int) -> Iterator[RingPiece]:
    """Yield the pieces of rows that have queries in part `mine` and keys in part `other`, none for others."""
    if other < 0:  # what has gone round past the first rank comes after all queries
        return
    for start, end in rows:
        queries = _within(start, end, mine * part, part)
        keys = _within(start, end, other * part, part)
        if queries.start < queries.stop and keys.start < keys.stop:
            ahead = mine * part + queries.start - other * part - keys.start
            yield RingPiece(queries, keys, ahead)


def _within(start: int, end: int, first: int, part: int) -> slice:
    """Return the places of tokens start to end - 1 in the part that begins at `first`."""
    return slice(max(start, first) - first, min(end, first + part) - first)


class _Ring(torch.autograd.Function):
    """Attention of queries [H, P, D] over keys [KV, P, D] and values [KV, P, Dv] of a ring -> [H, P, Dv]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        layout: RingLayout,
        how: Scores,
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        heads, part, _ = query.shape
        out = query.new_zeros(heads, part, value.shape[-1], dtype=wide)
        sums = query.new_full((heads, part), float("-inf"), dtype=wide)
        if sinks is not None:
            sums = sinks.to(wide)[:, None].expand(heads, part).clone()
        held = torch.cat([key, value], dim=-1)
        for number, pieces in enumerate(layout.pieces):
            coming = None
            if number + 1 < len(layout.pieces):
                coming = _Passed(held, layout.group)
            keys, values = held.split([key.shape[-1], value.shape[-1]], dim=-1)
            for block in _blocks(pieces, how.sliding_window):
                queries = block.piece.queries
                span = block.piece.keys
                weights, _ = _scores(query[:, queries], keys[:, span], block, how)
                before = sums[:, queries]
                after = torch.logaddexp(before, weights.logsumexp(-1).flatten(0, 1))
                weights.sub_(after.unflatten(0, weights.shape[:2])[..., None]).exp_()
                found = _grouped(weights.to(value.dtype)) @ values[:, span]
                out[:, queries] *= (before - after).exp_()[..., None]
                out[:, queries] += found.reshape(heads, -1, found.shape[-1])
                sums[:, queries] = after
            if coming is not None:
                held = coming.wait()
        ctx.save_for_backward(query, key, value, sinks, out, sums)
        ctx.layout = layout
        ctx.how = how
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, sums = ctx.saved_tensors
        layout: RingLayout = ctx.layout
        wide = out.dtype
        kv_heads = key.shape[0]
        split = [key.shape[-1], value.shape[-1]]
        grad = grads[0]
        overlap = (grad.to(wide) * out).sum(-1)  # [H, P]: the part of each weight's gradient that all share
        of_query = torch.zeros_like(query, dtype=wide)
        held = torch.cat([key, value], dim=-1)
        of_held = torch.zeros_like(held, dtype=wide)
        for number, pieces in enumerate(layout.pieces):
            coming = None
            if number + 1 < len(layout.pieces):
                coming = _Passed(held, layout.group)
            keys, values = held.split(split, dim=-1)
            of_keys, of_values = of_held.split(split, dim=-1)
            for block in _blocks(pieces, ctx.how.sliding_window):
                queries = block.piece.queries
                span = block.piece.keys
                weights, slope = _scores(query[:, queries], keys[:, span], block, ctx.how)
                weights.sub_(_by_group(sums[:, queries], kv_heads)[..., None]).exp_()
                above = _by_group(grad[:, queries], kv_heads)
                of_values[:, span] += (_grouped(weights.to(grad.dtype)).mT @ _grouped(above)).to(wide)
                of_weights = (_grouped(above) @ values[:, span].mT).reshape(weights.shape).to(wide)
                of_logits = of_weights.sub_(_by_group(overlap[:, queries], kv_heads)[..., None]).mul_(weights)
                of_scores = _grouped(of_logits.mul_(slope).to(query.dtype))
                of_query[:, queries] += (of_scores @ keys[:, span]).reshape(len(query), -1, split[0]).to(wide)
                of_keys[:, span] += (of_scores.mT @ _grouped(_by_group(query[:, queries], kv_heads))).to(wide)
            if coming is not None:
                of_held = _Passed(of_held, layout.group).wait()
                held = coming.wait()
        of_held = _Passed(of_held, layout.group, -(len(layout.pieces) - 1)).wait()
        of_key, of_value = of_held.split(split, dim=-1)
        of_sinks: Tensor | None = None
        if sinks is not None:
            of_sinks = -((sinks.to(wide)[:, None] - sums).exp() * overlap).sum(-1).to(sinks.dtype)
        return (
            of_query.to(query.dtype),
            of_key.to(key.dtype),
            of_value.to(value.dtype),
            of_sinks,
            None,
            None,
        )


@dataclass(frozen=True)
class Block:
    """Some queries of a piece with the keys that they may see, and which of these are hidden from some."""

    piece: RingPiece
    window: int | None
    masked: bool


def _blocks(pieces: Sequence[RingPiece], window: int | None) -> Iterator[Block]:
    """Cut pieces into blocks of at most QUERIES queries, without keys that none of them sees."""
    for piece in pieces:
        for start in range(piece.queries.start, piece.queries.stop, QUERIES):
            stop = min(start + QUERIES, piece.queries.stop)
            ahead = piece.ahead + start - piece.queries.start
            last = ahead + stop - start - 1  # how far the last query comes after the first key
            first_key = 0
            if window is not None:
                first_key = max(0, ahead - window + 1)
            num_keys = min(piece.keys.stop - piece.keys.start, last + 1)
            if first_key >= num_keys:
                continue
            keys = slice(piece.keys.start + first_key, piece.keys.start + num_keys)
            masked = num_keys > ahead + 1 or (window is not None and last - first_key >= window)
            yield Block(RingPiece(slice(start, stop), keys, ahead - first_key), window, masked)


def _scores(query: Tensor, key: Tensor, block: Block, how: Scores) -> tuple[Tensor, Tensor | float]:
    """Return logits [KV, H/KV, Q, K], −inf where hidden, and their slope along the plain product.

    The logits are in float32 or wider.
    """
    kv_heads = key.shape[0]
    scaling = query.shape[-1] ** -0.5 if how.scaling is None else how.scaling
    grouped = _by_group(query, kv_heads)
    logits = (_grouped(grouped) @ key.mT).reshape(*grouped.shape[:3], key.shape[1]).mul_(scaling)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    slope: Tensor | float = scaling
    if how.softcap is not None:
        bent = torch.tanh(logits / how.softcap)
        logits = bent * how.softcap
        slope = (1 - bent.square()) * scaling
    if block.masked:
        places = torch.arange(query.shape[1], device=query.device)[:, None] + block.piece.ahead
        behind = places - torch.arange(key.shape[1], device=query.device)
        hidden = behind < 0
        if block.window is not None:
            hidden |= behind >= block.window
        logits.masked_fill_(hidden, float("-inf"))
    return logits, slope


def _by_group(states: Tensor, kv_heads: int) -> Tensor:
    """Return states [H, ...] as [KV, H/KV, ...]."""
    return states.reshape(kv_heads, -1, *states.shape[1:])


def _grouped(states: Tensor) -> Tensor:
    """Return states [KV, H/KV, Q, D] as [KV, H/KV * Q, D], for one product with the keys of a head."""
    return states.flatten(1, 2)


class _Passed:
    """A message to the rank `by` further on in the ring, and the one that comes from as far behind."""

    def __init__(self, held: Tensor, group: dist.ProcessGroup, by: int = 1) -> None:
        size = group.size()
        self.sent = held.contiguous()
        self.received = self.sent
        self.works: list[Any] = []
        if by % size == 0:
            return
        self.received = torch.empty_like(self.sent)
        to = dist.get_global_rank(group, (group.rank() + by) % size)
        source = dist.get_global_rank(group, (group.rank() - by) % size)
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.sent, to, group),
                dist.P2POp(dist.irecv, self.received, source, group),
            ]
        )

    def wait(self) -> Tensor:
        """Return the received tensors, once all transfers are complete."""
        for work in self.works:
            work.wait()
        return self.received
