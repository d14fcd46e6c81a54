"""The driver's future for one rank's result: it is done when the rank says so, and the value is fetched only
when it is asked for.

A part that is an argument of another call travels as a reference from process to process; `Slot` marks its
place among the arguments.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from hybridflow.controller.future import Part
from hybridflow.controller.local import TensorVersions
from hybridflow.controller.ray.transport import Held, decode
from hybridflow.errors import WorkerLost

if TYPE_CHECKING:
    from hybridflow.controller.ray.transfer_queue import TransferQueue

FETCH_SECONDS = 300.0


@dataclass(frozen=True)
class Slot:
    """A placeholder for the result of an earlier call; `index` counts the references that travel beside the
    arguments.
    """

    index: int


class Traffic:
    """A count of the bytes that the driver sends and receives by value, over all its threads."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count the bytes of a packet."""
        with self._lock:
            self._num_bytes += num_bytes

    def taken(self) -> int:
        """Return the count since this was asked last."""
        with self._lock:
            found = self._num_bytes
            self._num_bytes = 0
            return found


class RayPart(Part):
    """A `Part` whose value is in Ray's object store, or in `queue`, which has it until the part is gone."""

    def __init__(
        self,
        reference: Any,
        role: str,
        method: str,
        rank: int,
        traffic: Traffic,
        queue: TransferQueue | None = None,
    ) -> None:
        super().__init__()
        self._traffic = traffic
        self._queue = queue
        self.set_running_or_notify_cancel()  # the rank runs in any case: nobody can cancel it
        self._reference = reference
        self.role = role
        self.method = method
        self.rank = rank
        self._settling = threading.Lock()
        self._fetching = threading.Lock()
        self._fetched: tuple[Any, TensorVersions] | None = None

    def settle(self, error: Exception | None = None) -> None:
        """Mark the result as done, or as failed with `error`; later calls have no effect."""
        with self._settling:
            if self.done():
                return
            if error is None:
                self.set_result(None)
            else:
                self.set_exception(error)

    def is_held(self, held: Held) -> None:
        """Take note that the value is in the queue."""
        assert self._queue is not None, "values are held where there is a queue"
        weakref.finalize(self, self._queue.drop, held)

    def result(self, timeout: float | None = None) -> Any:
        """Return the rank's result, the same object at each call, or raise what the rank raised.

        Its tensors are views of shared memory. Raises TimeoutError after `timeout` seconds, and WorkerLost
        where the value was lost with its node.
        """
        super().result(timeout)
        with self._fetching:
            if self._fetched is None:
                try:
                    packet = ray.get(self._reference, timeout=FETCH_SECONDS)
                except (RayError, GetTimeoutError) as error:
                    message = (
                        f"the result of {self.role}.{self.method} on rank {self.rank} was lost with its "
                        f"node: {error}"
                    )
                    raise WorkerLost(message, role=self.role, rank=self.rank, method=self.method) from error
                if self._queue is not None:
                    packet = self._queue.opened(packet)
                self._traffic.add(packet.nbytes)
                value = decode(packet)
                self._fetched = value, TensorVersions(value)
            return self._fetched[0]

    @property
    def reference(self) -> Any:
        """The `ObjectRef` of the packet, for another process.

        Raises AssertionError where the driver has written into a tensor that the other process would read.
        """
        if self._fetched is not None:
            written = ", ".join(self._fetched[1].changed())
            assert not written, (
                f"{written} in the result of {self.role}.{self.method} was written in place: write to a clone"
            )
        return self._reference
