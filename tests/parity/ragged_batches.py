"""Random ragged batches that hold every awkward row at once, with junk wherever the mask is false."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SEEDS = (0, 1, 2, 3)


def each_seed(test: Callable[..., None]) -> Callable[..., None]:
    """Give a test each of SEEDS as `seed` in turn; as tests of their own they would take twice as long."""

    @functools.wraps(test)
    def with_each(**arguments: Any) -> None:
        for seed in SEEDS:
            try:
                test(seed=seed, **arguments)
            except Exception as error:
                error.add_note(f"with seed={seed}")
                raise

    signature = inspect.signature(test)
    others = [parameter for name, parameter in signature.parameters.items() if name != "seed"]
    with_each.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
    return with_each


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
