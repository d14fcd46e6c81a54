"""The kernel that reads blocks, by its real signature and by an attention of the same contract."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.models.attention import paged_kernel
from hybridflow.models.attention.paged_kernel import kernel_problem, varlen_kernel
from hybridflow.models.attention.scores import Scores
from hybridflow.models.attention.span_layout import SpanLayout
from hybridflow.models.cache.kv_cache import CacheSlots, LayerShape, SlotCache
from hybridflow.models.cache.paged_cache import PagedCache

SHAPE = LayerShape(2, 8, 8, torch.bfloat16)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """What torch says of `varlen_attn`, a row at a time: key and value are blocks [pages, tokens, KV, D]."""
    assert block_table is not None and seqused_k is not None and cu_seq_k is not None
    assert {x.dtype for x in (cu_seq_q, cu_seq_k, seqused_k, block_table)} == {torch.int32}
    assert cu_seq_q.shape == cu_seq_k.shape == (len(seqused_k) + 1,)
    assert block_table.shape[0] == len(seqused_k)
    assert block_table.stride(-1) == 1 and key.is_contiguous() and query.dim() == 3
    assert enable_gqa == (query.shape[1] != key.shape[2])
    out = torch.empty_like(query)
    for row, used in enumerate(seqused_k.tolist()):
        first, stop = cu_seq_q[row : row + 2].tolist()
        assert used <= max_k and stop - first <= max_q and used <= cu_seq_k[row + 1] - cu_seq_k[row]
        keys, values = (
            x[block_table[row].long()].flatten(0, 1)[:used].repeat_interleave(query.shape[1] // x.shape[2], 1)
            for x in (key, value)
        )
        # the newest query sees the newest key
        places = torch.arange(used - (stop - first), used)[:, None] - torch.arange(used)
        allowed = torch.ones_like(places, dtype=torch.bool)
        for side, bound in ((places, window_size[0]), (-places, window_size[1])):
            if bound >= 0:
                allowed &= side <= bound
        raw = torch.einsum("qhd,khd->hqk", query[first:stop], keys) * (
            query.shape[-1] ** -0.5 if scale is None else scale
        )
        weights = raw.masked_fill(~allowed, -float("inf")).softmax(-1, dtype=torch.float32).to(values.dtype)
        out[first:stop] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def filled(
    lengths: list[int], block_size: int, dtype: torch.dtype, heads: int = 2
) -> tuple[PagedCache, SlotCache]:
    """The same keys and values in blocks, of which none lie side by side, and in slots."""
    shapes = {0: LayerShape(heads, 8, 8, dtype)}
    paged = PagedCache(shapes, len(lengths) + 1, 40, block_size)
    slots = SlotCache(shapes, len(lengths), max(lengths) + 3)
    for length in range(1, max(lengths) + 2):
        paged.extend([slot for slot, stop in enumerate(lengths) if length <= stop + 1], length)
    for slot, length in enumerate(lengths):
        places = CacheSlots.of_spans([slot], [0], [length])
        key, value = torch.randn(2, length, heads, 8).to(dtype).unbind()
        paged.write(0, key, value, places)
        slots.write(0, key, value, places)
    return paged, slots


@pytest.mark.parametrize(
    "scores",
    [Scores(), Scores(sliding_window=5, scaling=0.3), Scores(sliding_window=1), Scores(sliding_window=40)],
)
@pytest.mark.parametrize("heads", [2, 6])
def test_kernel_gathered_blocks_and_slots_agree(scores: Scores, heads: int) -> None:
    torch.manual_seed(0)
    lengths = [9, 1, 16, 23]
    paged, slots = filled(lengths, 8, torch.float64)
    query = torch.randn(4, heads, 1, 8, dtype=torch.float64)
    key, value = torch.randn(2, 4, 2, 1, 8, dtype=torch.float64).unbind()
    wanted = SpanLayout.decoding(slots, torch.tensor(lengths), 23).attend(query, key, value, scores)
    assert torch.allclose(
        SpanLayout.decoding(paged, torch.tensor(lengths), 23).attend(query, key, value, scores), wanted
    )
    paged.kernel = reference
    for num_keys in (None, 24):
        assert torch.allclose(
            SpanLayout.decoding(paged, torch.tensor(lengths), 23, num_keys).attend(query, key, value, scores),
            wanted,
        )


def test_blocks_that_only_wiped_slots_share_are_wiped_too() -> None:
    cache = PagedCache({0: LayerShape(1, 2, 2, torch.float32)}, 4, 9, 4)
    cache.extend([0], 6)
    cache.copy(0, [1, 2], 4)  # the first block is that of three slots
    for stored in (cache.keys[0], cache.values[0]):
        stored.fill_(float("nan"))
    shared = cache.blocks[0][0]
    assert cache.blocks[1] == cache.blocks[2] == [shared]
    cache.wipe([0, 1])
    assert not cache.keys[0][[0, cache.blocks[0][1]]].any(), "slot 2 has it, too"
    assert cache.keys[0][shared].isnan().all(), "slot 2 has it, too"
    cache.wipe([0, 1, 2])
    assert not cache.keys[0][shared].any() and not cache.values[0][shared].any()


def test_what_the_kernel_does_not_know_is_gathered() -> None:
    torch.manual_seed(0)
    paged, slots = filled([9, 3], 4, torch.float64)

    def never(*args: Any, **settings: Any) -> Tensor:
        raise AssertionError("the kernel was called")

    paged.kernel = never
    query, key = torch.randn(2, 4, 1, 8, dtype=torch.float64), torch.randn(2, 2, 1, 8, dtype=torch.float64)
    for scores in (Scores(softcap=2.0), Scores(sinks=torch.randn(4), sliding_window=3)):
        wanted = SpanLayout.decoding(slots, torch.tensor([9, 3]), 9).attend(query, key, key, scores)
        assert torch.allclose(
            SpanLayout.decoding(paged, torch.tensor([9, 3]), 9).attend(query, key, key, scores), wanted
        )


@pytest.mark.skipif(varlen_kernel() is None, reason="this torch has no attention that reads blocks")
def test_torchs_own_kernel_takes_the_call() -> None:
    kernel = varlen_kernel()
    assert kernel is not None
    paged, _ = filled([9, 3, 12], 4, torch.bfloat16)
    calls = []

    def on_no_device(*args: Any, **settings: Any) -> Tensor:
        inspect.signature(kernel).bind(*args, **settings)
        meta = [x.to("meta") if isinstance(x, Tensor) else x for x in args]
        out = kernel(
            *meta, **{name: x.to("meta") if isinstance(x, Tensor) else x for name, x in settings.items()}
        )
        calls.append(out.shape)
        return reference(*args, **settings)

    paged.kernel = on_no_device
    query, key = torch.randn(3, 4, 1, 8).bfloat16(), torch.randn(3, 2, 1, 8).bfloat16()
    for scores in (Scores(), Scores(sliding_window=4)):
        assert SpanLayout.decoding(paged, torch.tensor([9, 3, 12]), 12).attend(
            query, key, key, scores
        ).shape == (
            3,
            1,
            4,
            8,
        )
    assert calls == [(3, 4, 8)] * 2


def test_a_kernel_is_used_where_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, plain, windowed = torch.device("cpu"), {0: Scores()}, {0: Scores(sliding_window=5000)}
    monkeypatch.setattr(paged_kernel, "varlen_kernel", lambda: reference)
    for dtype in (torch.bfloat16, torch.float16):
        for scores in (plain, windowed):
            assert kernel_problem({0: LayerShape(2, 8, 8, dtype)}, scores, cpu) is None

    def without_window(*args: Any, **settings: Any) -> Tensor:
        return reference(*args, **{**settings, "window_size": (-1, -1)})

    def failing(*args: Any, **settings: Any) -> Tensor:
        raise RuntimeError("no such thing\nhere")

    monkeypatch.setattr(paged_kernel, "varlen_kernel", lambda: without_window)
    assert kernel_problem({0: SHAPE}, plain, cpu) is None
    assert "differs" in (kernel_problem({0: SHAPE}, windowed, cpu) or "")
    monkeypatch.setattr(paged_kernel, "varlen_kernel", lambda: failing)
    assert "no such thing here" in (kernel_problem({0: SHAPE}, plain, cpu) or "")
    monkeypatch.setattr(paged_kernel, "varlen_kernel", lambda: None)
    assert "torch>=2.13" in (kernel_problem({0: SHAPE}, plain, cpu) or "")


@pytest.mark.parametrize(
    ("shape", "scores", "block_size", "told"),
    [
        (LayerShape(2, 8, 8, torch.float32), Scores(), 256, "float32"),
        (LayerShape(2, 16, 8, torch.bfloat16), Scores(), 256, "heads of 16 and 8"),
        (LayerShape(2, 512, 512, torch.bfloat16), Scores(), 256, "at most 256"),
        (SHAPE, Scores(softcap=30.0), 256, "caps its scores"),
        (SHAPE, Scores(sinks=torch.zeros(2)), 256, "sinks"),
        (SHAPE, Scores(), 16, "multiple of 256"),
    ],
)
def test_what_no_kernel_can_do(
    shape: LayerShape, scores: Scores, block_size: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_kernel, "varlen_kernel", lambda: reference)
    assert told in (kernel_problem({0: shape}, {0: scores}, torch.device("cpu"), block_size) or "")
