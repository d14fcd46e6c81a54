"""Every error that a user can mend, in one tree: `except HybridFlowError` catches them all.

    HybridFlowError
    ├── ConfigError        a key, a value, or two values that do not go together
    ├── DataError          a file, a column or a row of the data
    ├── ModelError         a model folder, a tokenizer, an architecture we cannot run
    ├── RewardError        a reward function that raised, hung or returned something unusable
    ├── RolloutError       one request or the generation engine
    ├── TrainingError      the optimisation went wrong (loss or gradient not finite, too often)
    ├── CheckpointError    a checkpoint that is missing, damaged or does not fit
    └── WorkerError        a worker failed; holds role, rank and method
        └── WorkerLost     its process or its node is gone

A message says what was got, what was wanted and what to set. A broken invariant of our own is an `assert`.
"""

from __future__ import annotations


class HybridFlowError(Exception):
    """Base of all errors that a user can act on."""


class ConfigError(HybridFlowError):
    """A configuration key or value is wrong, or two of them do not go together."""

    problems: tuple[str, ...] = ()
    """A line for each problem, where there are several."""


class DataError(HybridFlowError):
    """A data file, column or row cannot be used."""


class ModelError(HybridFlowError):
    """A model folder, tokenizer or architecture cannot be used."""


class RewardError(HybridFlowError):
    """A reward function raised, ran past its deadline or returned something that is no score."""


class RolloutError(HybridFlowError):
    """A generation request or the engine that serves it failed."""


class TrainingError(HybridFlowError):
    """The optimisation cannot go on."""


class CheckpointError(HybridFlowError):
    """A checkpoint is missing, damaged or belongs to another run."""


class WorkerError(HybridFlowError):
    """A worker failed: `role`, `rank` and `method` say where."""

    def __init__(self, message: str, *, role: str = "", rank: int = -1, method: str = "") -> None:
        super().__init__(message)
        self.role = role
        self.rank = rank
        self.method = method


class WorkerLost(WorkerError):
    """A worker's process or node is lost with all that it held; a new one can go on from the newest
    checkpoint.
    """


BY_CALLBACK = 0
"""In place of a signal's number in a Stopped."""


class Stopped(KeyboardInterrupt):
    """A run ends because of a signal, or by a callback.

    It is a KeyboardInterrupt and none of our errors, so that code which catches every exception of a user's
    function lets it through.
    """

    def __init__(self, number: int, where: str, *, at_once: bool = False) -> None:
        super().__init__(number, where)
        self.number = number
        """The number of the signal, or BY_CALLBACK."""
        self.where = where
        """Where the run was, for example "in step 3/8"."""
        self.at_once = at_once
        """True: the run may have been anywhere in a step, so it saves nothing more."""
        self.message = f"interrupted {where}"
        """What the command says at the end."""


class WorkerTraceback(Exception):
    """The traceback of an error in the worker process it comes from, as text; the `__cause__` of the driver's
    error.
    """

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def install_extra(extra: str) -> str:
    """Return the words with which a message about a missing optional package says how to install it."""
    return f"install the extra {extra!r} (pip install 'hybridflow[{extra}]')"
