"""The two roots: a PPO-family run and a supervised fine-tuning run."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.config.actor_rollout_ref import ActorRolloutRefConfig
from hybridflow.config.algorithm import AlgorithmConfig
from hybridflow.config.cluster import RayConfig
from hybridflow.config.critic import CriticConfig
from hybridflow.config.data import DataConfig, SFTDataConfig
from hybridflow.config.fsdp import FSDPConfig
from hybridflow.config.model import CheckpointContentsConfig, ModelConfig, OptimConfig
from hybridflow.config.profiler import ProfilerConfig
from hybridflow.config.reward import RewardConfig
from hybridflow.config.schema import group, key
from hybridflow.config.trainer import SFTTrainerConfig, TrainerConfig


@dataclass(frozen=True)
class DistillationConfig:
    """The teacher of on-policy distillation."""

    teacher_model: ModelConfig = group(ModelConfig)
    log_prob_max_token_len_per_gpu: int | None = key(
        None,
        "Largest number of tokens in one forward pass of the teacher; null: the actor's limit.",
        minimum=1,
    )


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
    global_profiler: ProfilerConfig = group(ProfilerConfig)
    ray_kwargs: RayConfig = group(RayConfig)


@dataclass(frozen=True)
class SFTEngineConfig(FSDPConfig):
    """The training engine of a supervised run."""

    ulysses_sequence_parallel_size: int = key(
        1, "Ranks that share the tokens of each row (Ulysses sequence parallelism), for long rows.", minimum=1
    )


@dataclass(frozen=True)
class SFTConfig:
    """A supervised fine-tuning run."""

    data: SFTDataConfig = group(SFTDataConfig)
    model: ModelConfig = group(ModelConfig)
    optim: OptimConfig = group(OptimConfig, lr=1e-5)
    checkpoint: CheckpointContentsConfig = group(
        CheckpointContentsConfig, save_contents=["model", "optimizer", "extra", "hf_model"]
    )
    engine: SFTEngineConfig = group(SFTEngineConfig)
    trainer: SFTTrainerConfig = group(SFTTrainerConfig)
    global_profiler: ProfilerConfig = group(ProfilerConfig)
    ray_kwargs: RayConfig = group(RayConfig)
