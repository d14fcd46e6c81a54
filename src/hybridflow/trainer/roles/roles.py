"""The roles of a run: one record for each, and the typed worker groups that take part in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from hybridflow.config import PPOConfig
from hybridflow.config.layout import JUDGE, VALIDATION
from hybridflow.config.needs import needs_reference, needs_teacher
from hybridflow.config.reward import has_classifier, has_judge
from hybridflow.controller import Backend, Factories, RankInfo, Worker, WorkerGroup, WorkerHost
from hybridflow.protocol.packing import ROUTES
from hybridflow.trainer.ppo.columns import find_estimator, find_estimators, loss_columns
from hybridflow.trainer.roles.parallel_layout import dealt_by
from hybridflow.trainer.roles.role_builders import RoleBuilders, RunFacts
from hybridflow.workers import (
    ActorGroup,
    ActorWorker,
    CriticGroup,
    CriticWorker,
    ProcessRewardGroup,
    ProcessRewardWorker,
    ReferenceGroup,
    ReferenceWorker,
    RewardModelGroup,
    RolloutGroup,
    TeacherGroup,
)
from hybridflow.workers.actor import MEASURED_COLUMNS
from hybridflow.workers.losses import TRAJECTORY_COLUMNS, find_policy_loss


@dataclass(frozen=True)
class Roles:
    """The worker groups of a run; None where the run has no such role."""

    actor: ActorGroup
    rollout: RolloutGroup
    critic: CriticGroup | None = None
    reference: ReferenceGroup | None = None
    teacher: TeacherGroup | None = None
    reward_model: RewardModelGroup | None = None
    process_reward: ProcessRewardGroup | None = None
    judge: RolloutGroup | None = None
    """Replicas of a generative reward model that share processes with other roles."""

    @property
    def all(self) -> list[WorkerGroup[Any]]:
        """The groups that the run has."""
        groups = (getattr(self, field.name) for field in fields(self))
        return [group for group in groups if group is not None]

    def are_colocated(self, first: str, second: str) -> bool:
        """Whether two roles share processes, so that their calls take turns."""
        return self.actor.backend.are_colocated(first, second)

    def alone(self, role: str) -> AbstractContextManager[None]:
        """Context in which a role has its processes for itself: no engine there is stepped meanwhile.

        Where engines share the actor's processes, no schedule steps them while it trains.
        """
        beside = not self.are_colocated(self.actor.role, self.rollout.role)
        if self.are_colocated(role, self.rollout.role) and (beside or role == "reward_model"):
            return self.rollout.set_aside()
        return nullcontext()


@dataclass(frozen=True)
class RoleSpec:
    """One role: its classes, and when a run has it. Its keys are in `config/layout.py`."""

    name: str
    """Its name in placements, in calls, and as the folder of its checkpoint."""
    group: Callable[..., Any]
    """The driver's view of its workers."""
    build: Callable[[RoleBuilders, RankInfo], Worker]
    """Builds its worker in a process."""
    needed: Callable[[PPOConfig, Set[str]], bool] = lambda config, named: True
    """Whether a run has it: (config, arguments that its estimator and its loss name)."""


def _has_process_rewards(config: PPOConfig, named: Set[str]) -> bool:
    # null of `enable` is resolved by now, so only a column that the estimator must have overrules it
    needed = "process_rewards" in find_estimator(config.algorithm).needs
    return bool(config.reward.process_reward_model.enable) or needed


def _has_reference(config: PPOConfig, named: Set[str]) -> bool:
    return needs_reference(config) or _has_process_rewards(config, named) or "ref_log_prob" in named


ROLES: tuple[RoleSpec, ...] = (
    RoleSpec("actor", ActorGroup, RoleBuilders.actor),
    RoleSpec("rollout", RolloutGroup, RoleBuilders.rollout),
    RoleSpec(
        VALIDATION,
        RolloutGroup,
        RoleBuilders.rollout,
        lambda config, named: config.trainer.val_in_background,
    ),
    RoleSpec("reference", ReferenceGroup, RoleBuilders.reference, _has_reference),
    RoleSpec(
        "critic",
        CriticGroup,
        RoleBuilders.critic,
        lambda config, named: bool(config.critic.enable),
    ),
    RoleSpec(
        "teacher",
        TeacherGroup,
        RoleBuilders.teacher,
        lambda config, named: needs_teacher(config) or "teacher_log_probs" in named,
    ),
    RoleSpec(
        "reward_model",
        RewardModelGroup,
        RoleBuilders.reward_model,
        lambda config, named: has_classifier(config.reward),
    ),
    RoleSpec(JUDGE, RolloutGroup, RoleBuilders.judge, lambda config, named: has_judge(config.reward)),
    RoleSpec("process_reward", ProcessRewardGroup, RoleBuilders.process_reward, _has_process_rewards),
)


def factories(facts: RunFacts, process: WorkerHost) -> Factories:
    """Return the function for each role by which a backend builds its worker in a process."""
    builders = RoleBuilders(facts, process)
    return {spec.name: partial(spec.build, builders) for spec in ROLES}


def columns_also_read(
    config: PPOConfig, backend: Backend
) -> dict[str, dict[Callable[..., Any], Sequence[str]]]:
    """Return, by role and method, the columns that it reads in this run beside those that it declares."""
    replay = config.actor_rollout_ref.actor.router_replay.mode
    recorded = [ROUTES] * (replay == "R3")
    dealt = dealt_by(config.actor_rollout_ref.actor, backend.mesh("actor").num_parts)
    return {
        "actor": {
            ActorWorker.log_probs: [*dealt, *recorded],
            ActorWorker.measure: MEASURED_COLUMNS,
            ActorWorker.update_mini_batch: [
                *dealt,
                *TRAJECTORY_COLUMNS,
                *loss_columns(config),
                *[ROUTES] * (replay != "disabled"),
            ],
        },
        "critic": {CriticWorker.update_mini_batch: TRAJECTORY_COLUMNS},
        "process_reward": {ProcessRewardWorker.update_mini_batch: TRAJECTORY_COLUMNS},
        "reference": {ReferenceWorker.log_probs: dealt},
        "teacher": {ReferenceWorker.log_probs: ["data_source"] * bool(config.distillation.teachers)},
    }


def groups(backend: Backend, names: Sequence[str], config: PPOConfig) -> Roles:
    """Return the groups of the roles `names` on a backend, which send the columns that this run reads."""
    more = columns_also_read(config, backend)
    own: dict[str, Any] = {
        spec.name: spec.group(backend, spec.name, also_read=more.get(spec.name, {}))
        for spec in ROLES
        if spec.name in names
    }
    return Roles(**own)


def needed_roles(config: PPOConfig) -> list[str]:
    """Return the names of the roles that a run has, by its configuration and by the columns that its
    estimator and loss name.

    So a user's own function gets a reference, a teacher or a process reward model by having `ref_log_prob`,
    `teacher_log_probs` or `process_rewards` among its arguments.
    """
    estimators = find_estimators(config.algorithm).values()
    loss = find_policy_loss(config.actor_rollout_ref.actor)
    named = {name for each in estimators for name in (*each.needs, *each.takes)} | {*loss.keywords}
    return [spec.name for spec in ROLES if spec.needed(config, named)]
