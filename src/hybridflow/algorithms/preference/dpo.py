"""Direct preference optimisation (DPO, 2305.18290) and its label-smoothed form (cDPO, Mitchell 2023)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from hybridflow.algorithms.masked import at_least_float32
from hybridflow.errors import ConfigError


def dpo(
    chosen_log_ratio: Tensor, rejected_log_ratio: Tensor, *, beta: float, label_smoothing: float = 0.0
) -> Tensor:
    """The loss of each pair, [K] float: −(1 − ε)·logσ(h) − ε·logσ(−h) with h = β·(Δ_chosen − Δ_rejected).

    chosen_log_ratio, rejected_log_ratio [K] float, nats: Δ = Σ_t (logπ − logπ_ref) over a response's tokens.
    β: `beta`; ε: `label_smoothing`, the chance that a label is swapped (cDPO; 0 is DPO: 2305.18290, equation
    7). The rewards it implies are β·Δ. Raises ConfigError for a beta that is not above 0 and a
    label_smoothing outside [0, 0.5).

    Left out: a term of likelihood on the chosen response, which some add.
    """
    if not beta > 0:
        raise ConfigError(f"DPO got beta {beta}: set it above 0, 0.1 for example")
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(
            f"DPO got label_smoothing {label_smoothing}: set it in [0, 0.5); 0 trusts every label"
        )
    h = beta * (at_least_float32(chosen_log_ratio) - at_least_float32(rejected_log_ratio))
    return -(1.0 - label_smoothing) * logsigmoid(h) - label_smoothing * logsigmoid(-h)
