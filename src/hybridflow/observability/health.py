"""Signs that a run goes wrong, read off the metrics of one step.

{name: float} ──health_warnings──► {rule: one line with the number and what to try}; HealthWatch says each
line rarely
"""

from __future__ import annotations

import math
from collections.abc import Mapping

MIN_ENTROPY = 1e-3
"""Nats per token below which a policy no longer explores: e^0.001 is 1.001 choices a token."""
MAX_TRUNCATED = 0.5
MAX_LOG_PROB_DIFF = 1e-2


def health_warnings(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the warning of each rule that the metrics of a step break, by the rule's name.

    A rule whose metrics are absent says nothing.
    """
    found: dict[str, str] = {}
    entropy = metrics.get("actor/entropy")
    if entropy is not None and entropy < MIN_ENTROPY:
        found["entropy"] = (
            f"entropy has collapsed: actor/entropy is {entropy:.2g} nats a token: "
            "lower actor.optim.lr, raise clip_ratio_high or add entropy_coeff"
        )
    low = metrics.get("critic/score/min")
    high = metrics.get("critic/score/max")
    if low is not None and low == high:
        found["rewards"] = (
            f"all rewards of this step are {low:g}, so there is nothing to learn from: "
            "check the reward function, the difficulty of the data, or raise rollout.n"
        )
    truncated = metrics.get("response_length/clip_ratio", 0.0)
    if truncated > MAX_TRUNCATED:
        found["truncated"] = (
            f"{truncated:.0%} of the responses were cut at a limit: raise data.max_response_length or, with "
            "several turns, rollout.max_model_len or rollout.multi_turn.max_assistant_turns"
        )
    difference = metrics.get("training/rollout_log_probs_diff_max", 0.0)
    if difference > MAX_LOG_PROB_DIFF:
        found["log_probs"] = (
            f"log-probs of generation and training differ by up to {difference:.2g} nats: use the same "
            "dtype for both"
        )
    for name, value in metrics.items():
        if name.endswith("/num_skipped_steps") and value > 0:
            found[name] = (
                f"{value:g} optimizer step(s) of {name.split('/')[0]} were skipped because the loss or "
                "gradient was not finite"
            )
    broken = [name for name, value in metrics.items() if not math.isfinite(value)]
    if broken:
        found["not_finite"] = f"{len(broken)} metrics are not finite: {', '.join(broken[:5])}"
    return found


class HealthWatch:
    """Repeats the warning of a rule that stays broken only every `repeat_every` steps."""

    def __init__(self, repeat_every: int = 20) -> None:
        self._repeat_every = repeat_every
        self._said: dict[str, int] = {}

    def new_warnings(self, metrics: Mapping[str, float], step: int) -> list[str]:
        """Return the warnings of this step that are due."""
        due = []
        for rule, message in health_warnings(metrics).items():
            if rule not in self._said or step - self._said[rule] >= self._repeat_every:
                self._said[rule] = step
                due.append(f"step {step}: {message}")
        return due
