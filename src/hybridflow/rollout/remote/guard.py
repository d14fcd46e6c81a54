"""A process around a server that ends the server when the process that started it is gone, even killed: then
this process's standard input closes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

_STOP_S = 10.0


def main(command: Sequence[str]) -> int:
    """Run the command in this process group and return its exit code."""
    child = subprocess.Popen(list(command), stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # meant for the group: the child ends, and this after it
    alone = threading.Event()
    threading.Thread(target=_until_alone, args=(alone,), daemon=True).start()
    code = child.wait()
    if alone.is_set():  # nobody else ends workers that outlive it
        _end_group()
    return code


def _until_alone(alone: threading.Event) -> None:
    while os.read(0, 1024):  # not sys.stdin, whose lock a waiting thread would hold when the interpreter ends
        pass
    alone.set()
    os.killpg(os.getpgrp(), signal.SIGTERM)
    _end_group()


def _end_group() -> None:
    """Wait for the other processes of the group to end, and kill the group after `_STOP_S` seconds."""
    end = time.monotonic() + _STOP_S
    while others(os.getpgrp()):
        if time.monotonic() > end:
            os.killpg(os.getpgrp(), signal.SIGKILL)
        time.sleep(0.05)


def others(group: int) -> list[int]:
    """Return the other processes of a process group; none where the system has no /proc."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, _, its_group = file.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found.append(int(file.parent.name))
    return [number for number in found if number != os.getpid()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
