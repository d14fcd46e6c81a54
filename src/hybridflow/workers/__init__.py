"""Actor, critic, reference, teacher, reward models, rollout: a worker class and its typed group in one file.

The names below are loaded when they are first used, so that the maths of `losses.py` needs no model library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridflow.workers.actor import ActorGroup, ActorWorker
    from hybridflow.workers.critic import CriticGroup, CriticWorker
    from hybridflow.workers.process_reward import ProcessRewardGroup, ProcessRewardWorker
    from hybridflow.workers.reference import ReferenceGroup, ReferenceWorker, TeacherGroup
    from hybridflow.workers.reward_model import RewardModelGroup, RewardModelWorker
    from hybridflow.workers.rollout import RolloutWorker
    from hybridflow.workers.rollout_group import RolloutGroup

_HOMES = {
    "ActorGroup": "actor",
    "ActorWorker": "actor",
    "CriticGroup": "critic",
    "CriticWorker": "critic",
    "ProcessRewardGroup": "process_reward",
    "ProcessRewardWorker": "process_reward",
    "ReferenceGroup": "reference",
    "ReferenceWorker": "reference",
    "RewardModelGroup": "reward_model",
    "RewardModelWorker": "reward_model",
    "RolloutGroup": "rollout_group",
    "RolloutWorker": "rollout",
    "TeacherGroup": "reference",
}

__all__ = [
    "ActorGroup",
    "ActorWorker",
    "CriticGroup",
    "CriticWorker",
    "ProcessRewardGroup",
    "ProcessRewardWorker",
    "ReferenceGroup",
    "ReferenceWorker",
    "RewardModelGroup",
    "RewardModelWorker",
    "RolloutGroup",
    "RolloutWorker",
    "TeacherGroup",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"hybridflow.workers.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'hybridflow.workers' has no attribute {name!r}")
