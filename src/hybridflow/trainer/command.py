"""The edge of a command: an error becomes an exit status and one message on stderr."""

from __future__ import annotations

import atexit
import errno
import functools
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import ParamSpec

from hybridflow.errors import HybridFlowError, Stopped, WorkerError, WorkerLost, WorkerTraceback

P = ParamSpec("P")
NOTE_LENGTH = 1000
SIGNALLED = 128
"""Exit status of a command that a signal has ended, less the number of the signal."""

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def ends_in_status(main: Callable[P, int]) -> Callable[P, int]:
    """Return the command with errors as exit status: 1 for a user's, 130 or 143 after SIGINT or SIGTERM."""

    @functools.wraps(main)
    def call(*args: P.args, **kwargs: P.kwargs) -> int:
        # else Python's end looks through half a million objects of torch and transformers, again and again: a
        # second where the machine is quiet, and a minute where it is not, after the last word of the command
        atexit.register(gc.freeze)
        try:
            return main(*args, **kwargs)
        except HybridFlowError as error:
            sys.stderr.write("\n".join([*_lines_of(error), ""]))
            return 1
        except BrokenPipeError:  # as `hybridflow … | head` makes it: the reader has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python's end flushes once more
            return SIGNALLED + signal.SIGPIPE
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            sys.stderr.write(
                f"the disk is full ({error}): make room; a run started again goes on from its newest "
                "checkpoint\n"
            )
            return 1
        except Stopped as stopped:
            sys.stderr.write(f"{stopped.message}\n")
            return SIGNALLED + stopped.number
        except KeyboardInterrupt:
            sys.stderr.write("interrupted\n")
            return SIGNALLED + signal.SIGINT

    return call


def _lines_of(error: HybridFlowError) -> Iterator[str]:
    """Yield the message, its notes, and for a worker that failed its traceback and stacks."""
    whole = isinstance(error, WorkerError)
    if whole and not isinstance(error, WorkerLost) and isinstance(error.__cause__, WorkerTraceback):
        yield str(error.__cause__).strip()
    yield f"{type(error).__name__}: {error}"
    for note in getattr(error, "__notes__", []):
        yield note if whole else _shortened(note)


def _shortened(note: str) -> str:
    first = note.partition("\n")[0]
    if len(first) <= NOTE_LENGTH:
        return first
    return first[:NOTE_LENGTH] + " …"
