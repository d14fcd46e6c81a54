"""The typed worker groups that take part in a step, and which of them a run needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.config import PPOConfig
from hybridflow.config.needs import needs_reference, needs_teacher
from hybridflow.controller import Backend
from hybridflow.trainer.ppo.columns import find_estimator, loss_columns
from hybridflow.trainer.ppo.parallel_layout import dealt_by
from hybridflow.workers import (
    ActorGroup,
    ActorWorker,
    CriticGroup,
    ProcessRewardGroup,
    ReferenceGroup,
    ReferenceWorker,
    RolloutGroup,
    TeacherGroup,
)
from hybridflow.workers.losses import find_policy_loss


@dataclass(frozen=True)
class Roles:
    """The worker groups of a run; None where the run has no such role."""

    actor: ActorGroup
    rollout: RolloutGroup
    critic: CriticGroup | None = None
    reference: ReferenceGroup | None = None
    teacher: TeacherGroup | None = None
    process_reward: ProcessRewardGroup | None = None

    def together(self, first: str, second: str) -> bool:
        """Whether two roles share processes, so that their calls take turns."""
        return self.actor.backend.together(first, second)


def columns_also_read(
    config: PPOConfig, backend: Backend
) -> dict[str, dict[Callable[..., Any], Sequence[str]]]:
    """Return, by role and method, the columns that it reads in this run beside those that it declares."""
    dealt = dealt_by(config.actor_rollout_ref.actor, backend.mesh("actor").num_parts)
    return {
        "actor": {
            ActorWorker.log_probs: dealt,
            ActorWorker.update_mini_batch: [*dealt, *loss_columns(config)],
        },
        "reference": {ReferenceWorker.log_probs: dealt},
    }


def groups(backend: Backend, names: Sequence[str], config: PPOConfig) -> Roles:
    """Return the groups of the roles `names` on a backend, which send the columns that this run reads."""
    more = columns_also_read(config, backend)
    return Roles(
        actor=ActorGroup(backend, "actor", also_read=more["actor"]),
        rollout=RolloutGroup(backend, "rollout"),
        reference=(
            ReferenceGroup(backend, "reference", also_read=more["reference"])
            if "reference" in names
            else None
        ),
        critic=CriticGroup(backend, "critic") if "critic" in names else None,
        teacher=TeacherGroup(backend, "teacher") if "teacher" in names else None,
        process_reward=ProcessRewardGroup(backend, "process_reward") if "process_reward" in names else None,
    )


def needed_roles(config: PPOConfig) -> list[str]:
    """Return the names of the roles that a run has, by its configuration and by the columns that its
    estimator and loss name.

    So a user's own function gets a reference, a teacher or a process reward model by having `ref_log_prob`,
    `teacher_log_probs` or `process_rewards` among its arguments.
    """
    estimator = find_estimator(config.algorithm)
    loss = find_policy_loss(config.actor_rollout_ref.actor)
    named = {*estimator.needs, *estimator.takes, *loss.keywords}
    # `enable` cannot be told from its null by now, so only a column that the estimator must have overrules it
    process_reward = bool(config.reward.process_reward_model.enable) or "process_rewards" in estimator.needs
    wanted = {
        "actor": True,
        "rollout": True,
        "reference": needs_reference(config) or process_reward or "ref_log_prob" in named,
        "critic": bool(config.critic.enable),
        "teacher": needs_teacher(config) or "teacher_log_probs" in named,
        "process_reward": process_reward,
    }
    return [name for name, want in wanted.items() if want]
