"""A checksum of a tensor's bits. Checksums of disjoint boxes of a tensor add up to the checksum of the whole.

    sum over elements of (its bits as an integer) · Π over dims d of odd(d, its index there)      mod 2^64

A flipped bit changes a term by ±2^k times an odd number, which is never 0. The factors depend on the place,
so a box that arrived in the wrong place is found too, which a plain sum of bits would miss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.distributed.accelerators import is_accelerator
from hybridflow.distributed.boxes import Box

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 18
"""Elements that are widened to 64 bits at a time: few enough to stay in the CPU's cache."""
_ACCELERATOR_CHUNKS = 16
"""Chunks that are taken together on an accelerator, where each pass costs a few kernel launches."""


@torch.no_grad()
def bit_sum(part: Tensor, box: Box) -> Tensor:
    """Return the checksum, 0-d int64, of a tensor that holds `box` of a parameter."""
    assert tuple(part.shape) == box.shape, f"a tensor {tuple(part.shape)} is no box {box.shape}"
    bits = part.contiguous().view(_BITS[part.element_size()])
    factors = [_odd(dim, box.start[dim], box.stop[dim], part.device) for dim in range(part.dim())]
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    if not part.numel():
        return total
    if part.dim() < 2:
        bits = bits.reshape(1, -1)
        factors = [torch.ones(1, dtype=torch.int64, device=part.device), *factors]
    chunk = _CHUNK
    if is_accelerator(part.device.type):
        chunk *= _ACCELERATOR_CHUNKS
    rows = max(1, chunk // max(1, bits[0].numel()))
    for first in range(0, bits.shape[0], rows):
        value = bits[first : first + rows].to(torch.int64, copy=True)
        for factor in reversed(factors[1:]):
            value = value.mul_(factor).sum(-1)
        total += (value * factors[0][first : first + rows]).sum()
    return total


def bit_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Return the checksums of whole tensors of one device, [len(tensors)] int64 on that device."""
    return torch.stack([bit_sum(tensor, Box.whole(tensor.shape)) for tensor in tensors])


def _odd(dim: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Return an odd factor for each index of a dimension, [stop - start] int64; products wrap around."""
    index = torch.arange(start + 1, stop + 1, dtype=torch.int64, device=device) * (2654435761 + 2 * dim)
    return ((index ^ (index >> 15)) * 0x2545F4914F6CDD1D) | 1
