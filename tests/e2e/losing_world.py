"""A run of agents under Ray whose worker processes are killed while their episodes are under way.

    python tests/e2e/losing_world.py PLAN key=value …

PLAN is a list as JSON, [[calls, pool], …], each of which happens once, in that order: SIGKILL to a process of
that pool when so many calls with an effect have been made, for which a line `killed POOL PID` is printed.
Each attempt loses one process. As a file of tools, this module also has the processes of a run read a model
of random weights as one that calls tools.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import counting_world
from counting_world import count

from hybridflow.controller.ray.backend import RayBackend

counting_world.speak()
assert count  # the tool of the run


def install(plan: list[tuple[int, str]]) -> None:
    """Make the run of this process lose workers by the plan."""
    build = RayBackend._build
    processes: dict[str, int] = {}  # of an attempt in which nothing was killed yet

    def built(self: RayBackend, make: Any) -> None:
        build(self, make)
        processes.update({pool: process.pid for (pool, _), process in self._processes.items()})

    def lose() -> None:
        for calls, pool in plan:
            while not processes or len(counting_world.effects()) < calls:
                time.sleep(0.005)
            print(f"killed {pool} {processes[pool]}", flush=True)
            os.kill(processes[pool], signal.SIGKILL)
            processes.clear()

    RayBackend._build = built  # type: ignore[method-assign]
    threading.Thread(target=lose, daemon=True).start()


def main(arguments: Sequence[str]) -> int:
    """Run, and lose."""
    from hybridflow.trainer.main_ppo import main as main_ppo

    install([tuple(loss) for loss in json.loads(arguments[0])])
    return main_ppo(list(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
