"""Attention on a CUDA device: every fast kernel gives what plain attention gives in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hybridflow.models.attention import PackedLayout, Scores, attend_allowed, kernel_of, masked_attention

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
