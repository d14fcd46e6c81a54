"""Identity preference optimisation (IPO, 2310.12036)."""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.masked import at_least_float32
from hybridflow.errors import ConfigError


def ipo(chosen_log_ratio: Tensor, rejected_log_ratio: Tensor, *, beta: float) -> Tensor:
    """The loss of each pair, [K] float: (Δ_chosen − Δ_rejected − 1/(2·β))².

    chosen_log_ratio, rejected_log_ratio [K] float, nats: Δ = Σ_t (logπ − logπ_ref) over a response's tokens.
    β: `beta`, the paper's τ: where DPO pushes a pair apart for ever, IPO aims at a distance (2310.12036,
    equation 17). Others hand in means over tokens instead of sums; the paper's Δ is that of whole responses.
    Raises ConfigError for a beta that is not above 0.

    Left out: nothing.
    """
    if not beta > 0:
        raise ConfigError(f"IPO got beta {beta}: set it above 0, 0.1 for example")
    difference = at_least_float32(chosen_log_ratio) - at_least_float32(rejected_log_ratio)
    return (difference - 1.0 / (2.0 * beta)).square()
