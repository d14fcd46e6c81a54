"""Prefill over what slots hold already, against plain attention row by row."""

from __future__ import annotations

import pytest
import torch

from hybridflow.models.attention import span_layout
from hybridflow.models.attention.layouts import PackedLayout
from hybridflow.models.attention.scores import Scores, masked_attention
from hybridflow.models.attention.span_layout import SpanLayout
from hybridflow.models.cache.kv_cache import LayerShape, SlotCache


@pytest.mark.parametrize("block", [512, 3])
@pytest.mark.parametrize("window", [None, 3, 50])
@pytest.mark.parametrize("special", [{}, {"softcap": 2.0}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}])
def test_chunks_see_their_row_and_themselves(
    block: int, window: int | None, special: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_layout, "QUERY_BLOCK", block)
    torch.manual_seed(0)
    cache = SlotCache({5: LayerShape(2, 6, 5, torch.float64)}, 6, 400)
    for stored in (cache.keys[5], cache.values[5]):
        stored.normal_()
    slots, starts, lengths = [4, 0, 2, 5], [7, 0, 300, 20], [8, 11, 80, 1]
    total = sum(lengths)
    key, value = (
        torch.randn(1, 2, total, 6, dtype=torch.float64),
        torch.randn(1, 2, total, 5, dtype=torch.float64),
    )
    query = torch.randn(1, 4, total, 6, dtype=torch.float64)
    scores = Scores(5, scaling=0.3, sliding_window=window, **special)  # type: ignore[arg-type]
    layout = SpanLayout.packed(cache, slots, starts, lengths)
    out = layout.attend(query, key, value, scores)
    assert out.shape == (1, total, 4, 5)
    offset = 0
    for slot, start, length in zip(slots, starts, lengths):
        own = slice(offset, offset + length)
        assert torch.equal(cache.keys[5][slot, :, start : start + length], key[0, :, own])
        for step in range(length):
            first, end = 0 if window is None else max(0, start + step + 1 - window), start + step + 1
            keys, values = (
                cache.keys[5][slot : slot + 1, :, first:end],
                cache.values[5][slot : slot + 1, :, first:end],
            )
            wanted = masked_attention(
                query[:, :, offset + step : offset + step + 1], keys, values, None, scores
            )
            torch.testing.assert_close(out[:, offset + step], wanted[:, :, 0])
        offset += length


def test_spans_have_to_fit_into_their_rows() -> None:
    cache = SlotCache({0: LayerShape(1, 2, 2, torch.float32)}, 2, 9)
    with pytest.raises(AssertionError, match="room in the cache"):
        SpanLayout.packed(cache, [0], [7], [3])


def test_whole_prompts_have_the_bits_of_training() -> None:
    torch.manual_seed(1)
    cache = SlotCache({0: LayerShape(2, 8, 8, torch.float32)}, 4, 40)
    lengths = [9, 30, 12]
    query, key, value = (torch.randn(1, heads, sum(lengths), 8) for heads in (4, 2, 2))
    layout = SpanLayout.packed(cache, [2, 0, 1], [0, 0, 0], lengths)
    wanted = PackedLayout.build(lengths).attend(query, key, value, Scores())
    assert torch.equal(layout.attend(query, key, value, Scores()), wanted)
    assert torch.equal(cache.keys[0][2, :, :9], key[0, :, :9])
    assert torch.equal(cache.values[0][1, :, :12], value[0, :, 39:])
