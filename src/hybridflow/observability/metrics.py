"""The metrics of a step, each with its reduction.

    micro-batches, mini-batches, ranks ──add_*/update──► Metrics ──to_floats──► {name: float} for the trackers

Tensors stay tensors (float64, detached, 0-d) until `to_floats` reads each device once: adding never waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor

Scalar: TypeAlias = "float | Tensor"
Kind = Literal["mean", "sum", "max", "min", "last"]


@dataclass(frozen=True)
class Metric:
    """One metric: how it reduces, its value so far, and for a mean the denominator."""

    kind: Kind
    value: Scalar
    denominator: Scalar = 1.0

    def join(self, other: Metric) -> Metric:
        """This metric and a later part of the same one."""
        if self.kind == "mean":
            return Metric("mean", self.value + other.value, self.denominator + other.denominator)
        if self.kind == "sum":
            return Metric("sum", self.value + other.value)
        if self.kind == "last":
            return other
        return Metric(self.kind, _extreme(self.kind, self.value, other.value))


class Metrics:
    """Metrics by name, each with its own reduction: merged parts give what one pass would have given.

    Example: two micro-batches with 3 of 10 and 1 of 30 tokens clipped::

        metrics.add_mean("actor/pg_clipfrac", 3, 10)
        metrics.add_mean("actor/pg_clipfrac", 1, 30)
        metrics.to_floats()  # {"actor/pg_clipfrac": 0.1}, not the mean of the two fractions
    """

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def add_mean(self, name: str, numerator: Scalar, denominator: Scalar = 1.0) -> None:
        """Add `numerator` over `denominator` counted items; the result is Σ numerators / Σ denominators."""
        self._add(name, Metric("mean", _scalar(numerator), _scalar(denominator)))

    def add_sum(self, name: str, value: Scalar) -> None:
        """Add to a total."""
        self._add(name, Metric("sum", _scalar(value)))

    def add_max(self, name: str, value: Scalar) -> None:
        """Keep the largest; a NaN wins over every number."""
        self._add(name, Metric("max", _scalar(value)))

    def add_min(self, name: str, value: Scalar) -> None:
        """Keep the smallest; a NaN wins over every number."""
        self._add(name, Metric("min", _scalar(value)))

    def add_last(self, name: str, value: Scalar) -> None:
        """Keep the newest value of a setting, such as the learning rate, a coefficient or the epoch."""
        self._add(name, Metric("last", _scalar(value)))

    def update(self, other: Metrics | Mapping[str, Scalar]) -> None:
        """Join another part into this one, metric by metric; a plain mapping is taken as newest values."""
        if isinstance(other, Metrics):
            for name, metric in other._metrics.items():
                self._add(name, metric)
        else:
            for name, value in other.items():
                self.add_last(name, value)

    @classmethod
    def merge(cls, parts: Iterable[Metrics]) -> Metrics:
        """All parts joined in their order, into a new object."""
        merged = cls()
        for part in parts:
            merged.update(part)
        return merged

    def state_dict(self) -> dict[str, tuple[str, float, float]]:
        """Return kind, value and denominator of each metric, as plain data."""
        parts = [part for metric in self._metrics.values() for part in (metric.value, metric.denominator)]
        values = _read(parts)
        kinds = [metric.kind for metric in self._metrics.values()]
        return dict(zip(self._metrics, zip(kinds, values[0::2], values[1::2])))

    @classmethod
    def from_state(cls, state: Mapping[str, tuple[Kind, float, float]]) -> Metrics:
        """Return the metrics from a `state_dict`."""
        metrics = cls()
        metrics._metrics = {name: Metric(*parts) for name, parts in state.items()}
        return metrics

    def average_sums(self, names: Iterable[str]) -> None:
        """Close a mini-batch: each of these sums becomes one observation of a mean over mini-batches."""
        for name in names:
            if name in self._metrics:
                assert self._metrics[name].kind == "sum", (
                    f"metric {name!r} is a {self._metrics[name].kind}, not a sum"
                )
                self._metrics[name] = Metric("mean", self._metrics[name].value, 1.0)

    def to_floats(self) -> dict[str, float]:
        """Reduced values in the order of first adding, without means over nothing (0 of 0); NaN stays."""
        values = _read(
            [part for metric in self._metrics.values() for part in (metric.value, metric.denominator)]
        )
        reduced: dict[str, float] = {}
        for (name, metric), value, denominator in zip(self._metrics.items(), values[0::2], values[1::2]):
            if metric.kind != "mean":
                reduced[name] = value
            elif denominator != 0:
                reduced[name] = value / denominator
            elif value != 0:  # also where the numerator is NaN: something went wrong and must be seen
                reduced[name] = math.nan
        return reduced

    def _add(self, name: str, metric: Metric) -> None:
        held = self._metrics.get(name)
        if held is not None:
            assert held.kind == metric.kind, (
                f"metric {name!r} was a {held.kind} and is now added as a {metric.kind}"
            )
        self._metrics[name] = metric if held is None else held.join(metric)

    def __contains__(self, name: object) -> bool:
        return name in self._metrics


def _is_tensor(value: Scalar) -> TypeGuard[Tensor]:
    """Return whether this is a tensor, without importing torch."""
    return hasattr(value, "detach")


def _scalar(value: Scalar) -> Scalar:
    """A float, or a detached 0-d float64 copy, which later changes of the caller's tensor do not reach."""
    if not _is_tensor(value):
        return float(value)
    import torch

    assert value.numel() == 1, (
        f"a metric is one number, got a tensor of shape {tuple(value.shape)}: reduce it first"
    )
    return value.detach().reshape(()).to(torch.float64, copy=True)


def _extreme(kind: Kind, first: Scalar, second: Scalar) -> Scalar:
    if _is_tensor(first) or _is_tensor(second):
        import torch

        device = next(value.device for value in (first, second) if _is_tensor(value))
        pick = torch.maximum if kind == "max" else torch.minimum  # both let a NaN through
        return pick(
            *(torch.as_tensor(value, dtype=torch.float64, device=device) for value in (first, second))
        )
    if math.isnan(first) or math.isnan(second):
        return math.nan
    return max(first, second) if kind == "max" else min(first, second)


def _read(values: list[Scalar]) -> list[float]:
    """Return the values as floats; the tensors of a device come over in one copy."""
    by_device: dict[object, dict[int, Tensor]] = {}
    floats: list[float] = []
    for index, value in enumerate(values):
        if _is_tensor(value):
            by_device.setdefault(value.device, {})[index] = value
            floats.append(math.nan)
        else:
            floats.append(float(value))
    if by_device:
        import torch

        for tensors in by_device.values():
            for index, number in zip(tensors, torch.stack(list(tensors.values())).tolist()):
                floats[index] = number
    return floats
