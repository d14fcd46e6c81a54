"""`actor_rollout_ref.actor.router_replay.*`: the experts that tokens go to in updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridflow.config.schema import key


@dataclass(frozen=True)
class RouterReplayConfig:
    """Replay of the experts that tokens went to, in updates of a mixture of experts."""

    mode: Literal["disabled", "R2", "R3"] = key(
        "disabled",
        "Experts that tokens go to in the update: those of its own router (disabled), of the pass for old "
        "log-probs (R2), or of generation (R3, with rollout.enable_rollout_routing_replay).",
    )
