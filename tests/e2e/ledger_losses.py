"""A run under Ray whose worker processes are killed at transitions of its ledger, or hang.

    python tests/e2e/ledger_losses.py PLAN key=value …

PLAN is a list as JSON, [[kind, number, pool], …], each of which happens once, in that order: SIGKILL to the
process of that pool when so many lines of a kind have been written in an attempt. An attempt suffers one, for
which a line `killed POOL PID` is printed.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridflow.controller.ray.backend import RayBackend
from hybridflow.trainer.schedules.ledger import Ledger

HANGS = "HYBRIDFLOW_TEST_HANGS"
"""Environment variable for `actor_rollout_ref.model.external_lib=ledger_losses`: CLASS.METHOD NUMBER FILE.
The call of that number hangs for ever, unless the file is there, which is written before.
"""


def install(plan: list[tuple[str, int, str]]) -> None:
    """Make the run of this process lose workers by the plan."""
    seen = Counter[str]()
    processes: dict[str, int] = {}  # of an attempt in which nothing was killed yet
    write = Ledger._write
    build = RayBackend._build

    def built(self: RayBackend, make: Any) -> None:
        build(self, make)
        seen.clear()
        processes.update({pool: process.pid for (pool, _), process in self._processes.items()})

    def writing(self: Ledger, lines: list[bytes]) -> None:
        write(self, lines)
        for line in lines:
            seen[json.loads(line)["kind"]] += 1
        if plan and processes and seen[plan[0][0]] >= plan[0][1]:
            _, _, pool = plan.pop(0)
            print(f"killed {pool} {processes[pool]}", flush=True)
            os.kill(processes[pool], signal.SIGKILL)
            processes.clear()

    RayBackend._build = built  # type: ignore[method-assign]
    Ledger._write = writing  # type: ignore[method-assign]


def hang(cls: type, method: str, number: int, once: Path) -> None:
    """Have a call of a method of workers hang, in the first process where it is called so often."""
    real = getattr(cls, method)
    calls = Counter[str]()

    @functools.wraps(real)
    def hanging(*args: Any, **named: Any) -> Any:
        calls[method] += 1
        if calls[method] >= number and not once.exists():
            once.touch()
            threading.Event().wait()
        return real(*args, **named)

    setattr(cls, method, hanging)


def silence(cls: type, server: type, number: int, once: Path) -> None:
    """Have an engine answer nothing any more from a step on, while everything else goes on.

    Steps count once `server` was resumed: those before are of the check of exact mode.
    """
    real = cls.step  # type: ignore[attr-defined]
    resume = server.resume  # type: ignore[attr-defined]
    calls = Counter[str]()
    serves = threading.Event()
    silent = threading.Event()

    @functools.wraps(resume)
    def resumed(*args: Any, **named: Any) -> Any:
        serves.set()
        return resume(*args, **named)

    def step(self: Any) -> Any:
        calls["step"] += serves.is_set()
        if calls["step"] >= number and not once.exists():
            once.touch()
            silent.set()
        if not silent.is_set():
            return real(self)
        threading.Event().wait(0.05)
        return []

    server.resume = resumed  # type: ignore[attr-defined]
    cls.step = step  # type: ignore[attr-defined]


def main(arguments: Sequence[str]) -> int:
    """Run, and lose."""
    from hybridflow.trainer.main_ppo import main as main_ppo

    install([tuple(loss) for loss in json.loads(arguments[0])])
    return main_ppo(list(arguments[1:]))


if HANGS in os.environ:
    from hybridflow.rollout.native.session import Session
    from hybridflow.workers.actor import ActorWorker
    from hybridflow.workers.rollout import RolloutWorker

    _what, _number, _once = os.environ[HANGS].split(" ")
    _class, _method = _what.split(".")
    if _class == "Session":
        silence(Session, RolloutWorker, int(_number), Path(_once))
    else:
        hang(
            {"ActorWorker": ActorWorker, "RolloutWorker": RolloutWorker}[_class],
            _method,
            int(_number),
            Path(_once),
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
