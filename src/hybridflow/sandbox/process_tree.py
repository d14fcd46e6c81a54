"""What a process and its descendants use, read from /proc: for watchdogs that have no cgroup."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class TreeUsage:
    """What the descendants of a process use at a moment."""

    processes: int
    """Number of processes and threads, those that have ended and wait for their parent among them."""
    memory: int
    """Bytes that are resident; pages that several processes share count for each of them."""
    cpu_s: float
    """Seconds of CPU time of the descendants, those that have ended included."""
    pids: tuple[int, ...]
    """Those that have not ended."""


def usage_of_descendants(root: int, proc: int) -> TreeUsage:
    """Return the resource usage of the descendants of a process. `proc` is a file descriptor of /proc."""
    children: dict[int, list[int]] = {}
    seen: dict[int, list[str]] = {}
    for name in os.listdir(proc):
        if not name.isdigit():
            continue
        try:
            file_descriptor = os.open(f"{name}/stat", os.O_RDONLY, dir_fd=proc)
        except OSError:  # it has ended meanwhile
            continue
        try:
            text = os.read(file_descriptor, 4096).decode(errors="replace")
        except OSError:
            continue
        finally:
            os.close(file_descriptor)
        # "pid (name) state ppid ...": the name may hold spaces and brackets
        fields = text.rpartition(")")[2].split()
        seen[int(name)] = fields
        children.setdefault(int(fields[1]), []).append(int(name))
    processes = 0
    memory = 0
    ticks = 0
    pids = []
    if root in seen:
        ticks += int(seen[root][13]) + int(seen[root][14])  # of children that it has waited for
    waiting = list(children.get(root, []))
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, [])
        fields = seen[pid]
        if fields[0] not in "ZX":
            pids.append(pid)
        processes += max(1, int(fields[17]))
        memory += int(fields[21]) * _PAGE
        ticks += sum(int(each) for each in fields[11:15])
    return TreeUsage(processes, memory, ticks / _TICKS, tuple(pids))


def end_descendants(root: int, proc: int, seconds: float = 5.0) -> None:
    """Kill the descendants of this process (`root`, its pid in `proc`) until none is left, or time is up."""
    deadline = time.monotonic() + seconds
    while (living := usage_of_descendants(root, proc).pids) and time.monotonic() < deadline:
        for pid in living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)
