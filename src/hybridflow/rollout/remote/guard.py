"""A process around a server that ends it when the one that started it is gone, even killed: then our standard input closes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

_STOP_S = 10.0


def main(command: Sequence[str]) -> int:
    """Run the command, in whose process group this is; its exit code."""
    child = subprocess.Popen(list(command), stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # meant for the group: the child ends, and this after it
    threading.Thread(target=_until_alone, daemon=True).start()
    return child.wait()


def _until_alone() -> None:
    while os.read(0, 1024):  # not sys.stdin, whose lock a waiting thread would hold when the interpreter ends
        pass
    os.killpg(os.getpgrp(), signal.SIGTERM)
    time.sleep(_STOP_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
