"""Sequence parallelism after Ulysses (Jacobs et al. 2023, arXiv:2309.14509): the tokens of a micro-batch, cut
among the ranks of a group.

Each rank runs every layer on its part of the N packed tokens. Around attention the parts are exchanged: out
go all heads of some tokens, in come some heads of all tokens; after it the way back. Everything else of a
transformer looks at one token at a time. The M predicted tokens are dealt to the ranks in equal shares before
the output head, whatever part they lie in, and what the head says of them is gathered.

A rank's gradient is that of its own share of the outputs: the sum over the group is the gradient of the uncut
model, when every rank computes the same loss from the gathered outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig

from hybridflow.errors import ModelError
from hybridflow.models.attention import Layout, Scores
from hybridflow.models.log_probs import TokenOutputs
from hybridflow.protocol.packing import PackedBatch


class SequenceCut:
    """Which of the N tokens and which of the M predicted tokens of a packed batch are this rank's.

    Example: 7 tokens on 2 ranks are parts of 4; the second holds tokens 4 to 6 and one dummy that nobody
    reads. If only tokens 4 to 6 predict, each rank still gets its share of the three hidden states: two and
    one.
    """

    def __init__(self, packed: PackedBatch, group: dist.ProcessGroup) -> None:
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self.num_tokens, self.num_targets = packed.num_tokens, len(packed.targets)
        self.part = -(-self.num_tokens // self.size)
        # rank r: held[r] to held[r + 1]
        held = [_predicting_before(rank * self.part, packed) for rank in range(self.size + 1)]
        share = -(-self.num_targets // self.size)
        dealt = [min(share * rank, self.num_targets) for rank in range(self.size + 1)]
        self.own = slice(dealt[self.rank], dealt[self.rank + 1])
        self._share = share
        self._sends = [_overlap(held, self.rank, dealt, other) for other in range(self.size)]
        self._receives = [_overlap(held, other, dealt, self.rank) for other in range(self.size)]
        self.predict_index = (
            packed.predict_index[held[self.rank] : held[self.rank + 1]] - self.rank * self.part
        )

    def tokens(self, whole: Tensor) -> Tensor:
        """This rank's part [P] of a column [N], with zeros for dummy tokens."""
        mine = whole[self.rank * self.part : (self.rank + 1) * self.part]
        return pad(mine, (0, self.part - len(mine)))

    def layout(self, whole: Layout) -> SequenceLayout:
        """The layout of a part, around that of all N tokens."""
        return SequenceLayout(whole, self)

    def deal(self, states: Tensor) -> Tensor:
        """Hidden states at this rank's predicting positions -> those of its share of the M targets, `own`."""
        if not self.num_targets:
            return states
        dealt: Tensor = _AllToAll.apply(states, self.group, self._sends, self._receives)  # type: ignore[no-untyped-call]
        return dealt

    def gather(self, columns: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Columns of the own share -> complete ones [M], the same on every rank.

        Backward takes the own share's gradient and leaves the others to their ranks.
        """
        wholes = _Gather.apply(
            torch.stack(tuple(columns)), self.group, self._share, self.num_targets, self.own
        )  # type: ignore[no-untyped-call]
        # copies, since FSDP warns of modules that return views
        return tuple(
            whole.clone() if column.requires_grad else whole.detach()
            for column, whole in zip(columns, wholes, strict=True)
        )

    def gather_outputs(self, outputs: TokenOutputs) -> TokenOutputs:
        """What the head says of the own share -> of all M predicted tokens."""
        given = {name: column for name, column in outputs._asdict().items() if column is not None}
        return outputs._replace(**dict(zip(given, self.gather(list(given.values())), strict=True)))


class SequenceLayout:
    """Attention of a part of the tokens: exchanged for some heads of all tokens, attended under the whole
    layout, exchanged back.
    """

    def __init__(self, whole: Layout, cut: SequenceCut) -> None:
        self.whole, self.cut = whole, cut

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """query [1, H, P, D], key [1, KV, P, D], value [1, KV, P, Dv] -> [1, P, H, Dv]."""
        heads, size, rank = query.shape[1], self.cut.size, self.cut.rank
        query, key, value = divide_heads(query, key, value, size)
        if scores.sinks is not None:
            each = query.shape[1] // size
            scores = replace(
                scores, sinks=pad(scores.sinks, (0, query.shape[1] - heads))[rank * each : (rank + 1) * each]
            )
        query, key, value = self._to_heads([query, key, value])
        return self._to_tokens(self.whole.attend(query, key, value, scores))[:, :, :heads]

    def _to_heads(self, states: list[Tensor]) -> list[Tensor]:
        """All heads of P tokens -> 1/size of the heads of N tokens, each [1, h, N, D]; one exchange for all
        of them.
        """
        each = [x[0].unflatten(0, (self.cut.size, -1)).transpose(1, 2) for x in states]  # [size, P, h, D]
        sizes = [x.shape[2:] for x in each]
        mixed = torch.cat([x.flatten(2) for x in each], dim=-1)
        received = _AllToAll.apply(mixed, self.cut.group, None, None).flatten(0, 1)[: self.cut.num_tokens]  # type: ignore[no-untyped-call]
        parts = received.split([size.numel() for size in sizes], dim=-1)
        return [
            part.unflatten(-1, size).transpose(0, 1)[None] for part, size in zip(parts, sizes, strict=True)
        ]

    def _to_tokens(self, attended: Tensor) -> Tensor:
        """[1, N, h, Dv], some heads of all tokens -> [1, P, size·h, Dv], all heads of this rank's."""
        dummies = self.cut.part * self.cut.size - self.cut.num_tokens
        tokens = pad(attended[0], (0, 0, 0, 0, 0, dummies)) if dummies else attended[0]
        mine = _AllToAll.apply(tokens.unflatten(0, (self.cut.size, -1)), self.cut.group, None, None)  # type: ignore[no-untyped-call]
        whole: Tensor = mine.transpose(0, 1).flatten(1, 2)[None]
        return whole


def divide_heads(query: Tensor, key: Tensor, value: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Heads that `size` ranks can share evenly: query [1, H', P, D], key [1, KV', P, D], value [1, KV', P,
    Dv].

    Key-value heads are repeated as often as it takes for each rank to have all that its query heads look at.
    Where that does not come out even, every query head gets its own, and heads of zeros fill up the rest:
    they stand last and are to be dropped.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    if kv_heads % size:
        group, times = heads // kv_heads, size // math.gcd(kv_heads, size)
        times = times if group % times == 0 else group
        key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
        missing = -heads % size if times == group else 0
        if missing:
            query, key, value = (pad(x, (0, 0, 0, 0, 0, missing)) for x in (query, key, value))
    return query, key, value


def check_positions(config: PretrainedConfig, lengths: Sequence[int]) -> None:
    """Raise ModelError for rows so long that rotary frequencies depend on the longest position, which only
    one part holds.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    for settings in [rope, *(inner for inner in rope.values() if isinstance(inner, dict))]:
        kind = str(settings.get("rope_type", "default"))
        limit = settings.get("original_max_position_embeddings") or getattr(
            text, "max_position_embeddings", None
        )
        if (kind == "longrope" or "dynamic" in kind) and limit is not None and max(lengths) > limit:
            raise ModelError(
                f"a row of {max(lengths)} tokens: rotary embeddings of type {kind!r} change past {limit} "
                "tokens, and a rank that holds a "
                "part of the row cannot tell. Set ulysses_sequence_parallel_size=1, or shorten "
                "data.max_prompt_length and "
                "data.max_response_length"
            )


def _predicting_before(edge: int, packed: PackedBatch) -> int:
    """How many predicting positions lie before a position; known on the host, so no device is asked and
    waited for.
    """
    ends = accumulate(packed.lengths)
    firsts = (end - 1 - count for end, count in zip(ends, packed.num_predicted, strict=True))
    return sum(
        min(max(edge - first, 0), count) for first, count in zip(firsts, packed.num_predicted, strict=True)
    )


def _overlap(first: list[int], i: int, second: list[int], j: int) -> int:
    """How many numbers lie both in [first[i], first[i + 1]) and in [second[j], second[j + 1])."""
    return max(0, min(first[i + 1], second[j + 1]) - max(first[i], second[j]))


class _AllToAll(torch.autograd.Function):
    """Rows of [R, ...] to the ranks of a group, `sends` of them to each (None: equal counts), `receives`
    back; the gradient returns.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: dist.ProcessGroup, sends: list[int] | None, receives: list[int] | None
    ) -> Tensor:
        ctx.way_back = (group, receives, sends)
        return _exchange(rows, group, sends, receives)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grads[0], *ctx.way_back), None, None, None


def _exchange(
    rows: Tensor, group: dist.ProcessGroup, sends: list[int] | None, receives: list[int] | None
) -> Tensor:
    received = rows.new_empty((len(rows) if receives is None else sum(receives), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
    return received


class _Gather(torch.autograd.Function):
    """Columns [k, m] of each rank's share to [k, M] on all ranks; the gradient of the own share comes back."""

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
