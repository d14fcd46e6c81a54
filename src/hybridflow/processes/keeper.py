"""The parent of one program: it runs no user code, and ends whatever the program leaves behind.

    driver ──starts──► keeper ──forks──► worker or command ──the user's code──► processes of its own

On Linux the keeper is the subreaper of its descendants: a process that detaches itself (its own session,
a double fork) becomes the keeper's child when its parent ends, so it can be found and killed. The keeper
kills all descendants and ends when the program ends, when the driver asks for it (SIGTERM) and when the
driver is gone; it then ends as the program did. On other systems only the program's process group is killed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence

from hybridflow.sandbox.process_tree import end_descendants
from hybridflow.sandbox.system_calls import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl

LOOK_SECONDS = 1.0
"""How often the keeper looks whether the driver lives, besides the signal that it gets."""

KILL_SECONDS = 10.0
"""How long the keeper goes on killing descendants that do not end or start new ones."""

_PARENT_GONE = signal.SIGHUP
_SIGNALS = (signal.SIGTERM, signal.SIGCHLD, _PARENT_GONE)
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def main(driver: int, grace_s: float, file_descriptor: int, words: Sequence[str]) -> None:
    """Fork the program and watch over it: `main` of the module `words[0]` on an inherited file descriptor, or
    where that is negative the command `words`.

    `driver` is the process id of the parent. A program that is to be ended gets SIGTERM first where it has
    `grace_s` seconds to end by itself, with all that it has started.
    """
    worker = importlib.import_module(words[0]) if file_descriptor >= 0 else None
    with contextlib.suppress(OSError, AttributeError):  # only Linux has this call
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        # the signal comes when the driver's thread ends that started us; whether the process did, getppid
        # shows
        prctl(PR_SET_PDEATHSIG, _PARENT_GONE)
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
        with contextlib.suppress(OSError, AttributeError):
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            sys.exit()
        if worker is None:
            for number in _IGNORED_BY_PYTHON:
                signal.signal(number, signal.SIG_DFL)
            os.execvp(words[0], list(words))
        worker.main(file_descriptor)
        sys.exit()
    if worker is not None:
        os.close(file_descriptor)
    status = _watch(child, driver, wake)
    if status is None and grace_s:
        _signal_group(child, signal.SIGTERM)
        _wait_for_all(grace_s)
    _signal_group(child, signal.SIGKILL)
    with contextlib.suppress(FileNotFoundError):  # a system without /proc
        end_descendants(keeper, os.open("/proc", os.O_RDONLY), KILL_SECONDS)
    _end_as(status)


def _watch(child: int, driver: int, wake: socket.socket) -> int | None:
    """Wait until the program ends (its wait status), or is to be ended (None)."""
    while True:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    return ended[1]
        if os.getppid() != driver:
            return None
        if select.select([wake], [], [], LOOK_SECONDS)[0] and signal.SIGTERM in wake.recv(4096):
            return None


def _signal_group(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, number)


def _wait_for_all(seconds: float) -> None:
    """Wait until no descendant is left: as their parents end, all become children of the keeper."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.05)


def _end_as(status: int | None) -> None:
    """End this process with the program's exit code, or by the signal that ended it."""
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(ImportError, ValueError, OSError):
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has left a core file already
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status or 0) & 0xFF)
