"""The interface of all schedules: where the batches of training steps come from, and who gets new weights.

    Trainer ──next(step)──► BatchSource ──TrainBatch──► Trainer ──► step ──► publish(version) ──► BatchSource

A source owns its data and whatever makes rows of it. It never sees the step that learns from them.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from hybridflow.data.loader import StatefulLoader
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto

Row = TypeVar("Row")


@dataclass(frozen=True)
class TrainBatch:
    """The rows of one training step, with all that is known about how they were made."""

    rows: DataProto
    epoch: int
    """Passes over the data that were complete when the first of the rows was read."""
    metrics: Metrics = field(default_factory=Metrics)
    """Numbers of the rollout, the rewards and the filters that made these rows."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds that making these rows took, by the names under which they are logged (`timing_s/gen`)."""


class Resumable(Protocol):
    """State of the driver that a checkpoint keeps, as plain data and tensors.

    What `state_dict` has returned stays as it is when the run goes on.
    """

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> None: ...


class BatchSource(Resumable, Protocol):
    """Batches for the steps of a run, made with weights that the trainer publishes.

    `version` is the number of training steps whose weights have been published. `state_dict` says where a run
    resumes that has trained exactly that many steps: from one `publish` to the next it stays the same.
    """

    def next(self, step: int) -> TrainBatch:
        """Return the batch of training step number `step` (from 1)."""
        ...

    def publish(self, version: int) -> None:
        """Push the weights, called `version` from now on, and return when all engines have them."""
        ...

    def validating(self, version: int) -> AbstractContextManager[None]:
        """Return a context in which nothing is generated for training and no weights are published."""
        ...

    def open_items(self) -> str:
        """Return the unfinished work, for the message of an error; empty where nothing is."""
        ...

    def idle_shares(self) -> dict[str, float]:
        """Return metrics of the waits between sides, and of what passed between them, since the last call."""
        ...

    def close(self) -> None:
        """Release the processes and threads of the source; called once, at the end of a run."""
        ...


class LoaderSource(Generic[Row]):
    """A base of sources that read a loader in the trainer's thread, when they are asked for a batch.

    They make nothing ahead, so nothing has to be set aside while a validation runs.
    """

    def __init__(self, loader: StatefulLoader[Row]) -> None:
        self.loader = loader
        self._batches: Generator[list[Row], None, None] | None = None
        self._published: dict[str, Any] = {}
        self.reading: AbstractContextManager[Any] = nullcontext()
        """Held by another thread while it reads rows, so that a sampler does not learn meanwhile."""

    def batches(self) -> Iterator[list[Row]]:
        """Return the one iterator over the loader's batches, kept so that read-ahead processes start once."""
        if self._batches is None:
            self._batches = self.loader.endless()
        return self._batches

    def publish(self, version: int) -> None:
        """Note the place in the data: rows that are only read need no weights."""
        self._published = copy.deepcopy(self.place())

    def validating(self, version: int) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def place(self) -> dict[str, Any]:
        """Return where the next row is read, as plain data."""
        return self.loader.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data at the last `publish`, as plain data."""
        return self._published or self.place()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._published = {}
        self.go_to(state)

    def go_to(self, place: dict[str, Any]) -> None:
        """Read the next row at a place that `place` has given."""
        self._end_reading()
        self.loader.load_state_dict(place)

    def open_items(self) -> str:
        """Return nothing: what was begun is known to the caller that asked for the batch."""
        return ""

    def idle_shares(self) -> dict[str, float]:
        """Return nothing."""
        return {}

    def close(self) -> None:
        """End the processes that read ahead."""
        self._end_reading()

    def _end_reading(self) -> None:
        if self._batches is not None:
            self._batches.close()
        self._batches = None
