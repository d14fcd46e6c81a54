"""Sequence parallelism by Ulysses (arXiv:2309.14509): ranks share the tokens of a micro-batch.

Each rank runs every layer on its part of the N packed tokens. Before attention the ranks exchange all heads
of some tokens for some heads of all tokens, and after it they exchange back. Everything else in a transformer
looks at one token at a time. The M predicted tokens are dealt to the ranks in equal shares before the output
head, whatever part they lie in, and the head's outputs are gathered.

A rank's gradient is that of its own share of the outputs: the sum over the group is the gradient of the uncut
model, when every rank computes the same loss from the gathered outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from hybridflow.models.attention.layouts import Layout
from hybridflow.models.attention.scores import Scores
from hybridflow.models.experts.routing import RouteTape
from hybridflow.models.heads.log_probs import TokenOutputs
from hybridflow.models.parallel.ring_attention import RingLayout
from hybridflow.protocol.packing import PackedBatch


class SequenceCut:
    """This rank's share of the N tokens and of the M predicted tokens of a packed batch.

    Example: 7 tokens on 2 ranks are parts of 4; the second holds tokens 4 to 6 and one dummy that is never
    read. If only tokens 4 to 6 predict, each rank still gets its share of the three hidden states: two and
    one.
    """

    def __init__(self, packed: PackedBatch, group: dist.ProcessGroup, *, ring: bool = False) -> None:
        """Cut a packed batch for this rank of `group`; with `ring` the parts attend by ring attention."""
        self.group = group
        self.lengths = packed.lengths
        self.ring = ring
        self.size = group.size()
        self.rank = group.rank()
        self.num_tokens = packed.num_tokens
        self.num_targets = len(packed.targets)
        self.part = -(-self.num_tokens // self.size)
        edges = torch.arange(self.size + 1) * self.part
        # rank r: held[r] to held[r + 1]
        held = torch.searchsorted(packed.predict_index_on_cpu, edges).tolist()
        share = -(-self.num_targets // self.size)
        dealt = [min(share * rank, self.num_targets) for rank in range(self.size + 1)]
        self.own = slice(dealt[self.rank], dealt[self.rank + 1])
        self._share = share
        self._sends = [_overlap(held, self.rank, dealt, other) for other in range(self.size)]
        self._receives = [_overlap(held, other, dealt, self.rank) for other in range(self.size)]
        self.predict_index = (
            packed.predict_index[held[self.rank] : held[self.rank + 1]] - self.rank * self.part
        )

    @property
    def own_tokens(self) -> slice:
        """The tokens of this rank's part, without dummies."""
        first = min(self.rank * self.part, self.num_tokens)
        return slice(first, min(first + self.part, self.num_tokens))

    def tokens(self, whole: Tensor) -> Tensor:
        """Return this rank's part [P] of a column [N], with zeros for dummy tokens."""
        mine = whole[self.own_tokens]
        return pad(mine, (0, self.part - len(mine)))

    def gather_rows(self, mine: Tensor) -> Tensor:
        """Gather rows [n, W] of each rank's own tokens to all of them [N, W]; no gradient flows."""
        mine = pad(mine, (0, 0, 0, self.part - len(mine)))
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine.contiguous(), group=self.group)
        return torch.cat(parts)[: self.num_tokens]

    def layout(self, whole: Layout) -> Layout:
        """Return the layout of this rank's part, around that of all N tokens."""
        if self.ring:
            return RingLayout(self.lengths, self.part, self.group)
        return SequenceLayout(whole, self)

    def deal(self, states: Tensor) -> Tensor:
        """Exchange hidden states where this rank predicts for those of its share of targets, `own`."""
        if not self.num_targets:
            return states
        dealt: Tensor = AllToAll.apply(states, self.group, self._sends, self._receives)  # type: ignore[no-untyped-call]
        return dealt

    def gather(self, columns: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Gather columns of each rank's share to complete ones [M], the same on every rank.

        The backward pass takes the gradient of this rank's share and leaves the others to their ranks.
        """
        wholes = _Gather.apply(
            torch.stack(tuple(columns)), self.group, self._share, self.num_targets, self.own
        )  # type: ignore[no-untyped-call]
        # copies, since FSDP warns of modules that return views
        complete = []
        for column, whole in zip(columns, wholes, strict=True):
            if not column.requires_grad:
                whole = whole.detach()
            complete.append(whole.clone())
        return tuple(complete)

    def gather_outputs(self, outputs: TokenOutputs) -> TokenOutputs:
        """Gather the head's outputs from each rank's share to all M predicted tokens."""
        wide = outputs.top_outcomes
        outputs = outputs._replace(top_outcomes=None)
        given = {name: column for name, column in outputs._asdict().items() if column is not None}
        whole = outputs._replace(**dict(zip(given, self.gather(list(given.values())), strict=True)))
        if wide is None:
            return whole
        return whole._replace(top_outcomes=torch.stack(self.gather(wide.unbind(1)), dim=1))


class SequenceLayout:
    """The layout of a part of the tokens, exchanged for some heads of all tokens while it attends."""

    def __init__(self, whole: Layout, cut: SequenceCut) -> None:
        self.whole = whole
        self.cut = cut
        self.routes: RouteTape | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """query [1, H, P, D], key [1, KV, P, D], value [1, KV, P, Dv] -> [1, P, H, Dv]."""
        heads = query.shape[1]
        size = self.cut.size
        rank = self.cut.rank
        query, key, value = divide_heads(query, key, value, size)
        if scores.sinks is not None:
            each = query.shape[1] // size
            scores = replace(
                scores, sinks=pad(scores.sinks, (0, query.shape[1] - heads))[rank * each : (rank + 1) * each]
            )
        query, key, value = self._to_heads([query, key, value])
        return self._to_tokens(self.whole.attend(query, key, value, scores))[:, :, :heads]

    def _to_heads(self, states: list[Tensor]) -> list[Tensor]:
        """Exchange all heads of P tokens for 1/size of those of N tokens, each [1, h, N, D], at once."""
        each = [x[0].unflatten(0, (self.cut.size, -1)).transpose(1, 2) for x in states]  # [size, P, h, D]
        sizes = [x.shape[2:] for x in each]
        mixed = torch.cat([x.flatten(2) for x in each], dim=-1)
        received = AllToAll.apply(mixed, self.cut.group, None, None).flatten(0, 1)[: self.cut.num_tokens]  # type: ignore[no-untyped-call]
        parts = received.split([size.numel() for size in sizes], dim=-1)
        return [
            part.unflatten(-1, size).transpose(0, 1)[None] for part, size in zip(parts, sizes, strict=True)
        ]

    def _to_tokens(self, attended: Tensor) -> Tensor:
        """Exchange [1, N, h, Dv], some heads of all tokens, for [1, P, size·h, Dv], all heads of some."""
        dummies = self.cut.part * self.cut.size - self.cut.num_tokens
        tokens = attended[0]
        if dummies:
            tokens = pad(tokens, (0, 0, 0, 0, 0, dummies))
        mine = AllToAll.apply(tokens.unflatten(0, (self.cut.size, -1)), self.cut.group, None, None)  # type: ignore[no-untyped-call]
        whole: Tensor = mine.transpose(0, 1).flatten(1, 2)[None]
        return whole


def divide_heads(query: Tensor, key: Tensor, value: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Repeat and pad heads so that `size` ranks can share them evenly.

    Returns query [1, H', P, D], key [1, KV', P, D] and value [1, KV', P, Dv]. Key-value heads are repeated
    until each rank has all that its query heads look at. Where that does not come out even, every query head
    gets its own, and heads of zeros fill up the rest: they come last and are to be dropped.
    """
    heads = query.shape[1]
    kv_heads = key.shape[1]
    if kv_heads % size:
        group = heads // kv_heads
        times = size // math.gcd(kv_heads, size)
        if group % times:
            times = group
        key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
        missing = -heads % size
        if missing and times == group:
            query, key, value = (pad(x, (0, 0, 0, 0, 0, missing)) for x in (query, key, value))
    return query, key, value


def _overlap(first: list[int], i: int, second: list[int], j: int) -> int:
    """Return how many numbers lie both in [first[i], first[i + 1]) and in [second[j], second[j + 1])."""
    return max(0, min(first[i + 1], second[j + 1]) - max(first[i], second[j]))


class _Gather(torch.autograd.Function):
    """Gather of each rank's columns [k, m] to [k, M]; its gradient is that of this rank's share."""

    @staticmethod
    def forward(
        ctx: Any, mine: Tensor, group: dist.ProcessGroup, share: int, num_targets: int, own: slice
    ) -> Tensor:
        ctx.own = own
        parts = [mine.new_empty(len(mine), share) for _ in range(group.size())]
        if num_targets:
            dist.all_gather(parts, pad(mine, (0, share - mine.shape[1])), group=group)
        return torch.cat(parts, dim=1)[:, :num_targets]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grads[0][:, ctx.own], None, None, None, None


class AllToAll(torch.autograd.Function):
    """Exchange of rows [R, ...] among the ranks of a group, whose gradient goes the way back.

    `sends` has the number of rows for each rank, `receives` the number from each; None means equal counts.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: dist.ProcessGroup, sends: list[int] | None, receives: list[int] | None
    ) -> Tensor:
        ctx.way_back = (group, receives, sends)
        return exchange(rows, group, sends, receives)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange(grads[0], *ctx.way_back), None, None, None


def exchange(
    rows: Tensor, group: dist.ProcessGroup, sends: list[int] | None, receives: list[int] | None
) -> Tensor:
    """Send rows to the ranks of a group and return those that they sent, as `AllToAll` without a gradient."""
    count = len(rows)
    if receives is not None:
        count = sum(receives)
    received = rows.new_empty((count, *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
    return received
