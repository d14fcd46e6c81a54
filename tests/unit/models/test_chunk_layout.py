"""Prefill over what slots hold already, against plain attention row by row."""

from __future__ import annotations

import pytest
import torch

from hybridflow.models import chunk_layout
from hybridflow.models.attention import Scores, masked_attention
from hybridflow.models.chunk_layout import ChunkLayout
from hybridflow.models.kv_cache import LayerShape, Places, SlotCache


@pytest.mark.parametrize("block", [512, 3])
@pytest.mark.parametrize("window", [None, 3, 50])
@pytest.mark.parametrize("special", [{}, {"softcap": 2.0}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}])
def test_pieces_see_their_slot_and_themselves(
    block: int, window: int | None, special: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_layout, "QUERY_BLOCK", block)
    torch.manual_seed(0)
    cache = SlotCache({5: LayerShape(2, 6, 5, torch.float64)}, 6, 400)
    for stored in (cache.keys[5], cache.values[5]):
        stored.normal_()
    slots, starts, lengths = [4, 0, 2, 5], [7, 0, 300, 20], [8, 11, 80, 1]
    total = sum(lengths)
    owner = torch.tensor([row for row, length in enumerate(lengths) for _ in range(length)])
    positions = torch.cat([torch.arange(start, start + length) for start, length in zip(starts, lengths)])
    key, value = (
        torch.randn(1, 2, total, 6, dtype=torch.float64),
        torch.randn(1, 2, total, 5, dtype=torch.float64),
    )
    query = torch.randn(1, 4, total, 6, dtype=torch.float64)
    scores = Scores(5, scaling=0.3, sliding_window=window, **special)  # type: ignore[arg-type]
    layout = ChunkLayout(cache, slots, starts, lengths, Places(torch.tensor(slots)[owner], positions))
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


def test_pieces_have_to_fit_into_their_slots() -> None:
    cache = SlotCache({0: LayerShape(1, 2, 2, torch.float32)}, 2, 9)
    with pytest.raises(AssertionError, match="room in their slots"):
        ChunkLayout(cache, [0], [7], [3], Places(torch.tensor([0]), torch.tensor([7])))
