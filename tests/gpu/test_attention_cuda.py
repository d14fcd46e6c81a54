"""Attention on a CUDA device: every fast kernel gives what plain attention gives in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hybridflow.models.attention.layouts import PackedLayout, attend_allowed, kernel_of
from hybridflow.models.attention.scores import Scores, causal_mask, masked_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
FAST = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 50])
def test_grouped_heads_are_never_computed_by_plain_products(dtype: torch.dtype, window: int | None) -> None:
    length = 300
    draw = torch.Generator("cuda").manual_seed(0)
    states = [
        torch.randn(1, heads, length, 64, generator=draw, device="cuda", dtype=torch.float64)
        for heads in (8, 2, 2)
    ]
    query, key, value = (x.to(dtype).requires_grad_() for x in states)
    how = Scores(sliding_window=window)
    behind = torch.arange(length, device="cuda")[:, None] - torch.arange(length, device="cuda")
    allowed = (behind >= 0) & (behind < (window or length))
    wanted = masked_attention(*(x.detach().double() for x in (query, key, value)), allowed, Scores())
    with sdpa_kernel(FAST):  # an error where none of them fits
        packed = PackedLayout.build([length], "cuda").attend(query, key, value, how).transpose(1, 2)
        masked = attend_allowed(query, key, value, allowed, how)
        (packed.float().square().sum() + masked.float().square().sum()).backward()
    for found in (packed, masked):
        torch.testing.assert_close(found.double(), wanted, atol=3e-2, rtol=3e-2)
    assert kernel_of(query, key, value, how) != "written out" and query.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("softcap, with_sinks", [(30.0, False), (None, True)])
def test_caps_and_sinks_take_flex_attention(
    softcap: float | None, with_sinks: bool, window: int | None, dtype: torch.dtype
) -> None:
    """Forward and backward, rows of several lengths, in memory that does not grow with their square."""
    lengths = [300, 4_000, 20]
    draw = torch.Generator("cuda").manual_seed(0)
    given = [
        torch.randn(1, heads, sum(lengths), 64, generator=draw, device="cuda").to(dtype).requires_grad_()
        for heads in (8, 2, 2)
    ]
    sinks = torch.randn(8, generator=draw, device="cuda").requires_grad_() if with_sinks else None
    how = Scores(sliding_window=window, softcap=softcap, sinks=sinks)
    assert kernel_of(*given, how) == "flex"
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = PackedLayout.build(lengths, "cuda").attend(given[0], given[1], given[2], how).transpose(1, 2)
    found.float().square().sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 8 * 4_000**2, "scores of the longest row were written"
    for row, states in enumerate(zip(*(x.detach().split(lengths, dim=2) for x in given), strict=True)):
        wanted = masked_attention(
            *(x.double() for x in states),
            causal_mask(lengths[row], how.window(lengths[row]), states[0].device),
            how,
        )
        mine = found.split(lengths, dim=2)[row]
        torch.testing.assert_close(mine.double(), wanted, atol=3e-2, rtol=3e-2)
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in given)
