"""The solution and the tests as one program, for a service that runs one at a time.

Two processes, of which the tests' is the one that the service started: it reads standard input and writes
standard output, which the other cannot reach. The other is made before the input is read, and gives up
what would let it look into a process of the same user.
"""

from __future__ import annotations

import ctypes
import os
import socket

PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
CAPABILITY_VERSION_3 = 0x20080522

texts: dict[str, str] = {}
"""The programs of the two processes, put in when this text is made."""


def main() -> None:
    """Become the process of the tests, beside that of the solution."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    mine, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        os.dup2(mine.fileno(), 3)
        exec(compile(texts["tests"], "tests_main.py", "exec"), {"__name__": "__main__"})
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, kept in enumerate((nothing, nothing, nothing, theirs.fileno())):
        os.dup2(kept, number)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    no_capabilities = (ctypes.c_uint32 * 6)()
    libc.capset((ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), no_capabilities)
    exec(compile(texts["solution"], "solution_main.py", "exec"), {"__name__": "__main__"})
