"""The random numbers that decide tokens: one for each (seed, place in the response), in any batch."""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch holds."""
    return value - (1 << 64) if value >= 1 << 63 else value


# splitmix64: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (2014)
_STEP = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _mix(bits: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64 [B]; products wrap around."""
    bits = (bits ^ _shift(bits, 30)) * _FIRST
    bits = (bits ^ _shift(bits, 27)) * _SECOND
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros (torch's own keeps the sign)."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def stream_keys(seeds: Tensor) -> Tensor:
    """Starts of the streams of seeds [B] int64 -> [B] int64, mixed: neighbouring seeds share nothing."""
    return _mix(seeds + _STEP)


def uniforms(keys: Tensor, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """One number in [0, 1) for each (key, position), both [B] int64: 24 random bits in float32, 53 in
    float64, never rounded to 1.
    """
    bits = _mix(keys + positions * _STEP)
    kept = 53 if dtype == torch.float64 else 24
    return _shift(bits, 64 - kept).to(dtype) * 2.0**-kept
