"""Statistics of the tokens that a mask [B, R] bool leaves in; values outside the mask, NaN included, have no
effect.

None of them fails on an empty mask or on a single token.
"""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32 if it has half precision or integers; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


def zero_outside(x: Tensor, mask: Tensor) -> Tensor:
    """Return x [B, R] in float32 or better with 0 where the mask is false.

    No gradient flows there, not even a NaN.
    """
    return torch.where(mask.bool(), at_least_float32(x), 0.0)


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the sum over the tokens of the mask, of all tokens or along `dim`."""
    kept = zero_outside(x, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean over the tokens of the mask, 0 where there are none."""
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Return the Bessel-corrected variance over the tokens of the mask, 0 for fewer than two of them."""
    centred = at_least_float32(x) - masked_mean(x, mask)
    return masked_sum(centred.square(), mask) / (mask.bool().sum() - 1).clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x − mean)·rsqrt(var + 1e-8) over the tokens of the mask, 0 elsewhere; a single token becomes 0.

    Mean and variance are taken in float64: rsqrt(1e-8) = 1e4 would blow up the rounding of equal values.
    """
    exact = zero_outside(x, mask).double()
    whitened = (exact - masked_mean(exact, mask)) * torch.rsqrt(masked_var(exact, mask) + 1e-8)
    return zero_outside(whitened, mask).to(at_least_float32(x).dtype)
