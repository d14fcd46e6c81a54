"""The edge of a command: what happened inside, as an exit status and one message on stderr."""

from __future__ import annotations

import errno
import functools
import sys
from collections.abc import Callable
from typing import ParamSpec

from hybridflow.errors import HybridFlowError, WorkerError

P = ParamSpec("P")

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def ends_in_status(main: Callable[P, int]) -> Callable[P, int]:
    """The command with its errors as status: 1 after one message for what the user can mend, 130 when interrupted."""

    @functools.wraps(main)
    def call(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except HybridFlowError as error:
            notes = getattr(error, "__notes__", []) if isinstance(error, WorkerError) else []  # where it hangs, what else failed
            sys.stderr.write("\n".join([f"{type(error).__name__}: {error}", *notes, ""]))
            return 1
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            sys.stderr.write(f"the disk is full ({error}): make room; a run started again goes on from its newest checkpoint\n")
            return 1
        except KeyboardInterrupt:
            sys.stderr.write("interrupted\n")
            return 130

    return call
