"""`critic.*`: the value model of PPO."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.algorithms.catalog import LossAggMode
from hybridflow.config.model import ModelConfig, OptimConfig, ShardedLearnerConfig
from hybridflow.config.schema import divides, group, key


@dataclass(frozen=True)
class CriticConfig(ShardedLearnerConfig):
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
    cliprange_value: float = key(
        0.5, "How far a value may move from its old one before the loss stops rewarding the move.", above=0
    )
    loss_agg_mode: LossAggMode = key("token-mean", "How the losses of the tokens become one number.")
