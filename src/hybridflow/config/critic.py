"""`critic.*`: the value model of PPO."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.config.actor_rollout_ref import LossAggMode
from hybridflow.config.fsdp import FSDPConfig
from hybridflow.config.model import CheckpointContentsConfig, ModelConfig, OptimConfig
from hybridflow.config.schema import divides, group, key


@dataclass(frozen=True)
class CriticConfig:
    """The value model: its batches, loss, optimizer and sharding."""

    enable: bool | None = key(None, "Build a critic; null: when the advantage estimator needs one.")
    model: ModelConfig = group(ModelConfig)
    optim: OptimConfig = group(OptimConfig, lr=1e-5)
    ppo_mini_batch_size: int | None = key(
        None,
        "Prompts in one optimizer step of the critic, each with all of its responses; null: as many as the "
        "actor's.",
        divides("data.train_batch_size"),
        minimum=1,
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None,
        "Largest number of rows in one forward and backward pass; null: only the token limit counts.",
        minimum=1,
    )
    ppo_max_token_len_per_gpu: int = key(
        32_768, "Largest number of tokens in one forward and backward pass, never exceeded.", minimum=1
    )
    forward_micro_batch_size_per_gpu: int | None = key(
        None,
        "Largest number of rows in one forward pass for values; null: ppo_micro_batch_size_per_gpu.",
        minimum=1,
    )
    forward_max_token_len_per_gpu: int | None = key(
        None,
        "Largest number of tokens in one forward pass for values; null: ppo_max_token_len_per_gpu.",
        minimum=1,
    )
    ppo_epochs: int | None = key(
        None, "Passes of the critic over the responses of each step; null: as many as the actor's.", minimum=1
    )
    shuffle: bool | None = key(
        None, "Deal the groups into mini-batches in a seeded random order; null: as the actor does."
    )
    grad_clip: float | None = key(
        1.0, "Largest norm of the gradient; a larger one is scaled down to it. null: no clipping.", above=0
    )
    cliprange_value: float = key(
        0.5, "How far a value may move from its old one before the loss stops rewarding the move.", above=0
    )
    loss_agg_mode: LossAggMode = key("token-mean", "How the losses of the tokens become one number.")
    ulysses_sequence_parallel_size: int = key(
        1, "Ranks that share the tokens of each row (Ulysses sequence parallelism), for long rows.", minimum=1
    )
    fsdp_config: FSDPConfig = group(FSDPConfig)
    checkpoint: CheckpointContentsConfig = group(CheckpointContentsConfig)
