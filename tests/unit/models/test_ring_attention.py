"""Ring attention: rows that lie on several ranks have the outputs and gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_sequence_parallel import MIXED, cut_against_uncut
from torch import Tensor

from hybridflow.models.attention.layouts import PackedLayout, Scores
from hybridflow.models.parallel import ring_attention
from hybridflow.models.parallel.ring_attention import RingLayout
from ranks import Ranks

LONG = ((20, 21), (3, 2))
"""One row on all ranks, and one on the last only."""


def ring_against_one(
    rank: int,
    kind: str,
    model_type: str,
    changes: dict[str, Any],
    rows: tuple[tuple[int, int], ...],
    options: dict[str, Any],
) -> tuple[float, float, int]:
    """Differences of outputs and gradients, with blocks of a few queries where `queries` asks for them."""
    usual = ring_attention.QUERIES
    ring_attention.QUERIES = options.get("queries", usual)
    try:
        return cut_against_uncut(rank, kind, model_type, changes, rows, {"ring": True, **options})
    finally:
        ring_attention.QUERIES = usual


def check(
    ranks: Ranks, model_type: str, tolerance: float = 1e-10, kind: str = "policy", **options: Any
) -> None:
    changes = options.pop("changes", {})
    for rows in (MIXED, LONG):
        for apart, grads, count in ranks.run(ring_against_one, kind, model_type, changes, rows, options):
            assert apart < tolerance and grads < tolerance and count > 10, (rows, apart, grads)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mistral", "gpt_oss", "deepseek_v3"])
def test_architectures(two_ranks: Ranks, model_type: str) -> None:
    """Grouped heads, soft caps, sliding windows, sinks, and values narrower than keys."""
    check(two_ranks, model_type)


def test_one_head_on_three_ranks_in_small_blocks(three_ranks: Ranks) -> None:
    for model_type in ("llama", "mistral"):
        changes = {"num_attention_heads": 1, "num_key_value_heads": 1}
        check(three_ranks, model_type, changes=changes, queries=3)


def test_float32_checkpointing_shards_and_values(two_ranks: Ranks) -> None:
    check(two_ranks, "llama", tolerance=1e-5, dtype=torch.float32, checkpointing=True)
    check(two_ranks, "llama", shard=True)
    check(two_ranks, "llama", kind="value", given=True)


class Alone:
    """A group of one rank."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


@pytest.mark.parametrize(
    "how",
    [
        Scores(0),
        Scores(0, scaling=0.3, softcap=2.0),
        Scores(0, sliding_window=4),
        Scores(0, sliding_window=4, sinks=torch.tensor([0.5, -1.0, 2.0, 0.1], dtype=torch.float64)),
    ],
)
@pytest.mark.parametrize("queries", [2, 5, 512])
def test_one_rank_is_packed_attention(how: Scores, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_attention, "QUERIES", queries)
    lengths = [7, 1, 12]
    draw = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 20, 6), (1, 2, 20, 6), (1, 2, 20, 5))
    states = [torch.randn(shape, dtype=torch.float64, generator=draw) for shape in shapes]
    weights = torch.randn(1, 20, 4, 5, dtype=torch.float64, generator=draw)
    found: list[list[Tensor]] = []
    for layout in (PackedLayout.build(lengths), RingLayout(lengths, 20, Alone())):  # type: ignore[arg-type]
        inputs = [x.clone().requires_grad_() for x in states]
        sinks = None if how.sinks is None else how.sinks.clone().requires_grad_()
        out = layout.attend(*inputs, Scores(0, how.scaling, how.sliding_window, how.softcap, sinks))
        grads = torch.autograd.grad((out * weights).sum(), [*inputs, *([] if sinks is None else [sinks])])
        found.append([out.detach(), *grads])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def rounds_of(rank: int, lengths: list[int], part: int) -> tuple[int, int]:
    """Rounds of the ring, and pairs of a query and a key that this rank scores."""
    assert dist.group.WORLD is not None
    layout = RingLayout(lengths, part, dist.group.WORLD)
    pairs = sum(
        (piece.queries.stop - piece.queries.start) * (piece.keys.stop - piece.keys.start)
        for pieces in layout.pieces
        for piece in pieces
    )
    return len(layout.pieces), pairs


def test_rounds_end_where_no_row_reaches_further(three_ranks: Ranks) -> None:
    assert three_ranks.run(rounds_of, [4, 4, 4], 4) == [(1, 16)] * 3
    assert three_ranks.run(rounds_of, [6, 6], 4) == [(2, 16), (2, 16), (2, 24)]
    assert three_ranks.run(rounds_of, [12], 4) == [(3, 16), (3, 32), (3, 48)]
