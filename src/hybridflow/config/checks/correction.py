"""The checks of `algorithm.rollout_correction`, and the syntax of its thresholds.

    "0.5_2.0" ──► (0.5, 2.0)        "2.0" ──► (2.0,)        "token_k1,seq_max_k2" with "0.5_2.0,0.1" ──► one
    threshold an option

Hydra and YAML 1.1 read `0.5_5` as the number 0.55: `quote_bounds` runs over the text before they do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set

from hybridflow.config.algorithm import RolloutCorrectionConfig
from hybridflow.config.needs import estimator_facts, loss_facts
from hybridflow.config.root import PPOConfig

PATH = "algorithm.rollout_correction"
OPTIONS = re.compile(r"token_k[123]|seq_(?:sum|mean)_k[123]|seq_max_k[23]")
OPTION_NAMES = "token_k1, k2, k3, seq_sum_k1, k2, k3, seq_mean_k1, k2, k3, seq_max_k2, k3"

_BOUNDS = r"\d[\d.]*_\d[\d.]*"
_ON_COMMAND_LINE = re.compile(r"(.*\brollout_[ir]s_threshold=)(.+)", re.DOTALL)
_IN_YAML = re.compile(
    rf"(\brollout_[ir]s_threshold[ \t]*:[ \t]*)({_BOUNDS})(?=[ \t]*(?:\}}|#|$|,\s*\w+\s*:))", re.MULTILINE
)


def quote_bounds(text: str) -> str:
    """Return an override, or the text of a recipe, with each threshold 'lo_hi' in quotes, so that it stays a
    text.
    """
    text = _IN_YAML.sub(r"\1'\2'", text)
    override = _ON_COMMAND_LINE.fullmatch(text)
    if override and re.fullmatch(r"[\d._,\s]+", override[2]):
        return override[1] + re.sub(_BOUNDS, lambda found: f"'{found[0]}'", override[2])
    return text


def correction_problems(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each threshold or option that does not parse or does not fit the others, and for
    each setting that bypass mode cannot be joined with.
    """
    correction = config.algorithm.rollout_correction
    yield from _weights(correction)
    yield from _rejection(correction)
    estimator = estimator_facts(config)
    if correction.bypass_mode and estimator is not None and estimator.actor_pass:
        yield (
            f"{PATH}.bypass_mode=true leaves out the actor's pass over the batch, and "
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs Σπ² from it: set "
            f"{PATH}.bypass_mode=false, or another estimator, for example rloo"
        )
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    facts = loss_facts(config)
    unweighted = correction.bypass_mode and correction.rollout_is and correction.loss_type == "ppo_clip"
    if unweighted and facts is not None and not facts.has_ratio:
        yield (
            f"{PATH}.rollout_is={correction.rollout_is} with bypass_mode=true and loss_type=ppo_clip leaves "
            "the weights to the ratio of the loss, and "
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss} has none: set "
            f"{PATH}.loss_type=reinforce, or bypass_mode=false"
        )


def _weights(correction: RolloutCorrectionConfig) -> Iterator[str]:
    given = correction.rollout_is_threshold
    bounds = _numbers(given)
    if bounds is None or len(bounds) > 2:
        yield (
            f"{PATH}.rollout_is_threshold={given}: wanted a number, for example 2.0, or two as lo_hi, for "
            "example 0.5_5.0"
        )
    elif len(bounds) == 1 and not bounds[0] > 0:
        yield (
            f"{PATH}.rollout_is_threshold={given} would cut every weight to 0 or below: set it above 0, for "
            "example 2.0"
        )
    elif len(bounds) == 2 and not 0 <= bounds[0] < bounds[1]:
        yield f"{PATH}.rollout_is_threshold={given}: wanted lo_hi with 0 ≤ lo < hi, for example 0.5_5.0"


def _rejection(correction: RolloutCorrectionConfig) -> Iterator[str]:
    if correction.rollout_rs is None:
        return
    options = _split(correction.rollout_rs)
    unknown = [option for option in options if not OPTIONS.fullmatch(option)]
    for option in unknown:
        yield (
            f"{PATH}.rollout_rs={correction.rollout_rs}: there is no option {option!r}; there are "
            f"{OPTION_NAMES}, joined by commas"
        )
    if correction.rollout_rs_threshold is None:
        yield (
            f"{PATH}.rollout_rs={correction.rollout_rs} without {PATH}.rollout_rs_threshold: set one "
            "threshold for each option, by comma"
        )
        return
    thresholds = _split(str(correction.rollout_rs_threshold))
    if len(thresholds) != len(options):
        yield (
            f"{PATH}.rollout_rs={correction.rollout_rs} has {len(options)} options, and "
            f"{PATH}.rollout_rs_threshold={correction.rollout_rs_threshold} has {len(thresholds)} "
            "thresholds: give one threshold for each option, by comma"
        )
    elif not unknown:
        for option, threshold in zip(options, thresholds, strict=True):
            yield from _threshold(option, threshold)


def _threshold(option: str, threshold: str) -> Iterator[str]:
    key = f"{PATH}.rollout_rs_threshold: {threshold} of {option}"
    bounds = _numbers(threshold)
    if option.endswith("k1"):
        if bounds is None or len(bounds) > 2:
            yield f"{key}: wanted lo_hi, for example 0.5_2.0, or one number u for [1/u, u]"
        elif len(bounds) == 1 and not bounds[0] > 1:
            yield (
                f"{key} means ratios from 1/{threshold} to {threshold}, which holds none: set it above 1, "
                "for example 2.0"
            )
        elif len(bounds) == 2 and not 0 < bounds[0] < bounds[1]:
            yield f"{key}: wanted lo_hi with 0 < lo < hi, for example 0.5_2.0"
    elif bounds is None or len(bounds) != 1 or not bounds[0] > 0:
        yield f"{key}: wanted one number above 0, the upper bound, for example 0.01"


def correction_notes(config: PPOConfig, given: Set[str]) -> Iterator[str]:
    """Yield one line for each key of the correction that is set and that this run does not read."""
    correction = config.algorithm.rollout_correction
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    for name in ("rollout_is_threshold", "rollout_is_batch_normalize"):
        if correction.rollout_is is None and f"{PATH}.{name}" in given:
            yield f"{PATH}.{name} is read only with {PATH}.rollout_is=token or sequence"
    if correction.rollout_rs is None and f"{PATH}.rollout_rs_threshold" in given:
        yield f"{PATH}.rollout_rs_threshold is read only with {PATH}.rollout_rs"
    if not correction.bypass_mode and f"{PATH}.loss_type" in given:
        yield f"{PATH}.loss_type is read only with {PATH}.bypass_mode=true: the policy loss is {loss}"
    if correction.bypass_mode and correction.loss_type == "ppo_clip" and correction.rollout_is:
        yield (
            f"{PATH}.rollout_is={correction.rollout_is} is not used by {PATH}.loss_type=ppo_clip: in bypass "
            "mode its ratio is already that of the policy to the rollout; loss_type=reinforce uses the "
            "weights"
        )


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _numbers(text: float | str) -> tuple[float, ...] | None:
    """The numbers of 'a' or 'a_b'; None where a part is no number."""
    try:
        return tuple(float(part) for part in str(text).split("_"))
    except ValueError:
        return None
