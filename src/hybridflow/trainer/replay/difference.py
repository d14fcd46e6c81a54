"""One difference between two runs, and equality to the bit of tensors and plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

MISSING = "(missing)"


@dataclass(frozen=True)
class Difference:
    """A quantity that two runs have different values of."""

    kind: str
    """The kind of quantity: config, row, prompt, token, log-prob, reward, advantage, metric, weight, …"""
    name: str
    """The key, column, metric or tensor."""
    first: Any
    """Its value in the first run."""
    second: Any
    step: int | None = None
    """Step, from 1; None for what belongs to the whole run."""
    row: int | None = None
    """Row of the step's batch, from 0."""
    position: int | tuple[int, ...] | None = None
    """Token of the prompt or of the response, or index in a weight, from 0."""
    row_id: int | None = None

    def where(self) -> str:
        """Return the place in words."""
        words = []
        if self.step is not None:
            words.append(f"step {self.step}")
        if self.row is not None:
            named = f" (row_id {self.row_id})" if self.row_id is not None else ""
            words.append(f"row {self.row}{named}")
        if self.position is not None:
            words.append(f"position {self.position}")
        return ", ".join(words)


def unequal(first: Tensor, second: Tensor) -> Tensor:
    """Return where two tensors of one shape and dtype have other bits, as bool; a NaN equals a NaN."""
    if not first.dtype.is_floating_point:
        return first != second
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    other_bits = first.contiguous().view(width) != second.contiguous().view(width)
    return other_bits & ~(first.isnan() & second.isnan())


def first_place(first: Tensor, second: Tensor) -> tuple[int, ...] | None:
    """Return the first index at which two tensors of one shape and dtype differ, or None."""
    differs = unequal(first, second)
    if not bool(differs.any()):
        return None
    flat = int(differs.reshape(-1).to(torch.uint8).argmax())
    return tuple(map(int, np.unravel_index(flat, first.shape)))


def first_unequal(first: Any, second: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Return the path and both values of the first entry in which two nested values differ, or None."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.shape != second.shape or first.dtype != second.dtype:
            return name, _shape(first), _shape(second)
        place = first_place(first, second)
        if place is None:
            return None
        return f"{name}{list(place)}", first[place].item(), second[place].item()
    if type(first) is not type(second):
        return name, first, second
    if isinstance(first, (Mapping, list, tuple)):
        for key, one, other in _pairs(first, second):
            found = first_unequal(one, other, f"{name}/{key}".lstrip("/"))
            if found is not None:
                return found
        return None
    # repr tells 0.0 from -0.0, and a NaN equals a NaN
    return None if repr(first) == repr(second) else (name, first, second)


def _pairs(first: Any, second: Any) -> Iterator[tuple[Any, Any, Any]]:
    if isinstance(first, Mapping):
        for key in [*first, *(key for key in second if key not in first)]:
            yield key, first.get(key, MISSING), second.get(key, MISSING)
        return
    for index in range(max(len(first), len(second))):
        one = first[index] if index < len(first) else MISSING
        other = second[index] if index < len(second) else MISSING
        yield index, one, other


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
