"""ORPO (2403.07691): fine-tuning on the chosen response and a preference at once, without a reference."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybridflow.algorithms.masked import at_least_float32
from hybridflow.errors import ConfigError


def orpo(
    chosen_log_prob: Tensor,
    rejected_log_prob: Tensor,
    chosen_length: Tensor,
    rejected_length: Tensor,
    *,
    odds_weight: float = 0.1,
) -> Tensor:
    """The loss of each pair, [K] float: −L_chosen − λ·logσ(logit(L_chosen) − logit(L_rejected)), logit(L) = L
    − log(1 − e^L).

    chosen_log_prob, rejected_log_prob [K] float, nats: sums of logπ over a response's tokens; the lengths [K]
    int count those tokens (0 counts as 1); L is the mean, so that e^L is the geometric mean of the token
    probabilities. λ: `odds_weight`, the paper's λ.
    2403.07691. e^L = 1 has infinite odds: L is held below −1e-6. Raises ConfigError for an odds_weight below
    0.

    Left out: nothing.
    """
    if not odds_weight >= 0:
        raise ConfigError(f"ORPO got odds_weight {odds_weight}: set it to 0 or above, 0.1 for example")
    chosen = at_least_float32(chosen_log_prob) / chosen_length.clamp(min=1)
    rejected = at_least_float32(rejected_log_prob) / rejected_length.clamp(min=1)
    return -chosen - odds_weight * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(mean: Tensor) -> Tensor:
    """Logit of e^mean, exact on both sides of ½; each branch gets a safe argument, so no gradient is NaN."""
    mean = mean.clamp(max=-1e-6)
    near_one = mean > -math.log(2.0)
    rest = torch.where(
        near_one,
        (-torch.where(near_one, mean, -1.0).expm1()).log(),
        (-torch.where(near_one, -1.0, mean).exp()).log1p(),
    )
    return mean - rest
