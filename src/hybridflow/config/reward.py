"""`reward.*`: how a response gets its score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.config.model import CheckpointContentsConfig, ModelConfig, OptimConfig
from hybridflow.config.schema import group, key


@dataclass(frozen=True)
class CustomRewardConfig:
    path: str | None = key(None, "file or module with the reward function; `path.py:name` works too")
    name: str = key("compute_score", "name of the function; compute_reward is tried too")
    reward_kwargs: dict[str, Any] = key({}, "extra keyword arguments of the function")


@dataclass(frozen=True)
class OverlongBufferConfig:
    enable: bool = key(
        False,
        "overlong shaping (DAPO): a penalty that grows over the last `len` tokens before the longest "
        "response",
    )
    len: int | None = key(
        None, "tokens before max_resp_len over which the penalty grows; null: a fifth of max_resp_len", minimum=1
    )
    penalty_factor: float = key(1.0, "penalty of a response of max_resp_len tokens", minimum=0)


@dataclass(frozen=True)
class RewardKwargsConfig:
    overlong_buffer_cfg: OverlongBufferConfig = group(OverlongBufferConfig)
    max_resp_len: int | None = key(
        None, "length at which the overlong penalty is whole; null: data.max_response_length", minimum=1
    )


@dataclass(frozen=True)
class ProcessRewardModelConfig:
    enable: bool | None = key(
        None,
        "train an implicit process reward model online (PRIME); null: when the advantage estimator needs one",
    )
    model: ModelConfig = group(ModelConfig)
    optim: OptimConfig = group(OptimConfig)
    beta: float = key(0.05, "q_t = beta · (logπ_rm − logπ_ref)", above=0)
    granularity: Literal["token", "whole"] = key(
        "token", "rewards on each token, or their sum on the last one"
    )
    update: Literal["before", "after"] = key("before", "train it before or after it scores a batch")
    process_coef: float = key(5.0, "weight of the process rewards in the advantage", minimum=0)
    outcome_coef: float = key(5.0, "weight of the outcome in the advantage", minimum=0)
    ppo_mini_batch_size: int | None = key(
        None, "prompts (whole groups) per optimizer step; null: data.train_batch_size", minimum=1
    )
    ppo_max_token_len_per_gpu: int | None = key(
        None, "at most this many tokens in one forward/backward; null: the actor's limit", minimum=1
    )
    grad_clip: float | None = key(10.0, "largest gradient norm; null: no clipping", above=0)
    checkpoint: CheckpointContentsConfig = group(CheckpointContentsConfig)


@dataclass(frozen=True)
class RewardConfig:
    function: str = key(
        "auto",
        "built-in reward: auto (by data_source), exact_match, gsm8k, math, arithmetic_chain, random, or a "
        "composition of terms",
    )
    terms: list[dict[str, Any]] = key(
        [],
        "weighted sum of built-in terms, for example [{name: gsm8k, weight: 1}, {name: length, weight: "
        "-0.1, max_chars: 400}]",
    )
    custom_reward_function: CustomRewardConfig = group(CustomRewardConfig)
    reward_kwargs: RewardKwargsConfig = group(RewardKwargsConfig)
    process_reward_model: ProcessRewardModelConfig = group(ProcessRewardModelConfig)
    num_workers: int = key(
        2, "processes that score; 0: in this process, for debugging and cheap rewards", minimum=0
    )
    timeout: float = key(30.0, "seconds one sample may take before its worker is killed", above=0)
    on_error: Literal["raise", "zero", "drop"] = key(
        "raise", "a reward that fails: stop the run, score 0, or leave the row out of the loss"
    )
