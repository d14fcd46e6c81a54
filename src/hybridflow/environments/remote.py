"""Environments in a separate process, whose packages may clash with ours: JSON lines over its stdio.

    {"method": "reset", "seed": 1, "step_seed": 2, "row": {…}} ──► {"observation": …}
    {"method": "step", "text": "…"} ──► {"observation": …, "reward": 0.0, "done": false, "extra": {…}}

An observation is a text, a list of messages, or a list of token ids. {"error": "…"} is raised here. When its
stdin ends, the process ends. One process serves one trajectory at a time, and `reset` begins the next one.
"""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.environments.base import Environment, Observation, Step
from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.processes.supervisor import SupervisedProcess

WORLDS = Path(__file__).with_name("worlds.py")
"""The program of `World`, which needs nothing of ours."""


class RemoteError(HybridFlowError):
    """The other process reported an error, gave no answer in time, or ended."""


class RemoteEnvironment(Environment):
    """The environment that the process `command` serves; `reset` starts a process, or takes one that is free.

    An answer may take `deadline_s` seconds. What goes wrong is raised as RemoteError.
    """

    def __init__(self, command: Sequence[str], deadline_s: float = 300.0) -> None:
        if isinstance(command, str) or not command:
            raise ConfigError(f"command: got {command!r}, wanted a list of words, as in [python, world.py]")
        self.command = tuple(map(str, command))
        self.deadline_s = deadline_s
        self._process: _Process | None = None

    def reset(self, row: Mapping[str, Any]) -> Observation:
        """Begin a trajectory in the other process; what JSON can not write of the row is sent as text."""
        try:
            self._process = _free[self.command].pop()
        except IndexError:
            self._process = _Process(self.command)
        answer = self._ask(method="reset", seed=self.seed, step_seed=self.step_seed, row=dict(row))
        observation: Observation = answer["observation"]
        return observation

    def step(self, text: str) -> Step:
        """Send a turn of the model, and return the answer."""
        answer = self._ask(method="step", text=text)
        return Step(
            answer.get("observation", ""),
            float(answer.get("reward") or 0.0),
            bool(answer.get("done")),
            answer.get("extra") or {},
        )

    def close(self) -> None:
        """Leave the process to the next trajectory, or end it where it has not answered as it should."""
        process = self._process
        self._process = None
        if process is None:
            return
        if process.owes_answer:
            process.end()
        else:
            _free[self.command].append(process)

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process is not None, "reset comes first"
        return self._process.ask(request, self.deadline_s)


class World(RemoteEnvironment):
    """An environment of another library: `world` is gymnasium, textarena or openenv.

    `python` is the interpreter that has the library (None: this one); `options` are those of the class in
    `worlds.py`.
    """

    def __init__(
        self, world: str, python: str | None = None, deadline_s: float = 300.0, **options: Any
    ) -> None:
        super().__init__([python or sys.executable, str(WORLDS), world, json.dumps(options)], deadline_s)


class _Process:
    """The other process; a thread reads its answers, so that waiting for one has a deadline."""

    def __init__(self, command: Sequence[str]) -> None:
        if shutil.which(command[0]) is None:
            raise RemoteError(f"{command[0]} can not be started: there is no such program")
        self._process = SupervisedProcess(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        self._name = " ".join(command)
        self.owes_answer = False
        """Whether a request has no answer yet, or none that can be used."""
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="answers of a world", daemon=True).start()

    def ask(self, request: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """Return the answer to a request. Raises RemoteError; the process is then of no further use."""
        stdin = self._process.keeper.stdin
        assert stdin is not None, "it was started with a pipe"
        self.owes_answer = True
        try:
            stdin.write(json.dumps(request, default=str) + "\n")
            stdin.flush()
            line = self._lines.get(timeout=deadline_s)
            answer = json.loads(line or "null")
        except queue.Empty:
            raise RemoteError(f"{self._name}: no answer within {deadline_s:g} seconds") from None
        except (OSError, ValueError) as error:
            raise RemoteError(f"{self._name}: {error}") from error
        if not isinstance(answer, dict):
            raise RemoteError(f"{self._name} has ended, or wrote no JSON object: {line.strip()[:200]!r}")
        if "error" in answer:
            raise RemoteError(f"{self._name}: {answer['error']}")
        self.owes_answer = False
        return answer

    def end(self) -> None:
        """End the process, with all that it has started."""
        self._process.kill()

    def _read(self) -> None:
        stdout = self._process.keeper.stdout
        assert stdout is not None, "it was started with a pipe"
        for line in stdout:
            self._lines.put(line)
        self._lines.put("")


_free: dict[tuple[str, ...], list[_Process]] = defaultdict(list)
"""Processes without a trajectory, by their commands."""
