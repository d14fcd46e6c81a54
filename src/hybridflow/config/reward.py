"""`reward.*`: how a response gets its score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.config.schema import group, key


@dataclass(frozen=True)
class CustomRewardConfig:
    path: str | None = key(None, "file or module with the reward function; `path.py:name` works too")
    name: str = key("compute_score", "name of the function; compute_reward is tried too")
    reward_kwargs: dict[str, Any] = key({}, "extra keyword arguments of the function")


@dataclass(frozen=True)
class RewardConfig:
    function: str = key(
        "auto", "built-in reward: auto (by data_source), exact_match, gsm8k, math, arithmetic_chain, random, or a composition of terms"
    )
    terms: list[dict[str, Any]] = key(
        [], "weighted sum of built-in terms, for example [{name: gsm8k, weight: 1}, {name: length, weight: -0.1, max_chars: 400}]"
    )
    custom_reward_function: CustomRewardConfig = group(CustomRewardConfig)
    num_workers: int = key(2, "processes that score; 0: in this process, for debugging and cheap rewards", minimum=0)
    timeout: float = key(30.0, "seconds one sample may take before its worker is killed", above=0)
    on_error: Literal["raise", "zero", "drop"] = key(
        "raise", "a reward that fails: stop the run, score 0, or leave the row out of the loss"
    )
