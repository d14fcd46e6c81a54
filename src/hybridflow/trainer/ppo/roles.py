"""Who takes part in a step: the typed groups, by the names that the loop uses."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.workers import ActorGroup, CriticGroup, ReferenceGroup, RolloutGroup


@dataclass(frozen=True)
class Roles:
    """The worker groups of a run; None where the run has no such role."""

    actor: ActorGroup
    rollout: RolloutGroup
    critic: CriticGroup | None = None
    reference: ReferenceGroup | None = None
