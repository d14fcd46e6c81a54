"""Limits that a worker process puts on itself before it runs a user's function: memory, processes, output.

The function is trusted but may be wrong: one that allocates, forks or prints without end costs its own
process, whose driver sees it end, and never the machine. This is no sandbox.
"""

from __future__ import annotations

import atexit
import logging
import os
import resource
import threading
import time
from pathlib import Path

from hybridflow.sandbox.process_tree import end_descendants, usage_of_descendants

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
_PAGE = os.sysconf("SC_PAGE_SIZE")


class OwnLimits:
    """Limits of this process and all that it starts; they cannot be taken back.

    Beyond `memory_mb` MiB above what it uses now, an allocation raises MemoryError; where its children
    together use that much, or more than `processes` of them run at once, they are killed, and then this
    process (by SIGKILL). What goes to standard output and error is passed on up to `output_kb` KiB, and
    dropped after that until `allow_output` is called, which belongs before each call of the function.
    """

    def __init__(self, *, memory_mb: int, processes: int, output_kb: int) -> None:
        self.dropped = 0
        """Bytes of output dropped since the last `allow_output`."""
        self._memory = memory_mb << 20
        self._processes = processes
        self._output = output_kb << 10
        self._left = self._output
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if Path("/proc/self/statm").exists():
            in_use = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
            _, most = resource.getrlimit(resource.RLIMIT_AS)
            cap = in_use + self._memory
            if most != resource.RLIM_INFINITY:
                cap = min(cap, most)
            resource.setrlimit(resource.RLIMIT_AS, (cap, cap))
            threading.Thread(target=self._watch, name="own-limits", daemon=True).start()
        for file_descriptor in (1, 2):
            passed_on = os.dup(file_descriptor)
            reading, writing = os.pipe()
            os.dup2(writing, file_descriptor)
            os.close(writing)
            thread = threading.Thread(target=self._pass_on, args=(reading, passed_on), daemon=True)
            thread.start()
            atexit.register(_let_drain, file_descriptor, passed_on, thread)

    def allow_output(self) -> None:
        """Pass on the next `output_kb` KiB."""
        self.dropped = 0
        self._left = self._output

    def _watch(self) -> None:
        proc = os.open("/proc", os.O_RDONLY)
        while True:
            time.sleep(LOOK_SECONDS)
            if not _has_children():
                continue  # the usual case, in which all of /proc need not be read
            usage = usage_of_descendants(os.getpid(), proc)
            if usage.memory > self._memory or usage.processes > self._processes:
                logger.error(
                    "a user's function has %d processes with %d MiB, allowed are %d with %d: its worker ends",
                    usage.processes,
                    usage.memory >> 20,
                    self._processes,
                    self._memory >> 20,
                )
                end_descendants(os.getpid(), proc)
                os.kill(os.getpid(), 9)

    def _pass_on(self, reading: int, passed_on: int) -> None:
        while part := os.read(reading, 1 << 16):
            allowed = part[: self._left]
            self._left -= len(allowed)
            self.dropped += len(part) - len(allowed)
            try:
                while allowed:
                    allowed = allowed[os.write(passed_on, allowed) :]
            except OSError:  # its reader is gone
                self._left = 0


def _has_children() -> bool:
    """Return whether this process has children, or that is not known."""
    try:
        return any(path.read_text() for path in Path("/proc/self/task").glob("*/children"))
    except OSError:  # a thread has ended meanwhile
        return True


def _let_drain(file_descriptor: int, passed_on: int, thread: threading.Thread) -> None:
    """Give up the pipe at the end of the process, and wait for what is in it."""
    os.dup2(passed_on, file_descriptor)
    thread.join(1.0)
