"""Tinker's losses by name: sums over the tokens of rows, by the policy losses of `algorithms` where they are
the same.

    rows ──check_inputs──► loss_of(name, log-probs [B, R], rows) ──► 0-d loss

Each is a sum and no mean: what a token weighs is said by the weights and advantages that are sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.aggregation import LossScale, masked_sum
from hybridflow.algorithms.policy_losses import LossInputs
from hybridflow.algorithms.policy_losses.cispo import cispo
from hybridflow.algorithms.policy_losses.dro import dro
from hybridflow.algorithms.policy_losses.gspo import gspo
from hybridflow.algorithms.policy_losses.vanilla import vanilla
from hybridflow.tinker.wire import Datum, Refusal

TARGETS = "target_tokens"
RATIO_MASK = "sequence_ratio_mask"
NOT_READ = frozenset({"weights"})
"""Inputs that a client may send beside those of a policy loss; advantages of 0 leave tokens out."""


@dataclass(frozen=True)
class TinkerLoss:
    """A policy loss and how it is asked for."""

    function: Callable[..., Any]
    """A policy loss of `algorithms`."""
    config: Mapping[str, float]
    """Keys of `loss_fn_config` with their defaults."""
    arguments: Callable[[Mapping[str, float]], dict[str, float]]
    """The loss's own parameters by the values of these keys."""
    inputs: tuple[str, ...] = ("logprobs", "advantages")


def _bounds(config: Mapping[str, float]) -> dict[str, float]:
    """Return the distances from 1 of Tinker's thresholds, which are ratios themselves."""
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    if not 0 <= low <= 1 <= high:
        raise Refusal(
            f"loss_fn_config: clip_low_threshold={low:g} and clip_high_threshold={high:g} are ratios: wanted "
            "0 <= low <= 1 <= high, for example 0.8 and 1.2"
        )
    return {"clip_low": 1.0 - low, "clip_high": high - 1.0}


def _beta(config: Mapping[str, float]) -> dict[str, float]:
    if config["beta"] < 0:
        raise Refusal(f"loss_fn_config: beta={config['beta']:g}: wanted at least 0, for example 0.05")
    return {"dro_beta": config["beta"]}


def _thresholds(low: float, high: float) -> dict[str, float]:
    return {"clip_low_threshold": low, "clip_high_threshold": high}


POLICY_LOSSES: dict[str, TinkerLoss] = {
    # the ratio is never above infinity, so the clip never decides
    "importance_sampling": TinkerLoss(
        partial(vanilla, clip_low=1.0, clip_high=math.inf, clip_c=None), {}, lambda config: {}
    ),
    "ppo": TinkerLoss(partial(vanilla, clip_c=None), _thresholds(0.8, 1.2), _bounds),
    "cispo": TinkerLoss(cispo, _thresholds(0.0, 4.0), _bounds),
    "dro": TinkerLoss(dro, {"beta": 0.05}, _beta),
    "gspo": TinkerLoss(
        gspo, _thresholds(1 - 3e-4, 1 + 4e-4), _bounds, ("logprobs", "advantages", RATIO_MASK)
    ),
}
LOSSES = ("cross_entropy", *POLICY_LOSSES)


def check_inputs(name: str, config: Mapping[str, float | str], rows: Sequence[Datum]) -> None:
    """Raise Refusal where a loss is not served or rows lack what it reads, before anything is computed."""
    if name not in LOSSES:
        raise Refusal(f"loss_fn={name!r} is not served here: choose from {', '.join(LOSSES)}")
    loss = POLICY_LOSSES.get(name)
    known = set() if loss is None else set(loss.config)
    odd = sorted(
        key
        for key, value in config.items()
        if key not in known or isinstance(value, str) or not math.isfinite(value)
    )
    if odd:
        raise Refusal(
            f"loss_fn_config has {odd[0]!r}={config[odd[0]]!r}: {name} reads finite numbers of "
            f"{', '.join(sorted(known)) or 'no keys'}"
        )
    if loss is not None:
        _settings(loss, config)
    if not rows:
        raise Refusal("data is empty: send at least one row")
    wanted = {TARGETS, *(("weights",) if loss is None else loss.inputs)}
    for place, row in enumerate(rows):
        found = set(row.inputs)
        if not wanted <= found <= wanted | NOT_READ:
            raise Refusal(
                f"data[{place}].loss_fn_inputs has {', '.join(sorted(found)) or 'nothing'}: {name} wants "
                f"{', '.join(sorted(wanted))}"
            )
        shape = list(row.inputs[TARGETS].shape)
        if shape[:1] != [len(row.tokens)] or len(shape) > 1 + (loss is None) or 0 in shape:
            raise Refusal(
                f"data[{place}]: target_tokens has the shape {shape} for {len(row.tokens)} tokens of "
                f"model_input, wanted [N]{' or [N, K]' if loss is None else ''}"
            )
        for key in wanted - {TARGETS}:
            value = row.inputs[key]
            if list(value.shape) != shape:
                raise Refusal(
                    f"data[{place}]: {key} has the shape {list(value.shape)}, wanted {shape} like "
                    "target_tokens"
                )
            if not bool(value.isfinite().all()):
                raise Refusal(f"data[{place}]: {key} has numbers that are not finite (NaN or infinite)")
        if row.inputs[TARGETS].is_floating_point():
            raise Refusal(f"data[{place}]: target_tokens are float32, wanted int64")
        if RATIO_MASK in wanted and bool(row.inputs["advantages"][row.inputs[RATIO_MASK] == 0].any()):
            raise Refusal(f"data[{place}]: wanted advantages of 0 where {RATIO_MASK} is 0")


def _settings(loss: TinkerLoss, config: Mapping[str, float | str]) -> dict[str, float]:
    return loss.arguments({**loss.config, **{key: float(value) for key, value in config.items()}})


def loss_of(name: str, config: Mapping[str, float | str], log_probs: Tensor, rows: Sequence[Datum]) -> Tensor:
    """Return the loss of rows, 0-d, for the log-probs [B, R] of their targets, flat and right-padded.

    cross_entropy: −Σ w·logπ. importance_sampling: −Σ ρ·A, ρ = π/π_old. ppo: −Σ min(ρ·A, clip(ρ, low,
    high)·A). cispo: −Σ sg[clip(ρ, low, high)]·A·logπ. dro: −Σ (A·logπ − ½·β·(logπ − logπ_old)²). gspo: ppo's
    with the ratio of the whole row. Log-ratios are clamped to ±20 but in dro. Source: Tinker's pages.
    """

    def padded(key: str) -> Tensor:
        flat = [row.inputs[key].flatten().to(log_probs) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(flat, batch_first=True)

    counts = torch.tensor([row.inputs[TARGETS].numel() for row in rows], device=log_probs.device)
    mask = torch.arange(log_probs.shape[1], device=log_probs.device) < counts[:, None]
    loss = POLICY_LOSSES.get(name)
    if loss is None:
        return masked_sum(-padded("weights") * log_probs, mask)
    if RATIO_MASK in loss.inputs:
        mask &= padded(RATIO_MASK) != 0
    inputs = LossInputs(log_probs, padded("logprobs"), padded("advantages"), mask, LossScale(1.0, 1.0))
    found: Tensor = loss.function(inputs, **_settings(loss, config), loss_agg_mode="token-sum").loss
    return found
