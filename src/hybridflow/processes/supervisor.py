"""The one supervisor of programs that this process starts: each has a keeper, which ends all that it starts.

    SupervisedProcess ──starts──► keeper (keeper.py) ──forks──► `main` of a module, or a command ──► …

Workers (`hosts.py`: tools, environments, rewards), commands of agents, programs of environments, MCP servers
and the servers of engines are started here. A keeper is a fresh interpreter: that neither forks the driver
(threads, CUDA) nor runs its main module again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

KEEPER_SECONDS = 15.0
"""Seconds a keeper may take to kill what is below it before it is killed itself."""

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from hybridflow.processes.keeper import "
    "main; main(int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])"
)


def keeper_command(words: Sequence[str], *, file_descriptor: int = -1, grace_s: float = 0.0) -> list[str]:
    """Return the words that start a keeper of this process, see `keeper.main`."""
    arguments = [json.dumps(sys.path), str(os.getpid()), str(grace_s), str(file_descriptor)]
    return [sys.executable, "-c", _START, *arguments, *words]


class SupervisedProcess:
    """A command below its keeper, or `main(file_descriptor)` of the module `words[0]`.

    `grace_s` is how long the program may take to end after SIGTERM; 0: it is killed at once. `popen`: more of
    subprocess.Popen's arguments. A command that there is not ends with exit code 1, and says so on stderr.
    """

    def __init__(
        self, words: Sequence[str], *, file_descriptor: int = -1, grace_s: float = 0.0, **popen: Any
    ) -> None:
        self._kill_s = grace_s + KEEPER_SECONDS
        self.keeper: subprocess.Popen[Any] = subprocess.Popen(
            keeper_command(words, file_descriptor=file_descriptor, grace_s=grace_s),
            start_new_session=True,
            **popen,
        )

    def terminate(self) -> None:
        """Ask the keeper to end every process below it, without waiting."""
        self.keeper.terminate()

    def kill(self) -> None:
        """End every process below the keeper."""
        self.keeper.terminate()
        try:
            self.keeper.wait(self._kill_s)
        except subprocess.TimeoutExpired:
            self.keeper.kill()
            self.keeper.wait()

    def has_ended(self) -> bool:
        """Whether the program and its keeper have ended."""
        return self.keeper.poll() is not None

    def ending(self) -> str:
        """Describe how the program ended, as the end of a sentence; its keeper ends as it did."""
        try:
            code = self.keeper.wait(1.0)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"
