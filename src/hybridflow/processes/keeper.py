"""The parent of one worker: it runs no user code, and ends whatever the worker leaves behind.

    driver ──starts──► keeper ──forks──► worker ──the user's code──► processes of its own

On Linux the keeper is the subreaper of its descendants: a process that detaches itself (a session of its own,
a double fork) becomes the keeper's child when its parent ends, so it can be found and killed. The keeper
kills all descendants and ends when the worker ends, when the driver asks for it (SIGTERM) and when the
driver is gone; it then ends as the worker did. On other systems only the worker's process group is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

LOOK_SECONDS = 1.0
"""How often the keeper looks whether the driver lives, besides the signal that it gets."""

KILL_SECONDS = 10.0
"""How long the keeper goes on killing descendants that do not end or start new ones."""

_PARENT_GONE = signal.SIGHUP
_SIGNALS = (signal.SIGTERM, signal.SIGCHLD, _PARENT_GONE)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(file_descriptor: int, driver: int, module: str) -> None:
    """Fork the worker, `main` of `module` on the inherited socket `file_descriptor`, and watch over it.

    `driver` is the process id of the parent.
    """
    worker = importlib.import_module(module)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # the signal comes when the driver's thread ends that started us; whether the process did, getppid tells
    _prctl(_PR_SET_PDEATHSIG, _PARENT_GONE)
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    keeper = os.getpid()
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        wake.close()
        woken.close()
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == keeper:
            worker.main(file_descriptor)
        sys.exit()
    os.close(file_descriptor)
    status = _watch(child, driver, wake)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    _end_descendants()
    _end_as(status)


def _watch(child: int, driver: int, wake: socket.socket) -> int | None:
    """Wait until the worker ends (its wait status), or is to be ended (None)."""
    while True:
        status = _reap(child)
        if status is not None:
            return status
        if os.getppid() != driver:
            return None
        if select.select([wake], [], [], LOOK_SECONDS)[0] and signal.SIGTERM in wake.recv(4096):
            return None


def _reap(child: int) -> int | None:
    """Collect the children that have ended; the wait status of `child` if it is among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                found = status
    return found


def _end_descendants() -> None:
    """Kill every descendant, and those that they start meanwhile, until none is left."""
    deadline = time.monotonic() + KILL_SECONDS
    while living := living_descendants(os.getpid()):
        for pid in living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _reap(0)
        if time.monotonic() > deadline:
            return
        time.sleep(0.002)


def living_descendants(root: int) -> list[int]:
    """Process ids of the children of `root`, their children and so on, without those that have ended."""
    children: dict[int, list[int]] = {}
    ended = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # "pid (name) state ppid ...": the name may hold spaces and brackets
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        pid = int(folder.name)
        if fields[0] in "ZX":
            ended.add(pid)
        children.setdefault(int(fields[1]), []).append(pid)
    found = []
    waiting = [root]
    while waiting:
        own = children.get(waiting.pop(), [])
        found += own
        waiting += own
    return [pid for pid in found if pid not in ended]


def _end_as(status: int | None) -> None:
    """End this process with the worker's exit code, or by the signal that ended it."""
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(ImportError, ValueError, OSError):
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker has left a core file already
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status or 0) & 0xFF)


def _prctl(option: int, value: int) -> None:
    """Set an attribute of this process; systems other than Linux have no such call, and do without."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
