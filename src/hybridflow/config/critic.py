"""`critic.*`: the value model of PPO."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.config.actor_rollout_ref import LossAggMode
from hybridflow.config.fsdp import FSDPConfig
from hybridflow.config.model import CheckpointContentsConfig, ModelConfig, OptimConfig
from hybridflow.config.schema import group, key


@dataclass(frozen=True)
class CriticConfig:
    enable: bool | None = key(None, "build a critic; null: when the advantage estimator needs one")
    model: ModelConfig = group(ModelConfig)
    optim: OptimConfig = group(OptimConfig, lr=1e-5)
    ppo_mini_batch_size: int | None = key(
        None, "prompts (whole groups) per optimizer step; null: the actor's", minimum=1
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "at most this many rows in one forward/backward; null: only the token limit", minimum=1
    )
    ppo_max_token_len_per_gpu: int = key(
        32_768, "at most this many tokens in one forward/backward (hard)", minimum=1
    )
    forward_micro_batch_size_per_gpu: int | None = key(
        None, "at most this many rows in one forward of values; null: ppo_micro_batch_size_per_gpu", minimum=1
    )
    forward_max_token_len_per_gpu: int | None = key(
        None, "at most this many tokens in that forward; null: ppo_max_token_len_per_gpu", minimum=1
    )
    ppo_epochs: int | None = key(None, "passes over each batch; null: the actor's", minimum=1)
    shuffle: bool | None = key(None, "seeded random order of groups; null: the actor's")
    grad_clip: float | None = key(1.0, "largest gradient norm; null: no clipping", above=0)
    cliprange_value: float = key(
        0.5, "how far a value may move from its old one before the loss stops rewarding it", above=0
    )
    loss_agg_mode: LossAggMode = key("token-mean", "how token losses become one number")
    ulysses_sequence_parallel_size: int = key(
        1, "ranks that share the tokens of each row (Ulysses)", minimum=1
    )
    fsdp_config: FSDPConfig = group(FSDPConfig)
    checkpoint: CheckpointContentsConfig = group(CheckpointContentsConfig)
