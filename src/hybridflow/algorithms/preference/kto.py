"""Kahneman–Tversky optimisation (KTO, 2402.01306): labels of single responses instead of pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.masked import at_least_float32
from hybridflow.errors import ConfigError


def kto(
    log_ratio: Tensor,
    desirable: Tensor,
    reference_point: Tensor | float,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """The loss of each response, [K] float: λ_D·(1 − σ(β·(Δ − z))) where it is desirable, λ_U·(1 − σ(β·(z −
    Δ))) where it is not.

    log_ratio [K] float, nats: Δ = Σ_t (logπ − logπ_ref) over a response's tokens; desirable [K] bool;
    reference_point 0-d: z, from `kto_reference_point`, handed in so that it is the same in every micro-batch.
    λ_D, λ_U: `desirable_weight`, `undesirable_weight`; the paper keeps λ_D·(number desirable) between 1 and
    4/3 of λ_U·(number undesirable). β: `beta`.
    2402.01306, section 4 (λ_y − v, what is minimised). Raises ConfigError for a beta that is not above 0.

    Left out: nothing.
    """
    if not beta > 0:
        raise ConfigError(f"KTO got beta {beta}: set it above 0, 0.1 for example")
    delta = at_least_float32(log_ratio)
    z = torch.as_tensor(reference_point, device=log_ratio.device).detach()
    gain = torch.sigmoid(beta * (z - delta))  # 1 − σ(x) = σ(−x), without its rounding
    loss = torch.sigmoid(beta * (delta - z))
    return torch.where(desirable.bool(), desirable_weight * gain, undesirable_weight * loss)


def kto_reference_point(mismatched_log_ratio: Tensor) -> Tensor:
    """z = max(0, mean Δ') [] float, nats, without gradient: an estimate of KL(π ‖ π_ref) that Δ is compared
    with.

    mismatched_log_ratio [M] float: Δ' of responses to other prompts than the one they are given to
    (2402.01306, section 4: the next one's response of the batch); take all of the mini-batch. 0 where there
    are none.
    """
    ratios = at_least_float32(mismatched_log_ratio).detach()
    return (ratios.sum() / max(1, ratios.numel())).clamp(min=0.0)
