"""The number of a tensor: additive over boxes, changed by any flipped bit and by any box in another place."""

from __future__ import annotations

import pytest
import torch

from hybridflow.distributed import shards as module
from hybridflow.distributed.shards import Box, bit_sum
from hybridflow.weight_sync.holding import explain_difference, first_difference


def number(tensor: torch.Tensor) -> int:
    return int(bit_sum(tensor, Box.whole(tensor.shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(9,), (7, 5), (3, 4, 5), ()])
def test_boxes_add_up(dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(shape).to(dtype)
    whole = Box.whole(shape)
    for dim in range(len(shape)):
        parts = [whole.cut(dim, part, 3) for part in range(3)]
        total = sum(bit_sum(tensor[part.within(whole)], part) for part in parts)
        assert int(total) == number(tensor)
    before = number(tensor)
    monkeypatch.setattr(module, "_CHUNK", 8)
    assert number(tensor) == before, "however many rows are taken at a time"


def test_each_bit_counts() -> None:
    tensor = torch.randn(4, 3)
    before, bits = number(tensor), tensor.view(torch.int32)
    for bit in range(32):
        bits[2, 1] ^= torch.tensor(1, dtype=torch.int32) << bit
        assert number(tensor) != before
        bits[2, 1] ^= torch.tensor(1, dtype=torch.int32) << bit
    assert number(tensor) == before
    assert number(torch.tensor([0.0])) != number(torch.tensor([-0.0]))


def test_places_count() -> None:
    tensor = torch.arange(12.0).view(4, 3)
    for other in (tensor.flip(0), tensor.flip(1), tensor[[1, 0, 2, 3]], tensor.T.reshape(4, 3)):
        assert number(other.contiguous()) != number(tensor)


def test_the_first_difference_is_named() -> None:
    sent, arrived = torch.tensor([4, -5, 6, 7]), torch.tensor([4, -6, 6, 8])
    assert first_difference(sent, arrived) == 1 and first_difference(sent, sent) == 4
    text = explain_difference("hf.x.weight", sent[1], arrived[1], version=3)
    assert "hf.x.weight" in text
    assert "version 3" in text
    assert f"{2**64 - 5:016x}" in text
    assert f"{2**64 - 6:016x}" in text
    assert "another rank" in explain_difference("hf.x.weight", sent[0], arrived[0], version=3)
