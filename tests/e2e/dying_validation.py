"""A run whose validation of step 2 has no end, and that is killed in step KILL_AT_STEP.

KILL_AT_STEP=3 python -m dying_validation OVERRIDES…
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from hybridflow.trainer.main_ppo import main as main_ppo
from hybridflow.trainer.ppo.step import PPOStep
from hybridflow.trainer.ppo.validation import Validator

HANGS = 2


def install(kill_at: int) -> None:
    """Have this process kill itself in a step, while a validation is under way."""
    under_way = threading.Event()
    measure = Validator.measure
    train = PPOStep.__call__

    def measured(self: Validator, step: int, rollout: Any) -> Any:
        if step == HANGS:
            under_way.set()
            threading.Event().wait()
        return measure(self, step, rollout)

    def trained(self: PPOStep, batch: Any, step: int) -> Any:
        if step == kill_at:
            under_way.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return train(self, batch, step)

    Validator.measure = measured  # type: ignore[method-assign]
    PPOStep.__call__ = trained  # type: ignore[method-assign]


def main(arguments: Sequence[str] | None = None) -> int:
    install(int(os.environ["KILL_AT_STEP"]))
    return main_ppo(arguments)


if __name__ == "__main__":
    sys.exit(main())
