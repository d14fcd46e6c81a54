"""The two roots: a PPO-family run and a supervised fine-tuning run."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.config.actor_rollout_ref import ActorRolloutRefConfig
from hybridflow.config.algorithm import AlgorithmConfig
from hybridflow.config.critic import CriticConfig
from hybridflow.config.data import DataConfig, SFTDataConfig
from hybridflow.config.distillation import DistillationConfig
from hybridflow.config.model import CheckpointContentsConfig, ModelConfig, OptimConfig
from hybridflow.config.reward import RewardConfig
from hybridflow.config.schema import group
from hybridflow.config.trainer import SFTTrainerConfig, TrainerConfig


@dataclass(frozen=True)
class PPOConfig:
    """A run of the PPO family: the tree that verl's users type."""

    data: DataConfig = group(DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = group(ActorRolloutRefConfig)
    critic: CriticConfig = group(CriticConfig)
    reward: RewardConfig = group(RewardConfig)
    algorithm: AlgorithmConfig = group(AlgorithmConfig)
    distillation: DistillationConfig = group(DistillationConfig)
    trainer: TrainerConfig = group(TrainerConfig)


@dataclass(frozen=True)
class SFTConfig:
    """A supervised fine-tuning run."""

    data: SFTDataConfig = group(SFTDataConfig)
    model: ModelConfig = group(ModelConfig)
    optim: OptimConfig = group(OptimConfig, lr=1e-5)
    checkpoint: CheckpointContentsConfig = group(CheckpointContentsConfig, save_contents=["model", "optimizer", "extra", "hf_model"])
    trainer: SFTTrainerConfig = group(SFTTrainerConfig)
