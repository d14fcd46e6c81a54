"""Actor, critic, reference and rollout: a worker class and its typed group in one file each."""

from hybridflow.workers.actor import ActorGroup, ActorWorker
from hybridflow.workers.critic import CriticGroup, CriticWorker
from hybridflow.workers.reference import ReferenceGroup, ReferenceWorker
from hybridflow.workers.rollout import RolloutGroup, RolloutWorker

__all__ = [
    "ActorGroup",
    "ActorWorker",
    "CriticGroup",
    "CriticWorker",
    "ReferenceGroup",
    "ReferenceWorker",
    "RolloutGroup",
    "RolloutWorker",
]
