"""Slots of keys and values, and the attention of decoding over them."""

from __future__ import annotations

import pytest
import torch

from hybridflow.models.attention.scores import Scores, masked_attention
from hybridflow.models.attention.span_layout import SpanLayout
from hybridflow.models.cache.kv_cache import LayerShape, SlotCache, bytes_per_token

SHAPES = {0: LayerShape(2, 4, 4, torch.float32), 3: LayerShape(1, 6, 5, torch.float32)}


def filled(num_slots: int = 5, capacity: int = 7, seed: int = 0) -> SlotCache:
    cache = SlotCache(SHAPES, num_slots, capacity)
    draw = torch.Generator().manual_seed(seed)
    for stored in (*cache.keys.values(), *cache.values.values()):
        stored.normal_(generator=draw)
    return cache


def test_moving_and_copying_take_slots_up_to_a_length() -> None:
    cache, before = filled(), filled()
    cache.move([4, 3], [0, 2])
    assert torch.equal(cache.keys[0][0], before.keys[0][4])
    assert torch.equal(cache.values[3][2], before.values[3][3])
    assert torch.equal(cache.values[3][1], before.values[3][1])
    cache.move([1, 3], [3, 0])  # a row may be source and destination
    assert torch.equal(cache.values[3][3], before.values[3][1])
    assert torch.equal(cache.values[3][0], before.values[3][3])
    cache.copy(4, [1, 2, 3], 6)
    assert all(torch.equal(cache.keys[3][slot, :, :6], before.keys[3][4, :, :6]) for slot in (1, 2, 3))
    cache = filled()
    cache.fork([(0, [1, 2], 5), (4, [3], 2)])
    for source, row in ((0, 1), (0, 2), (4, 3)):
        assert torch.equal(cache.values[3][row, :, :5], before.values[3][source, :, :5])
        assert torch.equal(cache.values[3][row, :, 5:], before.values[3][row, :, 5:])


@pytest.mark.parametrize("window", [None, 3, 50])
@pytest.mark.parametrize("special", [{}, {"softcap": 2.0}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decoding_attends_to_the_own_slot_up_to_the_new_token(
    window: int | None, special: dict[str, object], dtype: torch.dtype
) -> None:
    shapes = {0: LayerShape(2, 6, 5, dtype)}
    cache = SlotCache(shapes, 4, 9)
    cache.keys[0].normal_()
    cache.values[0].normal_()
    lengths = torch.tensor([2, 7, 0])
    query, key, value = (
        torch.randn(3, 4, 1, 6, dtype=dtype),
        torch.randn(3, 2, 1, 6, dtype=dtype),
        torch.randn(3, 2, 1, 5, dtype=dtype),
    )
    scores = Scores(scaling=0.3, sliding_window=window, **special)  # type: ignore[arg-type]
    out = SpanLayout.decoding(cache, lengths, 7).attend(query, key, value, scores)
    assert out.shape == (3, 1, 4, 5) and out.dtype == dtype
    for row, length in enumerate(lengths.tolist()):
        first = 0 if window is None else max(0, length + 1 - window)
        keys, values = (x[0][row : row + 1, :, first : length + 1] for x in (cache.keys, cache.values))
        assert torch.equal(keys[0, :, -1], key[row, :, 0])
        wanted = masked_attention(query[row : row + 1], keys, values, None, scores)
        torch.testing.assert_close(out[row : row + 1], wanted.transpose(1, 2))


def test_a_row_past_its_capacity_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="outside of a row"):
        SpanLayout.decoding(filled(), torch.tensor([7]), 7)


def test_another_size_keeps_what_is_told() -> None:
    cache, before = filled(), filled()
    cache.resize(3, 11, rows=2, length=6)
    assert (cache.num_slots, cache.capacity, tuple(cache.values[3].shape)) == (3, 11, (3, 1, 11, 5))
    for stored, old in ((cache.keys, before.keys), (cache.values, before.values)):
        for layer in SHAPES:
            assert torch.equal(stored[layer][:2, :, :6], old[layer][:2, :, :6])
            assert not stored[layer][:2, :, 6:].any()
    with pytest.raises(AssertionError, match="are to stay"):
        cache.resize(1, 11, rows=2, length=6)


def test_sizes_change_within_the_memory_that_is_there() -> None:
    cache, before = filled(), filled()
    cache.resize(5, 8, rows=5, length=7, room=100)
    assert cache.room == 100 and cache.nbytes == 100 * sum(shape.bytes_per_token for shape in SHAPES.values())
    for capacity in (20, 9, 17):
        cache.resize(5, capacity, rows=4, length=min(7, capacity))
        assert all(x.is_contiguous() for x in (*cache.keys.values(), *cache.values.values()))
        assert torch.equal(cache.keys[0][:4, :, :7], before.keys[0][:4, :, :7])
        assert not cache.keys[0][:4, :, 7:].any()
        assert torch.equal(cache.values[3][:4, :, :7], before.values[3][:4, :, :7])
        assert not cache.values[3][:4, :, 7:].any()
    assert cache.nbytes == 100 * bytes_per_token(SHAPES)  # and one spare piece of each size
    pieces = [x.data_ptr() for x in (*cache.keys.values(), *cache.values.values())]
    cache.resize(10, 10)
    assert cache.nbytes == 100 * bytes_per_token(SHAPES)
    assert pieces == [x.data_ptr() for x in (*cache.keys.values(), *cache.values.values())]
    cache.resize(10, 11)
    assert cache.room == 110 and cache.nbytes == 110 * sum(shape.bytes_per_token for shape in SHAPES.values())


class Kept:
    """Copies of ten tokens each."""

    num_tokens = 50

    def evict(self) -> bool:
        self.num_tokens -= 10
        return self.num_tokens >= 0


def test_a_copy_outlives_its_slot_and_older_ones_give_way_to_it() -> None:
    cache, before = filled(), filled()
    cache.max_tokens = 5 * 7 + 20
    cache.kept = kept = Kept()
    copy = cache.read(1, 5)
    assert copy is not None and kept.num_tokens == 10
    assert cache.read(1, 7) is not None and kept.num_tokens == 10
    cache.max_tokens = 5 * 7 + 4
    assert cache.read(1, 5) is None and kept.num_tokens == 10
    cache.max_tokens = 1000
    assert cache.grow(1, 3, 7)  # new rows are empty
    assert not cache.keys[0][1:3].any() and torch.equal(cache.keys[0][0, :, :7], before.keys[0][0])
    cache = filled()
    cache.copy(copy, [0, 4], 4)
    for slot in (0, 4):
        assert torch.equal(cache.values[3][slot, :, :4], before.values[3][1, :, :4])
        assert torch.equal(cache.values[3][slot, :, 4:], before.values[3][slot, :, 4:])
