"""One rank's result to come, as the driver holds it: done when the rank says so, fetched only when somebody
asks for the value.

A part that is an argument of another call travels as its reference (`Slot` marks its place), from process to
process.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from hybridflow.controller.future import Part
from hybridflow.controller.ray.transport import decode
from hybridflow.controller.read_only import TensorVersions
from hybridflow.errors import WorkerLost

FETCH_SECONDS = 300.0


@dataclass(frozen=True)
class Slot:
    """Stands for the result of an earlier call among the arguments on their way: `index` counts the
    references beside them.
    """

    index: int


class RayPart(Part):
    """A `Part` whose value lies in the object store."""

    def __init__(self, reference: Any, role: str, method: str, rank: int) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # the rank runs whatever happens here: nobody can cancel it
        self._reference, self.role, self.method, self.rank = reference, role, method, rank
        self._settling, self._fetching = threading.Lock(), threading.Lock()
        self._fetched: tuple[Any, TensorVersions] | None = None

    def settle(self, error: Exception | None = None) -> None:
        """The rank is done, or failed; whoever says so first is believed."""
        with self._settling:
            if self.done():
                return
            if error is None:
                self.set_result(None)
            else:
                self.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        """The rank's result, the same object at each call, or what it raised; TimeoutError after `timeout`
        seconds.

        Its tensors are views of shared memory. WorkerLost where the value went with its node.
        """
        super().result(timeout)
        with self._fetching:
            if self._fetched is None:
                try:
                    value = decode(ray.get(self._reference, timeout=FETCH_SECONDS))
                except (RayError, GetTimeoutError) as error:
                    message = (
                        f"the result of {self.role}.{self.method} on rank {self.rank} is lost, its "
                        f"node is gone: {error}"
                    )
                    raise WorkerLost(message, role=self.role, rank=self.rank, method=self.method) from error
                self._fetched = value, TensorVersions(value)
            return self._fetched[0]

    @property
    def reference(self) -> Any:
        """The `ObjectRef` of the packet, for another process. AssertionError where the driver wrote into what
        the other would read.
        """
        if self._fetched is not None:
            written = ", ".join(self._fetched[1].changed())
            assert not written, (
                f"{written} in the result of {self.role}.{self.method} was written in place: write to a clone"
            )
        return self._reference
