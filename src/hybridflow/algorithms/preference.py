"""Preference losses: pure functions from numbers per response to one loss per pair, or per response, [K].

The caller weighs them.

dpo             log-ratios of both to the reference         label smoothing makes it cDPO
ipo             the same, aimed at a distance
simpo, orpo     log-probs and lengths of both               no reference
kto             log-ratio of one response with a label      `kto_reference_point` is what it is compared with
bradley_terry   scores of both                              for a reward model
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybridflow.algorithms.aggregation import at_least_float32
from hybridflow.errors import ConfigError

__all__ = ["bradley_terry", "dpo", "ipo", "kto", "kto_reference_point", "orpo", "simpo"]


def dpo(
    chosen_log_ratio: Tensor, rejected_log_ratio: Tensor, *, beta: float, label_smoothing: float = 0.0
) -> Tensor:
    """The loss of each pair, [K] float: −(1 − ε)·logσ(h) − ε·logσ(−h) with h = β·(Δ_chosen − Δ_rejected).

    Direct preference optimisation (DPO, 2305.18290) and its label-smoothed form (cDPO, Mitchell 2023).

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


def ipo(chosen_log_ratio: Tensor, rejected_log_ratio: Tensor, *, beta: float) -> Tensor:
    """The loss of each pair, [K] float: (Δ_chosen − Δ_rejected − 1/(2·β))².

    Identity preference optimisation (IPO, 2310.12036).

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


def simpo(
    chosen_log_prob: Tensor,
    rejected_log_prob: Tensor,
    chosen_length: Tensor,
    rejected_length: Tensor,
    *,
    beta: float = 2.0,
    margin: float = 1.0,
) -> Tensor:
    """The loss of each pair, [K] float: −logσ(β·S_chosen/len_chosen − β·S_rejected/len_rejected − γ).

    SimPO (2405.14734): no reference; means over tokens instead of sums, and a margin.

    chosen_log_prob, rejected_log_prob [K] float, nats: S = Σ_t logπ over a response's tokens; the lengths [K]
    int count those tokens (0 counts as 1). β: `beta`; γ: `margin`. 2405.14734, equation 6, whose runs take β
    in 2 to 2.5 and γ in 0.3 to 1.6. Raises ConfigError for a beta that is not above 0.

    Left out: nothing; the margin is the paper's γ itself, not its ratio to β.
    """
    if not beta > 0:
        raise ConfigError(f"SimPO got beta {beta}: set it above 0, 2.0 for example")
    chosen = at_least_float32(chosen_log_prob) / chosen_length.clamp(min=1)
    rejected = at_least_float32(rejected_log_prob) / rejected_length.clamp(min=1)
    return -logsigmoid(beta * (chosen - rejected) - margin)


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

    ORPO (2403.07691): fine-tuning on the chosen response and a preference at once, without a reference.

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

    Kahneman–Tversky optimisation (KTO, 2402.01306): labels of single responses instead of pairs.

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


def bradley_terry(
    chosen_scores: Tensor, rejected_scores: Tensor, margin: Tensor | float | None = None
) -> Tensor:
    """The loss of each pair, [K] float: −logσ(s_chosen − s_rejected − m).

    The loss of a reward model on pairs (InstructGPT, 2203.02155), with Llama 2's margin (2307.09288).

    chosen_scores, rejected_scores [K] float: the reward model's score of each response. m: `margin`, a number
    or [K] float, larger where the preference was stronger (2307.09288, equation 2); None: 0. 2203.02155,
    equation 1; weights of pairs are the caller's.

    Left out: rankings of more than two responses, which are pairs to the caller.
    """
    difference = at_least_float32(chosen_scores) - at_least_float32(rejected_scores)
    return -logsigmoid(difference if margin is None else difference - margin)
