"""The keys of each role of a run, as dotted paths: those of its model, its layout and its updates.

`trainer/ppo/roles.py` has the classes of the same roles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hybridflow.config.fsdp import FSDPConfig
from hybridflow.config.model import ModelConfig
from hybridflow.config.root import PPOConfig
from hybridflow.config.tree import get_value

ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class RoleKeys:
    """The blocks of keys of one role."""

    model: str
    """The block of its model."""
    layout: str = ACTOR
    """The block that says how the model is spread over ranks; by default as the actor is."""
    updates: str = ""
    """The block of its mini-batches, its optimizer and its checkpoint; '' for a role that does not learn."""


ROLE_KEYS: Mapping[str, RoleKeys] = {
    "actor": RoleKeys("actor_rollout_ref.model", updates=ACTOR),
    "rollout": RoleKeys("actor_rollout_ref.model"),
    "reference": RoleKeys("actor_rollout_ref.ref.model", layout="actor_rollout_ref.ref"),
    "critic": RoleKeys("critic.model", layout="critic", updates="critic"),
    "teacher": RoleKeys("distillation.teacher_model"),
    "reward_model": RoleKeys("reward.reward_model.model", layout="reward.reward_model"),
    "process_reward": RoleKeys("reward.process_reward_model.model", updates="reward.process_reward_model"),
}


def engine_keys(config: PPOConfig, role: str) -> tuple[FSDPConfig, int, ModelConfig]:
    """Return (sharding, ranks that share the tokens of a row, model) of a role that has an engine."""
    keys = ROLE_KEYS[role]
    layout = get_value(config, keys.layout)
    return layout.fsdp_config, layout.ulysses_sequence_parallel_size or 1, get_value(config, keys.model)
