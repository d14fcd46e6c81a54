"""The errors of calls to an object in a worker process."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the data of a run need torch, and workers start without it
    from hybridflow.protocol.trajectory import FailureCause

MAX_TRACEBACK = 4000
"""Characters that are kept of a traceback, from its end, where the error stands."""


class CallFailed(Exception):
    """A call of an object in a worker process has no result."""

    cause: FailureCause = "environment"
    """Cause of the failure of a trajectory that cannot do without the result."""


class CallRaised(CallFailed):
    """The user's code raised, or what it returned does not pickle.

    `type_name` and `message` are the error's, `traceback_text` is the traceback of its process.
    """

    def __init__(self, type_name: str, message: str, traceback_text: str) -> None:
        super().__init__(f"{type_name}: {message}")
        if type_name == "DataError":
            self.cause = "data"
        self.type_name = type_name
        self.message = message
        self.traceback_text = traceback_text

    @classmethod
    def by(cls, error: BaseException) -> CallRaised:
        """Describe an error, which itself may not be able to travel."""
        text = "".join(traceback.format_exception(error)).strip()[-MAX_TRACEBACK:]
        return cls(type(error).__name__, str(error), text)

    def __reduce__(self) -> tuple[type[CallRaised], tuple[str, str, str]]:
        return CallRaised, (self.type_name, self.message, self.traceback_text)


class CallTooLong(CallFailed):
    """The call ran past its deadline, or found no free process in time."""

    cause = "deadline"


class ProcessLost(CallFailed):
    """The process ended during the call, or with the object that it held."""

    cause = "infrastructure"
