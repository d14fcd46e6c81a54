"""A few processes that are ranks of one gloo group, for tests of what happens between ranks; commands in
processes of their own.

    def gather(rank: int, number: int) -> list[int]: ...      # a function of a module, so that the other
    process finds it

    def test_gather(two_ranks: Ranks) -> None:
        assert two_ranks.run(gather, 3) == [[0, 3], [0, 3]]   # one result a rank

The processes live as long as the test session and serve one call after the other. Results travel by pickle:
return numbers, lists and tensors, not models. They are forked from one process that has imported torch and
this package and has done nothing else, so that starting them, also again after a failure, takes no import.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

DEADLINE_S = 900.0
IMPORTED = ("torch.distributed.tensor", "hybridflow.workers.rollout", "hybridflow.trainer.ppo.build")
"""What processes of `forked()` find imported."""


def forked() -> Any:
    """A multiprocessing context whose processes begin with `IMPORTED`, and nothing of the test's process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


@dataclass(frozen=True)
class Ended:
    """The exit code and the output of a command."""

    returncode: int
    output: str
    """Standard output and standard error, in turn."""


class Command:
    """A command of this package in a process of its own that need not import anything.

    It runs `main(arguments)` of a module, as `python -m MODULE` would, with this environment and standard
    input; what it prints goes to the file `log`.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str],
        typed: str = "",
    ) -> None:
        self._log = log
        given = (module, list(arguments), str(log), dict(environment), typed)
        self._process = forked().Process(target=_be_command, args=given)
        self._process.start()

    def wait(self) -> Ended:
        """Wait for its end."""
        self._process.join()
        return Ended(self._process.exitcode, self._log.read_text())

    def kill(self) -> None:
        """End it, if it still runs."""
        self._process.kill()
        self._process.join()


def _be_command(module: str, arguments: list[str], log: str, environment: dict[str, str], typed: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    reading, writing = os.pipe()
    os.write(writing, typed.encode())
    os.close(writing)
    os.dup2(reading, 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  (multiprocessing has closed it)
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [module, *arguments]
    sys.exit(importlib.import_module(module).main(arguments))


class Ranks:
    """`world_size` processes in one gloo group; a call that fails or hangs on a rank ends them all, and the
    next call starts new ones.

    `device`: kind of accelerator whose tensors their group takes too, by the table of accelerators.
    """

    def __init__(self, world_size: int, device: str = "cpu") -> None:
        self.world_size = world_size
        self.device = device
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def run(self, function: Callable[..., Any], *args: Any, deadline: float = DEADLINE_S) -> list[Any]:
        """`function(rank, *args)` on every rank; its results in the order of ranks. RuntimeError with the
        first rank's traceback.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        missing = dict(zip(self._pipes, range(self.world_size)))
        until = time.monotonic() + deadline
        while missing:
            ready = wait(list(missing), max(0.0, until - time.monotonic()))
            if not ready:
                failures |= {rank: f"rank {rank} did not answer" for rank in missing.values()}
                break
            for pipe in ready:
                rank = missing.pop(pipe)
                try:
                    done, result = pipe.recv()
                except EOFError:
                    done = False
                    result = "its process died"
                if done:
                    results[rank] = result
                    continue
                failures[rank] = f"rank {rank}: {result}"
                # a rank that failed leaves the others waiting for it: they get a moment, not all the time
                until = min(until, time.monotonic() + 5.0)
        if failures:
            self.stop()
            raise RuntimeError(
                "\n".join(sorted(failures.values(), key=lambda text: ("did not answer" in text, text)))
            )
        return [results[rank] for rank in range(self.world_size)]

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes = []
        self._processes = []

    def _start(self) -> None:
        context = forked()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            given = (rank, self.world_size, port, theirs, self.device)
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)


def _serve(rank: int, world_size: int, port: int, pipe: Connection, device: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from hybridflow.distributed import process_group
    from hybridflow.distributed.device import resolve_device

    torch.set_num_threads(1)
    process_group.init(rank, world_size, "127.0.0.1", port, resolve_device(device), DEADLINE_S)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        except Exception:  # what came could not be unpickled here
            pipe.send((False, traceback.format_exc()))
            continue
        try:
            pipe.send((True, function(rank, *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
