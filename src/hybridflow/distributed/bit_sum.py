"""A number for what is in a tensor, to the bit: of a box of it, so that the numbers of disjoint boxes add up
to that of the whole.

    sum over elements of (its bits as an integer) · Π over dims d of odd(d, its index there)      mod 2^64

A flipped bit changes a term by ±2^k times an odd number, which is never 0. The factors know the place, so a
box that arrived somewhere else is seen too, which a plain sum of bits would miss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.distributed.boxes import Box

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 18
"""Elements that are widened to 64 bits at a time: few enough to stay in the CPU's cache."""
_CUDA_CHUNKS = 16
"""As many such at a time on CUDA, where each costs a few launches."""


@torch.no_grad()
def bit_sum(part: Tensor, box: Box) -> Tensor:
    """The number, 0-d int64, of a tensor that holds `box` of a parameter."""
    assert tuple(part.shape) == box.shape, f"a tensor {tuple(part.shape)} is no box {box.shape}"
    bits = part.contiguous().view(_BITS[part.element_size()])
    factors = [_odd(dim, box.start[dim], box.stop[dim], part.device) for dim in range(part.dim())]
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    if not part.numel():
        return total
    if part.dim() < 2:
        bits, factors = bits.reshape(1, -1), [torch.ones(1, dtype=torch.int64, device=part.device), *factors]
    rows = max(1, _CHUNK * (_CUDA_CHUNKS if part.is_cuda else 1) // max(1, bits[0].numel()))
    for first in range(0, bits.shape[0], rows):
        value = bits[first : first + rows].to(torch.int64, copy=True)
        for factor in reversed(factors[1:]):
            value = value.mul_(factor).sum(-1)
        total += (value * factors[0][first : first + rows]).sum()
    return total


def _odd(dim: int, start: int, stop: int, device: torch.device) -> Tensor:
    """A factor for each index of a dim [stop - start] int64; products of int64 wrap around."""
    index = torch.arange(start + 1, stop + 1, dtype=torch.int64, device=device) * (2654435761 + 2 * dim)
    return ((index ^ (index >> 15)) * 0x2545F4914F6CDD1D) | 1
