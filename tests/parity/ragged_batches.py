"""Random ragged batches that hold every awkward row at once, with junk wherever the mask is false."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SEEDS = (0, 1, 2, 3)


@dataclass(frozen=True)
class Ragged:
    """All [B, R] float64 but for `mask` [B, R] bool and `groups` [B] int64."""

    mask: Tensor
    log_prob: Tensor
    old_log_prob: Tensor
    ref_log_prob: Tensor
    advantages: Tensor
    weights: Tensor
    rewards: Tensor
    values: Tensor
    old_values: Tensor
    returns: Tensor
    groups: Tensor


def ragged(seed: int, rows: int = 7, width: int = 6, *, junk: bool = True) -> Ragged:
    """Rows with holes in the middle, row 0 empty, row 1 with one token, groups of several sizes, extreme
    log-ratios.
    """
    g = torch.Generator().manual_seed(seed)

    def randn(scale: float = 1.0) -> Tensor:
        return torch.randn(rows, width, generator=g, dtype=torch.float64) * scale

    mask = torch.rand(rows, width, generator=g) < 0.7
    mask[0] = False
    mask[1] = False
    mask[1, 2] = True
    mask[2] = torch.tensor([True, True, False, False, True, True])[:width]
    old = -randn().abs()
    ratio = randn(0.3)
    # beyond the clamp on both sides, and beyond the dual clip
    ratio[2, 0], ratio[2, 1], ratio[2, 4] = 45.0, -45.0, 2.0
    tensors = {
        "log_prob": old + ratio,
        "old_log_prob": old,
        "ref_log_prob": old + randn(0.5),
        "advantages": randn(),
        "weights": randn().abs(),
        "rewards": randn(),
        "values": randn(),
        "old_values": randn(),
        "returns": randn(),
    }
    tensors["advantages"][2] = -tensors["advantages"][2].abs() - 0.1
    if junk:
        kinds = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -3.0], dtype=torch.float64)
        for tensor in tensors.values():
            tensor[~mask] = kinds[torch.randint(5, (int((~mask).sum()),), generator=g)]
    groups = torch.randint(0, 3, (rows,), generator=g) * 100 - 7  # ids need not start at 0 nor be dense
    return Ragged(mask=mask, groups=groups, **tensors)
