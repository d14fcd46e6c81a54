"""A guard for reward functions that run in the trainer's process: `os._exit` in one does not end the run.

`os._exit(0)` would end a run in the middle with status 0, which a scheduler takes for success. The guard is
in place while the function is loaded, too, so that `from os import _exit` in its file gets the guarded one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

from hybridflow.errors import RewardError


class ExitGuard:
    """Replaces `os._exit` from `install` to `remove`.

    In a thread inside `scoring` a call raises RewardError. In another thread, while some thread is inside, a
    call with status 0 ends the process with status 1 and a message. Elsewhere, and in forks, it is the real
    one.
    """

    def __init__(self) -> None:
        self._scoring: list[int] = []

    def install(self) -> None:
        """Put the guard in place of `os._exit`."""
        self._real = os._exit
        self._process = os.getpid()
        os._exit = self._guarded

    def remove(self) -> None:
        """Put back what stood there before `install`."""
        if os._exit == self._guarded:
            os._exit = self._real

    @contextlib.contextmanager
    def scoring(self) -> Iterator[None]:
        """A reward function runs in this thread."""
        thread = threading.get_ident()
        self._scoring.append(thread)
        try:
            yield
        finally:
            self._scoring.remove(thread)

    def _guarded(self, status: int) -> NoReturn:
        if os.getpid() == self._process and self._scoring:
            if threading.get_ident() in self._scoring:
                raise RewardError(
                    f"the reward function called os._exit({status}), which would have ended the run: with "
                    "reward.num_workers=0 it runs in the run's own process; return a score, or raise an error"
                )
            if status == 0:
                sys.stderr.write(
                    "os._exit(0) was called in a thread while the reward function ran "
                    "(reward.num_workers=0): the run ends with status 1, because it is not finished\n"
                )
                sys.stderr.flush()
                status = 1
        self._real(status)
