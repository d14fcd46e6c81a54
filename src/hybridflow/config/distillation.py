"""`distillation.*`: the frozen teacher of on-policy distillation."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.config.model import ModelConfig
from hybridflow.config.schema import group, key


@dataclass(frozen=True)
class DistillationConfig:
    """The teacher of on-policy distillation."""

    teacher_model: ModelConfig = group(ModelConfig)
    log_prob_max_token_len_per_gpu: int | None = key(
        None,
        "Largest number of tokens in one forward pass of the teacher; null: the actor's limit.",
        minimum=1,
    )
