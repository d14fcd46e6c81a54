"""Actor, critic, reference, teacher, process reward model and rollout: a worker class and its typed group in
one file each.
"""

from hybridflow.workers.actor import ActorGroup, ActorWorker
from hybridflow.workers.critic import CriticGroup, CriticWorker
from hybridflow.workers.process_reward import ProcessRewardGroup, ProcessRewardWorker
from hybridflow.workers.reference import ReferenceGroup, ReferenceWorker
from hybridflow.workers.rollout import RolloutGroup, RolloutWorker
from hybridflow.workers.teacher import TeacherGroup

__all__ = [
    "ActorGroup",
    "ActorWorker",
    "CriticGroup",
    "CriticWorker",
    "ProcessRewardGroup",
    "ProcessRewardWorker",
    "ReferenceGroup",
    "ReferenceWorker",
    "RolloutGroup",
    "RolloutWorker",
    "TeacherGroup",
]
