"""The process of the program: it gives up what it may do, layer by layer, and runs the code."""

from __future__ import annotations

import atexit
import os
import resource
import signal
import sys
import threading
import traceback
import types
from dataclasses import dataclass
from typing import Any

from hybridflow.sandbox import landlock, seccomp
from hybridflow.sandbox.system_calls import PR_SET_DUMPABLE, prctl, set_capabilities

MAIN = "main.py"
_OPEN_FILES = 256
_SPARE_PROCESSES = 8
"""Processes above the limit that the kernel allows, so that the watchdog sees who goes beyond it."""


@dataclass
class Room:
    """What a program may reach, and which layers it is put behind."""

    readable: list[str]
    writable: list[str]
    scratch: str
    private: bool
    """It has a private root and namespaces."""
    limit_processes: bool = True
    """The kernel counts the processes of this uid apart from others."""
    landlock: bool = True
    seccomp: bool = True


def run_program(code: str, arguments: list[str], limits: dict[str, Any], room: Room, ready: int) -> None:
    """Run the code as `main.py` in the working folder, with file descriptors 0, 1 and 2; ends the process.

    Something is written to the file descriptor `ready` once the process is locked up, before the code runs.
    """
    try:
        _lock_up(limits, room)
    except (OSError, ValueError, KeyError) as error:
        os.write(2, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.write(ready, b"1")
    os.close(ready)
    main = types.ModuleType("__main__")
    main.__file__ = MAIN
    sys.modules["__main__"] = main
    sys.argv = [MAIN, *arguments]
    sys.path.insert(0, os.getcwd())
    # what an interpreter does at its end, without taking itself apart, which would copy shared memory
    exit_code = _execute(code, main.__dict__)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        exit_code = exit_code or 120
    os._exit(exit_code)


def _execute(code: str, names: dict[str, Any]) -> int:
    """Run the code and return the exit code that a plain interpreter would have."""
    try:
        exec(compile(code, MAIN, "exec", dont_inherit=True), names)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException as error:
        # the traceback begins in the program
        trace = error.__traceback__
        traceback.print_exception(error.with_traceback(trace and trace.tb_next))
        return 1
    return 0


def _lock_up(limits: dict[str, Any], room: Room) -> None:
    os.setsid()
    os.chdir(room.scratch)
    os.environ.clear()
    os.environ.update(
        PATH="/usr/local/bin:/usr/bin:/bin",
        HOME=room.scratch,
        TMPDIR=room.scratch,
        LANG="C.UTF-8",
        OMP_NUM_THREADS="1",
    )
    cpu = int(limits["cpu_s"]) + 1
    megabyte = 1 << 20
    caps = {
        resource.RLIMIT_AS: (limits["address_space_mb"] * megabyte,) * 2,
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_FSIZE: (limits["scratch_mb"] * megabyte,) * 2,
        resource.RLIMIT_NOFILE: (_OPEN_FILES,) * 2,
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
    }
    if room.limit_processes:
        caps[resource.RLIMIT_NPROC] = (limits["processes"] + _SPARE_PROCESSES,) * 2
    for kind, cap in caps.items():
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            cap = (min(cap[0], most), min(cap[1], most))
        resource.setrlimit(kind, cap)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    set_capabilities(0)
    prctl(PR_SET_DUMPABLE, 1)
    if room.landlock:
        landlock.restrict(room.readable, room.writable)
    if room.seccomp:
        seccomp.install(local_sockets=room.private)
