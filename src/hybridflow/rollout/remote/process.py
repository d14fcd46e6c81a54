"""A server that this process starts: it waits until the server answers, ends it with itself, and keeps its
log for error messages.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hybridflow.errors import RolloutError
from hybridflow.processes.supervisor import SupervisedProcess
from hybridflow.rollout.remote.http import Address, Refused, ServerGone

_STOP_S = 10.0
"""Seconds a server has to end itself and its workers."""


class ServerProcess:
    """A running server. `command`: its whole command line. `engine`: its name in messages."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, engine: str) -> None:
        self.engine = engine
        handle, path = tempfile.mkstemp(prefix=f"hybridflow_{engine}_", suffix=".log")
        self.log = Path(path)
        with os.fdopen(handle, "wb") as log:
            self._process = SupervisedProcess(
                command,
                grace_s=_STOP_S,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.pid = self._process.keeper.pid
        atexit.register(self.stop)

    @classmethod
    def start(
        cls, command: Sequence[str], environment: Mapping[str, str], *, engine: str, timeout: float
    ) -> tuple[Address, ServerProcess]:
        """Start a server on a free port that only this machine reaches; RolloutError where it does not start.
        `command`: its command line without host and port. `timeout`: seconds until it answers.
        """
        port = free_port()
        process = cls([*command, "--host", "127.0.0.1", "--port", str(port)], environment, engine=engine)
        address = Address(f"http://127.0.0.1:{port}")
        process.wait_until_ready(address, timeout)
        return address, process

    def exit_code(self) -> int | None:
        """Return the exit code, or None while the server runs."""
        return self._process.keeper.poll()

    def wait_until_ready(self, address: Address, timeout: float) -> None:
        """Wait until the server answers; RolloutError with the end of its log where it does not."""
        end = time.monotonic() + timeout
        problem = "did not start"
        while self.exit_code() is None:
            try:
                address.call("/health", timeout=5.0, method="GET")
                return
            except (ServerGone, Refused):
                time.sleep(0.5)
            if time.monotonic() > end:
                key = "actor_rollout_ref.rollout.server.start_timeout"
                problem = f"did not answer within {timeout:.0f} s ({key})"
                break
        words = self.last_words()
        self.stop()
        raise RolloutError(f"the {self.engine} server {problem}{words}")

    def last_words(self) -> str:
        """Return the exit code, if the server has ended, and the end of its log."""
        try:
            code: int | None = self._process.keeper.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            code = None
        how = "" if code is None else f" (exit code {code})"
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        if not lines:
            return how
        return f"{how}; its log {self.log} ends: {' | '.join(lines[-3:])[-500:]}"

    def stop(self) -> None:
        """End the server and its workers; a second call does nothing."""
        if self.exit_code() is None:
            self._process.kill()
            self.log.unlink(missing_ok=True)
        atexit.unregister(self.stop)


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
