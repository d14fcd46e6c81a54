"""Calls from a worker process to the processes of another role: actor to actor, without the driver.

worker ──call_one──► actor handle of the rank ──► thread of the method's lane ──► result
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from ray.exceptions import RayError

from hybridflow.controller.dispatch import registration_of
from hybridflow.controller.future import Future, Part
from hybridflow.controller.ray.failure import Failure
from hybridflow.controller.ray.process import TASKS
from hybridflow.controller.ray.transport import Packet, decode, encode
from hybridflow.errors import WorkerLost

P = ParamSpec("P")
R = TypeVar("R")


class RayPeers:
    """The processes of a role, by their actor handles, which travel to a worker as an argument."""

    def __init__(self, role: str, actors: Sequence[Any]) -> None:
        self.role = role
        self._actors = actors

    def call_one(
        self, rank: int, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]:
        """See `Peers.call_one`."""
        name = method.__name__
        task = getattr(self._actors[rank], TASKS[registration_of(method).lane])
        _, result = task.remote(self.role, name, True, encode((args, kwargs)), [])
        part: Part = concurrent.futures.Future()
        result.future().add_done_callback(partial(self._settle, part, name, rank))
        return Future({rank: part}, lambda results: results[0], role=self.role, method=name)

    def _settle(
        self, part: Part, method: str, rank: int, answer: concurrent.futures.Future[Packet | Failure]
    ) -> None:
        try:
            packet = answer.result()
        except RayError as error:
            message = f"{self.role}.{method} on rank {rank} was not answered: {error}"
            part.set_exception(WorkerLost(message, role=self.role, rank=rank, method=method))
            return
        if isinstance(packet, Failure):
            part.set_exception(packet.exception(self.role, method, rank))
        else:
            part.set_result(decode(packet))
