"""The attention function: what it refuses, how rows are bucketed, and plain maths in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from hybridflow.errors import ModelError
from hybridflow.models.attention.layouts import PackedLayout, attention, make_buckets
from hybridflow.models.attention.scores import Scores

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 6, 5


def _states(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(num_tokens)
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    query, key, value = (
        torch.randn(1, heads, num_tokens, dim, generator=draw, dtype=torch.float64).requires_grad_()
        for heads, dim in shapes
    )
    return query, key, value


def _token_by_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with a loop over tokens and heads: no masks, no batching."""
    out, start = [], 0
    for length in lengths:
        for token in range(start, start + length):
            first = start if window is None else max(start, token - window + 1)
            heads = []
            for head in range(HEADS):
                shared = head // (HEADS // KV_HEADS)
                scores = key[0, shared, first : token + 1] @ query[0, head, token] * scaling
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                everything = scores if sinks is None else torch.cat([scores, sinks[head : head + 1]])
                heads.append(everything.softmax(0)[: len(scores)] @ value[0, shared, first : token + 1])
            out.append(torch.stack(heads))
        start += length
    return torch.stack(out)[None]


@pytest.mark.parametrize("lengths", [[5, 5, 5], [9, 2, 4, 1, 9], [300, 6], [1]])
@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"),
    [(None, None, False), (3, None, False), (None, 0.8, False), (4, None, True), (2, 0.5, True)],
)
def test_against_a_loop_over_tokens(
    lengths: list[int], window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    if sum(lengths) > 100 and softcap is not None:
        lengths = [90, 6]
    draw = torch.Generator().manual_seed(0)
    sinks = torch.randn(HEADS, generator=draw, dtype=torch.float64).requires_grad_() if with_sinks else None
    states = _states(sum(lengths))
    wanted = _token_by_token(*states, lengths, 0.4, window, softcap, sinks)
    layout = PackedLayout.build(lengths)
    got = layout.attend(*states, Scores(scaling=0.4, sliding_window=window, softcap=softcap, sinks=sinks))
    assert got.shape == (1, sum(lengths), HEADS, VALUE_DIM)
    torch.testing.assert_close(got, wanted, atol=1e-10, rtol=0)
    inputs = [*states, *([sinks] if sinks is not None else [])]
    weights = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view_as(got)
    for ours, theirs in zip(
        torch.autograd.grad((got * weights).sum(), inputs),
        torch.autograd.grad((wanted * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


def test_default_scaling() -> None:
    states = _states(4)
    layout = PackedLayout.build([4])
    torch.testing.assert_close(
        layout.attend(*states, Scores()), layout.attend(*states, Scores(scaling=1 / math.sqrt(DIM)))
    )


def test_buckets_waste_little() -> None:
    lengths = torch.randint(10, 900, (200,), generator=torch.Generator().manual_seed(5)).tolist()
    buckets = make_buckets(lengths)
    assert sorted(row for bucket in buckets for row in bucket) == list(range(200))
    assert sum(len(bucket) * max(lengths[row] for row in bucket) for bucket in buckets) <= 1.15 * sum(lengths)
    assert len(buckets) < 30
    # short rows share a bucket whatever they waste, but not with a long one
    assert make_buckets([3, 90, 1]) == [[2, 0], [1]]


def _call(**changes: object) -> None:
    query, key, value = _states(3)
    attention(nn.Module(), query, key, value, None, **{"layout": PackedLayout.build([3]), **changes})  # type: ignore[arg-type]


def test_refusals() -> None:
    _call(
        position_ids=torch.arange(3), use_cache=False, output_attentions=False, is_causal=True, anything=None
    )
    with pytest.raises(ModelError, match="without a layout"):
        _call(layout=None)
    with pytest.raises(ModelError, match="alibi_slopes=Tensor"):
        _call(alibi_slopes=torch.ones(4))
    with pytest.raises(ModelError, match="output_attentions"):
        _call(output_attentions=True)
    with pytest.raises(ModelError, match="dropout"):
        _call(dropout=0.1)
    with pytest.raises(ModelError, match="both directions"):
        _call(is_causal=False)
