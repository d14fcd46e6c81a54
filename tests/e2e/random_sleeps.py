"""For `actor_rollout_ref.model.external_lib`: generation, pushes of weights and updates take random times."""

from __future__ import annotations

import functools
import random
import time
from typing import Any

from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.rollout import RolloutWorker

LONGEST_SECONDS = 0.4


def slow_down(cls: type, name: str) -> None:
    """Have a method of a worker sleep for a random time first."""
    real = getattr(cls, name)

    @functools.wraps(real)
    def slower(*args: Any, **named: Any) -> Any:
        time.sleep(random.uniform(0.0, LONGEST_SECONDS))
        return real(*args, **named)

    setattr(cls, name, slower)


slow_down(RolloutWorker, "resume")
slow_down(RolloutWorker, "collect")
slow_down(RolloutWorker, "update_weights")
slow_down(ActorWorker, "export_buckets")
slow_down(ActorWorker, "update_mini_batch")
