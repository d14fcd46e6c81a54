"""A run of `main_ppo` that loses workers and nodes: SIGKILL to one just when a certain call has been sent to
all ranks in a certain step.

    python tests/e2e/losing_run.py LOSSES EVENTS key=value …

LOSSES is a list as JSON, [[step, "role.method", "worker" or a folder of `RayNodes`], …], each of which
happens once, in that order. Into the file EVENTS goes one line of JSON for each kill, for each loss that the
run noticed, and for its end, with the seconds of the clock.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ray_nodes import node_of, sigkill

HEAD = "node0"


@dataclass(frozen=True)
class Loss:
    """SIGKILL to a process of role `call` that is not on the head, or to its node."""

    step: int
    call: str
    nodes: str = ""
    """Folder of the `RayNodes` whose node is killed; empty: the process alone."""


@dataclass
class Outcome:
    """How a run went."""

    status: int
    log: str
    events: list[dict[str, Any]]

    def losses(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Each kill with what the run then noticed first."""
        kills = [event for event in self.events if event["event"] == "kill"]
        return [
            (kill, next(e for e in self.events if e["event"] == "lost" and e["at"] > kill["at"]))
            for kill in kills
        ]

    @property
    def ended_after(self) -> float:
        """Seconds from the last kill to the end of the command, when all has been said; Python's own farewell
        may take longer.
        """
        (end,) = [event["at"] for event in self.events if event["event"] == "end"]
        return float(end - max(event["at"] for event in self.events if event["event"] == "kill"))


class LosingRun:
    """A run under way, in a process of its own."""

    def __init__(self, folder: Path, losses: Sequence[Loss], arguments: Sequence[str]) -> None:
        folder.mkdir(parents=True)
        self.events = folder / "events.jsonl"
        self._log = folder / "log.txt"
        plan = json.dumps([[loss.step, loss.call, loss.nodes] for loss in losses])
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, plan, str(self.events), *arguments],
                env={**environment, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def until_said(self, pattern: str, seconds: float) -> None:
        """Wait until the log has `pattern`; AssertionError with the log if it does not come."""
        until = time.monotonic() + seconds
        while not re.search(pattern, self._log.read_text(), re.DOTALL):
            assert self._process.poll() is None, f"{pattern} was not said:\n{self._log.read_text()}"
            assert time.monotonic() < until, f"{pattern} was not said:\n{self._log.read_text()}"
            time.sleep(0.1)

    def outcome(self, seconds: float) -> Outcome:
        """Wait for the end; AssertionError with the log if it does not come in `seconds`."""
        try:
            status = self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end:\n{self._log.read_text()}") from None
        finally:
            self.kill()
        return Outcome(
            status, self._log.read_text(), [json.loads(line) for line in self.events.read_text().splitlines()]
        )

    def kill(self) -> None:
        """End it, if it has not ended."""
        self._process.kill()
        self._process.wait()


class _Noticed(logging.Handler):
    """Writes down when a log line says that a process is lost."""

    def __init__(self, say: Callable[..., None]) -> None:
        super().__init__(logging.ERROR)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        if " is lost" in record.getMessage():
            self._say(event="lost", message=record.getMessage())


def install(losses: list[Loss], say: Callable[..., None]) -> None:
    """Make the run of this process lose what is to be lost."""
    from hybridflow.controller.ray.backend import RayBackend
    from hybridflow.trainer.trainer import Trainer

    one = Trainer._train_step
    submit = RayBackend.submit
    now = {"step": 0}

    def counted(self: Any, step: int) -> Any:
        now["step"] = step
        return one(self, step)

    def losing(self: Any, role: str, method: str, calls: Any, lane: Any = "ordered") -> Any:
        parts = submit(self, role, method, calls, lane)
        if losses and (now["step"], f"{role}.{method}") == (losses[0].step, losses[0].call):
            nodes = losses.pop(0).nodes
            victim = next(process for process in self._processes.values() if process.place.node != HEAD)
            say(event="kill", node=victim.place.node, rank=victim.place.rank, pid=victim.pid)
            if nodes:
                sigkill(node_of(nodes, victim.place.node))
            else:
                os.kill(victim.pid, signal.SIGKILL)
        return parts

    # type: ignore[method-assign]
    Trainer._train_step = counted
    RayBackend.submit = losing


def main(plan: str, events: str, *arguments: str) -> int:
    """Run, and lose."""
    from hybridflow.trainer.main_ppo import main as main_ppo

    def say(**what: Any) -> None:
        with Path(events).open("a") as file:
            file.write(json.dumps({**what, "at": time.time()}) + "\n")

    install([Loss(*loss) for loss in json.loads(plan)], say)
    logging.getLogger("hybridflow").addHandler(_Noticed(say))
    status = main_ppo(list(arguments))
    say(event="end")
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
