"""The syntax of the options of rollout correction and of their thresholds: `2.0`, `0.5_5.0`, comma lists.

Hydra and YAML 1.1 read `0.5_5` as the number 0.55: `quote_bounds` runs over the text before they do.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from hybridflow.errors import ConfigError

OPTIONS = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
)
_KEY = "algorithm.rollout_correction"
_BOUNDS = r"\d[\d.]*_\d[\d.]*"
_ON_COMMAND_LINE = re.compile(r"(.*\brollout_[ir]s_threshold=)(.+)", re.DOTALL)
_IN_YAML = re.compile(
    rf"(\brollout_[ir]s_threshold[ \t]*:[ \t]*)({_BOUNDS})(?=[ \t]*(?:\}}|#|$|,\s*\w+\s*:))", re.MULTILINE
)


def quote_bounds(text: str) -> str:
    """Return an override or a recipe's text with each threshold 'lo_hi' in quotes, so that it stays text."""
    text = _IN_YAML.sub(r"\1'\2'", text)
    override = _ON_COMMAND_LINE.fullmatch(text)
    if override and re.fullmatch(r"[\d._,\s]+", override[2]):
        return override[1] + re.sub(_BOUNDS, lambda found: f"'{found[0]}'", override[2])
    return text


class RejectionRule(NamedTuple):
    """One option of rejection with its threshold."""

    over: str
    """token, seq_sum, seq_mean or seq_max."""
    statistic: str
    """k1, k2 or k3."""
    low: float
    high: float
    """Bounds of the statistic, in nats: for k1 the logs of the ratios asked for."""


def parse_is_threshold(threshold: float | str) -> tuple[float | None, float]:
    """(None, u) of a number, which truncates above; (lo, hi) of `lo_hi`, which zeroes outside.

    Raises ConfigError for what is neither, for u that is not above 0, and unless 0 ≤ lo < hi.
    """
    bounds = _numbers(threshold)
    if len(bounds) == 1 and bounds[0] > 0:
        return None, bounds[0]
    if len(bounds) == 2 and 0 <= bounds[0] < bounds[1]:
        return bounds[0], bounds[1]
    raise ConfigError(
        f"{_KEY}.rollout_is_threshold got {threshold!r}: set a number above 0 (weights are truncated above "
        "it), for example 2.0, or 'lo_hi' with 0 ≤ lo < hi (weights outside become 0), for example '0.5_5.0'"
    )


def parse_rejection(options: str, thresholds: float | str | None) -> list[RejectionRule]:
    """The rules of a comma list of options with their thresholds; ConfigError with all that is wrong."""
    rules, problems = read_rejection(options, thresholds)
    if problems:
        raise ConfigError("\n".join(problems))
    return rules


def read_rejection(options: str, thresholds: float | str | None) -> tuple[list[RejectionRule], list[str]]:
    """Return the rules of a comma list of options with their thresholds, and a line for each problem.

    That is an unknown option, thresholds that are missing or not as many as the options, one of k1 that is
    neither u > 1 nor `lo_hi` with 0 < lo < hi, and one of k2 or k3 that is not a single number above 0.
    """
    names = [name.strip() for name in options.split(",")]
    problems = [
        f"{_KEY}.rollout_rs has no option {name!r}: set a comma list of {', '.join(OPTIONS)}"
        for name in names
        if name not in OPTIONS
    ]
    given = [] if thresholds is None else [part.strip() for part in str(thresholds).split(",")]
    if len(given) != len(names):
        problems.append(
            f"{_KEY}.rollout_rs={options} has {len(names)} options, but rollout_rs_threshold={thresholds} "
            f"has {len(given)} thresholds: set one for each option, by comma"
        )
        return [], problems
    rules: list[RejectionRule] = []
    for name, threshold in zip(names, given, strict=True):
        try:
            rules += [_rule(name, threshold)] if name in OPTIONS else []
        except ConfigError as error:
            problems.append(str(error))
    return rules, problems


def _rule(name: str, threshold: str) -> RejectionRule:
    over, statistic = name.rsplit("_", 1)
    bounds = _numbers(threshold)
    if statistic == "k1":
        if len(bounds) == 1 and bounds[0] > 1:
            return RejectionRule(over, statistic, -math.log(bounds[0]), math.log(bounds[0]))
        if len(bounds) == 2 and 0 < bounds[0] < bounds[1]:
            return RejectionRule(over, statistic, math.log(bounds[0]), math.log(bounds[1]))
        wanted = (
            "'lo_hi' with 0 < lo < hi, for example '0.5_2.0', or one number u above 1, which means [1/u, u]"
        )
    else:
        if len(bounds) == 1 and bounds[0] > 0:
            return RejectionRule(over, statistic, -math.inf, bounds[0])
        wanted = "one number above 0, the upper bound in nats, for example 0.01"
    raise ConfigError(f"{_KEY}.rollout_rs_threshold got {threshold!r} for {name}: set {wanted}")


def _numbers(threshold: float | str) -> tuple[float, ...]:
    """The numbers of `a` or `a_b`, or none; float() alone would read '0.5_5' as 0.55."""
    try:
        return tuple(float(part) for part in str(threshold).split("_"))
    except ValueError:
        return ()
