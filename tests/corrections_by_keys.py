"""Rollout correction by thresholds and rules as users write them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hybridflow.algorithms import rollout_correction as maths
from hybridflow.algorithms.aggregation import Ratio
from hybridflow.config.thresholds import parse_is_threshold, parse_rejection


def rollout_weights(*rows: Tensor, threshold: float | str, **how: Any) -> Tensor:
    """The weights by a threshold."""
    return maths.rollout_weights(*rows, bounds=parse_is_threshold(threshold), **how)


def rejection(*rows: Tensor, options: str, thresholds: float | str | None) -> Tensor:
    """The tokens that stay by rules."""
    return maths.rejection(*rows, parse_rejection(options, thresholds))


def correction_metrics(*rows: Tensor, threshold: float | str = 2.0, **how: Any) -> dict[str, Ratio | float]:
    """The metrics by a threshold."""
    return maths.correction_metrics(*rows, bounds=parse_is_threshold(threshold), **how)
