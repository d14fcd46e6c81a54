"""The checks of the keys that choose the reward function."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.config.reward import RewardConfig

CUSTOM = "reward.custom_reward_function"


def reward_problems(reward: RewardConfig) -> Iterator[str]:
    """Yield one line for more than one choice of the reward, and for options that no function gets."""
    choices = {
        "reward.terms": repr(reward.terms) if reward.terms else "",
        f"{CUSTOM}.path": reward.custom_reward_function.path or "",
        "reward.function": reward.function if reward.function != "auto" else "",
    }
    chosen = [f"{key}={value}" for key, value in choices.items() if value]
    if len(chosen) > 1:
        yield (
            f"{' and '.join(chosen)} each choose the reward: keep one (a path.py:name may also be the name "
            "of a term)"
        )
    if reward.terms and reward.custom_reward_function.reward_kwargs:
        yield f"{CUSTOM}.reward_kwargs has no effect with reward.terms: write the options into the term"
    if reward.manager == "batch" and not reward.custom_reward_function.path:
        yield f"reward.manager=batch calls a function of yours with lists: set {CUSTOM}.path"
    if reward.manager not in (None, "batch") and ":" not in reward.manager:
        yield f"reward.manager={reward.manager}: wanted batch, or path/to/file.py:name"
    limits = ("manager", "max_retries", "max_concurrent", "max_rpm", "max_tpm")
    if used := [f"reward.{name}" for name in limits if getattr(reward, name) and reward.num_workers == 0]:
        yield (
            f"{', '.join(used)} hold where processes score, and reward.num_workers=0 scores in the trainer's "
            "own: set reward.num_workers to 1 or more"
        )
