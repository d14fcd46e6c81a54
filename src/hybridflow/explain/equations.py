"""The formulas of a step beside those of its estimator and its policy loss, as data.

A formula is written as in `config/algorithm_names.py`; a test compares each with the docstring of its
function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hybridflow.algorithms.kl import AdaptiveKLController
from hybridflow.algorithms.positive_examples import positive_example_loss
from hybridflow.algorithms.preference import dpo, ipo
from hybridflow.algorithms.process_reward import implicit_rewards, process_reward_loss
from hybridflow.algorithms.rollout_correction import rejection, rollout_weights
from hybridflow.algorithms.value_loss import value_loss
from hybridflow.episodes.filters import filter_overlong, groups_to_keep, overlong_penalty
from hybridflow.trainer.ppo.columns import apply_kl_penalty


class Equation(NamedTuple):
    """A function with its formula."""

    function: Callable[..., Any]
    formula: str
    papers: tuple[str, ...] = ()


EQUATIONS: Mapping[str, Equation] = {
    "overlong shaping": Equation(
        overlong_penalty,
        "penalty = min(−(length − ({max_len} − {buffer_len})) / {buffer_len} · {factor}, 0)",
        ("2503.14476",),
    ),
    "process rewards": Equation(
        implicit_rewards,
        "q_t = {beta}·(logπ_rm − logπ_ref) of each token (granularity `token`), or their sum on the row's "
        "last token (`whole`)",
        ("2502.01456", "2412.01981"),
    ),
    "loss of the process reward model": Equation(
        process_reward_loss,
        "−o·logσ(h) − (1 − o)·logσ(−h) with h = {beta}·Σ_t (logπ_rm − logπ_ref): cross-entropy of each "
        "row's outcome o, the mean over rows",
        ("2502.01456",),
    ),
    "KL in the reward": Equation(apply_kl_penalty, "token_level_rewards = scores - {beta} * kl"),
    "its coefficient": Equation(
        AdaptiveKLController, "β ← β·(1 + clip(kl/{target} − 1, ±0.2)·{rows}/{horizon})", ("1909.08593",)
    ),
    "dynamic sampling": Equation(
        groups_to_keep,
        "Uids, in order of appearance, of the groups whose values vary (max > min) and whose mean is in "
        "[{min_mean}, {max_mean}]",
        ("2503.14476", "2502.01456"),
    ),
    "overlong filtering": Equation(
        filter_overlong,
        'Leave rows that were cut (finish_reason "length") out of the loss, in place; return their share as '
        "a metric",
        ("2503.14476",),
    ),
    "importance weights": Equation(
        rollout_weights,
        "w_t = min(ρ_t, {threshold}); by token ρ_t = exp(logr_t), by sequence ρ_t = exp(clamp(Σ_t logr_t, "
        "±20)); with logr = clamp(logπ_old − logπ_rollout, ±20)",
        ("2510.18855",),
    ),
    "rejection": Equation(
        rejection,
        "k1 = −logr in [log lo, log hi], k2 = ½·logr² ≤ u, k3 = e^logr − 1 − logr ≤ u; logr = "
        "clamp(logπ_old − logπ_rollout, ±20)",
    ),
    "likelihood of right responses": Equation(
        positive_example_loss,
        "Σ −logπ over the tokens of right rows, divided by `scale.num_positive_tokens`",
        ("2504.05118",),
    ),
    "value_loss": Equation(
        value_loss, "½·agg(max((v − R)², (clip(v, V ± {clip_range}) − R)²))", ("1707.06347",)
    ),
}
ICEPOP = "A threshold written `lo_hi` sets weights outside [lo, hi] to 0 instead (IcePop)"

PAIR_LOSSES: Mapping[str, Equation] = {
    "sigmoid": Equation(
        dpo,
        "The loss of each pair, [K] float: −(1 − {label_smoothing})·logσ(h) − {label_smoothing}·logσ(−h) "
        "with h = {beta}·(Δ_chosen − Δ_rejected)",
        ("2305.18290",),
    ),
    "ipo": Equation(
        ipo, "The loss of each pair, [K] float: (Δ_chosen − Δ_rejected − 1/(2·{beta}))²", ("2310.12036",)
    ),
}
"""Losses of a pair by their name in `dpo_loss`."""

KL: Mapping[str, str] = {
    **dict.fromkeys(("kl", "k1"), "x − y"),
    "abs": "|x − y|",
    **dict.fromkeys(("mse", "k2"), "½(x − y)²"),
    **dict.fromkeys(
        ("low_var_kl", "k3"), "e^d − d − 1 with d = clamp(y − x, ±20), the result clamped to ±10"
    ),
}
"""Estimators of the KL, by `kl_estimate`'s `kind`."""

AGGREGATIONS: Mapping[str, str] = {
    "token-mean": "Σ/{num_tokens}",
    "token-sum": "Σ",
    "seq-mean-token-sum": "Σ_i Σ_t/{num_sequences}",
    "seq-mean-token-mean": "Σ_i mean_t/{num_sequences}",
    "seq-mean-token-sum-norm": "Σ_i Σ_t/({num_sequences}·{scale_factor})",
}
"""Ways from token losses to one number, by `aggregate`'s `mode`."""

RESAMPLING: Mapping[str, str] = {
    "pow": "w = |s|^{weight_pow}",
    "max_min": "w = 1 where s is the batch's highest or lowest, else 0",
    "max_random": "w = 0.4 where s is the highest, else 0.1",
}
"""Weights of rows, by `resample_rows`' `method`."""
DRAWN = "P(row) = w/Σw, drawn B times with replacement. "
