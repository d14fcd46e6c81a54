"""The edge of a command: what happened inside, as an exit status and one message on stderr."""

from __future__ import annotations

import errno
import functools
import sys
from collections.abc import Callable, Iterator
from typing import ParamSpec

from hybridflow.errors import HybridFlowError, WorkerError, WorkerLost, WorkerTraceback

P = ParamSpec("P")
NOTE_LENGTH = 300

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def ends_in_status(main: Callable[P, int]) -> Callable[P, int]:
    """The command with its errors as status: 1 after one message for what the user can mend, 130 when
    interrupted.
    """

    @functools.wraps(main)
    def call(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except HybridFlowError as error:
            sys.stderr.write("\n".join([*_told(error), ""]))
            return 1
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            sys.stderr.write(
                f"the disk is full ({error}): make room; a run started again goes on from its newest "
                "checkpoint\n"
            )
            return 1
        except KeyboardInterrupt:
            sys.stderr.write("interrupted\n")
            return 130

    return call


def _told(error: HybridFlowError) -> Iterator[str]:
    """The message, then where it was and what other ranks said, a line each; of a worker that failed, also
    its traceback and stacks.
    """
    whole = isinstance(error, WorkerError)
    if whole and not isinstance(error, WorkerLost) and isinstance(error.__cause__, WorkerTraceback):
        yield str(error.__cause__).strip()
    yield f"{type(error).__name__}: {error}"
    for note in getattr(error, "__notes__", []):
        yield note if whole else _shortened(note)


def _shortened(note: str) -> str:
    first = note.partition("\n")[0]
    return first if len(first) <= NOTE_LENGTH else first[:NOTE_LENGTH] + " …"
