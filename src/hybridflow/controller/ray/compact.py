"""Columns of rows in fewer bytes: runs of equal values once with their lengths, integers in a narrower type.

    column ──compact──► a function and its small arguments, which travel ──► the same column, to the bit

Masks, versions and scores of outcomes have a few runs in a row, and token ids fit into fewer bytes than the 8
of int64. Bit patterns are compared, so NaN and -0.0 stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

Short = tuple[Callable[..., Tensor], tuple[Any, ...]]
"""A function of this module and arguments that make the column again."""

SMALLER = 4
"""Runs are taken where they need this many times fewer bytes than the column."""
LENGTH = torch.int32
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers whose bits stand for the values of a dtype, by the dtype's size."""
NARROW = (torch.uint8, torch.int16, torch.int32)
PROBES = 128
"""Neighbours that are compared before all are: a column of unlike values costs microseconds."""


def compact(flat: Tensor, shape: tuple[int, ...]) -> Short | None:
    """Return a shorter form of a column [B, ...], or None where there is none that is much shorter.

    `flat` are all of its values in order, on the CPU.
    """
    size = flat.element_size()
    if size not in BITS or not 2 <= flat.numel() <= torch.iinfo(LENGTH).max:
        return None
    bits = flat.view(BITS[size])
    most = flat.numel() * size // (SMALLER * (size + LENGTH.itemsize))
    # an odd step comes upon all places of a row where rows are as long as a power of 2
    step = len(bits) // PROBES | 1
    probes = bits.numpy()
    probed = probes[:-1:step] != probes[1::step]
    if np.count_nonzero(probed) * len(bits) <= 2 * most * len(probed):  # twice, because a sample may lie
        last = torch.cat([(bits[1:] != bits[:-1]).nonzero()[:, 0], torch.tensor([len(bits) - 1])])
        if len(last) <= most:
            lengths = last.diff(prepend=torch.tensor([-1])).to(LENGTH)
            return repeated, (bits[last], lengths, flat.dtype, shape)
    if flat.dtype == torch.int64:
        lowest, highest = (int(end) for end in flat.aminmax())
        for narrow in NARROW:
            if torch.iinfo(narrow).min <= lowest and highest <= torch.iinfo(narrow).max:
                return widened, (flat.to(narrow), flat.dtype, shape)
    return None


def repeated(values: Tensor, lengths: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return each value as often as its length says."""
    return values.repeat_interleave(lengths).view(dtype).reshape(shape)


def widened(values: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the values in their own type."""
    return values.to(dtype).reshape(shape)
