"""KL divergence from the reference: estimates from log-probs, and the coefficient's controllers.

Estimators are from John Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hybridflow.algorithms.aggregation import at_least_float32, zero_outside
from hybridflow.algorithms.catalog import KL_ESTIMATORS
from hybridflow.errors import ConfigError

logger = logging.getLogger(__name__)
_LARGEST_K3 = 10.0
"""Nats at which k3 is clamped: from 2.61 nats of y − x on, or 11.0 of x − y, its gradient is 0."""


def kl_estimate(log_prob: Tensor, ref_log_prob: Tensor, kind: str, mask: Tensor | None = None) -> Tensor:
    """An estimate of KL(π ‖ π_ref) at each sampled token, [B, R] float, nats.

    `kind` is a name of `catalog.KL_ESTIMATORS`, whose formulas are of x = log_prob and y = ref_log_prob,
    [B, R] float, nats. A name that ends in `+` has that estimator's value and the gradient of k2, which is
    the gradient of the KL in expectation. With a mask [B, R] bool the result is 0 outside it, whatever stands
    there. Raises ConfigError for another kind.
    """
    base = kind.removesuffix("+")
    if base not in KL_ESTIMATORS:
        raise ConfigError(
            f"unknown KL estimator {kind!r}: choose from {', '.join(KL_ESTIMATORS)}, with + for the gradient "
            "of k2"
        )
    x = at_least_float32(log_prob)
    y = at_least_float32(ref_log_prob)
    if mask is not None:
        x = zero_outside(x, mask)
        y = zero_outside(y, mask)
    value = _estimate(x, y, base)
    if kind == base:
        return value
    k2 = _estimate(x, y, "k2")
    return value.detach() + (k2 - k2.detach())


def _estimate(x: Tensor, y: Tensor, kind: str) -> Tensor:
    if kind in ("kl", "k1"):
        return x - y
    if kind == "abs":
        return (x - y).abs()
    if kind in ("mse", "k2"):
        return 0.5 * (x - y).square()
    d = (y - x).clamp(-20.0, 20.0)
    return (d.expm1() - d).clamp(-_LARGEST_K3, _LARGEST_K3)


def clamped_tokens(estimate: Tensor, kind: str) -> Tensor | None:
    """Return [B, R] bool, true where the clamp of k3 decides an estimate [B, R] float of this kind.

    None where no token can lose its gradient so: other kinds have no clamp, and `k3+` has the gradient of k2.
    """
    if kind not in ("low_var_kl", "k3"):
        return None
    return estimate.detach() >= _LARGEST_K3


class FixedKLController:
    """A constant coefficient. On resume the configured one holds, so that it can be changed between runs."""

    def __init__(self, value: float) -> None:
        self.value = value

    def update(self, current_kl: float, num_rows: int) -> None:
        """Do nothing: the coefficient is constant."""

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient, for the record."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the configured coefficient, and log a warning where the checkpoint had another."""
        if state["value"] != self.value:
            logger.warning(
                "the checkpoint's KL coefficient is %s; going on with the configured %s",
                state["value"],
                self.value,
            )


class AdaptiveKLController:
    """β ← β·(1 + clip(kl/target − 1, ±0.2)·rows/horizon).

    β is a coefficient that steers the KL to `target` (Ziegler et al., 1909.08593). It is part of the
    checkpoint.
    """

    def __init__(self, value: float, target: float = 0.1, horizon: int = 10_000) -> None:
        if target <= 0 or horizon < 1:
            raise ConfigError(
                "the adaptive KL controller needs target_kl above 0 and horizon of at least 1, got "
                f"{target} and {horizon}"
            )
        self.value = value
        self.target = target
        self.horizon = horizon

    def update(self, current_kl: float, num_rows: int) -> None:
        """Move the coefficient, after it was used.

        `current_kl` is the mean over rows of the token mean, in nats; `num_rows` is the number of rows of the
        batch.
        """
        if not math.isfinite(current_kl):
            logger.warning("KL to the reference is %s: the coefficient stays at %s", current_kl, self.value)
            return
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * num_rows / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the checkpoint's coefficient."""
        self.value = float(state["value"])
