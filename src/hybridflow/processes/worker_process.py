"""A worker process with its keeper: started as a fresh interpreter, and ended with all that it has started.

A fresh interpreter neither forks the driver (threads, CUDA) nor runs its main module again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

START_TIMEOUT = 120.0
"""Seconds a worker may take to import what it needs."""
KEEPER_SECONDS = 15.0
"""Seconds a keeper may take to kill what is below it before it is killed itself."""

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from hybridflow.processes.keeper import "
    "main; main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])"
)


def keeper_command(module: str, file_descriptor: int) -> list[str]:
    """Return the words that start a keeper of this process, and below it `main(file_descriptor)` of a module;
    the keeper inherits the file descriptor.
    """
    words = [json.dumps(sys.path), str(file_descriptor), str(os.getpid()), module]
    return [sys.executable, "-c", _START, *words]


class WorkerProcess:
    """A process that runs `main(file_descriptor)` of a module, with one thread for each maths library.

    `socket` leads to it; whoever made the worker closes it.
    """

    def __init__(self, module: str) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        with theirs:
            self.keeper = subprocess.Popen(
                keeper_command(module, theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **threads},
                start_new_session=True,
            )

    def terminate(self) -> None:
        """Have the worker and every process below its keeper ended, without waiting for it."""
        self.keeper.terminate()

    def kill(self) -> None:
        """End the worker and every process below its keeper."""
        self.keeper.terminate()
        try:
            self.keeper.wait(KEEPER_SECONDS)
        except subprocess.TimeoutExpired:
            self.keeper.kill()
            self.keeper.wait()

    def has_ended(self) -> bool:
        """Whether the worker and its keeper have ended."""
        return self.keeper.poll() is not None

    def ending(self) -> str:
        """Describe how the worker ended, as the end of a sentence; its keeper ends as it did."""
        try:
            code = self.keeper.wait(1.0)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


def kill_all(workers: list[Any] | set[Any]) -> None:
    """End workers, all at the same time, and forget them."""
    ending = list(workers)
    workers.clear()
    for worker in ending:
        worker.terminate()  # all at once, before any is waited for
    for worker in ending:
        worker.kill()
