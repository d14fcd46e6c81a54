"""The workers of one process of any backend: they are built when they are first needed, and called by name.

backend ──invoke(role, method, call)──► WorkerHost ──► the role's Worker ──► its result
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from hybridflow.controller.dispatch import Call, registration_of
from hybridflow.controller.future import replace
from hybridflow.controller.place import Place, RankInfo
from hybridflow.controller.read_only import TensorVersions, isolate
from hybridflow.controller.worker import Factories, Worker
from hybridflow.observability.profiling import profiler
from hybridflow.protocol import DataProto


class WorkerHost:
    """The workers of a process, built by the factories that `make` returns.

    `infos` has the rank of each role that is placed here; by default these are all roles with a factory, with
    the rank of the place.
    """

    def __init__(
        self,
        place: Place,
        make: Callable[[WorkerHost], Factories],
        infos: Mapping[str, RankInfo] | None = None,
    ) -> None:
        self.place = place
        self._factories = dict(make(self))
        if infos is None:
            infos = {role: RankInfo(role, place.rank, place.world_size) for role in self._factories}
        self._infos = dict(infos)
        self._workers: dict[str, Worker] = {}
        self._building: list[str] = []
        self._lock = threading.RLock()  # requests may come while ordered calls begin

    def has(self, role: str) -> bool:
        """Return whether a role is placed in this process."""
        return role in self._infos

    def worker(self, role: str) -> Worker:
        """Return the worker of a role, and build it if it does not exist.

        A factory calls this for the worker whose module its own worker shares.
        """
        with self._lock:
            if role not in self._workers:
                self._workers[role] = self._build(role)
            return self._workers[role]

    def _build(self, role: str) -> Worker:
        assert role in self._infos, (
            f"there is no role {role!r} in this process: the roles are {sorted(self._infos)}"
        )
        assert role in self._factories, (
            f"nothing builds role {role!r}: there are factories for {sorted(self._factories)}"
        )
        assert role not in self._building, (
            f"roles need each other to be built: {' → '.join([*self._building, role])}"
        )
        info = self._infos[role]
        self._building.append(role)
        try:
            worker = self._factories[role](info)
        except Exception as error:
            error.add_note(f"while building role {role!r}, {self._where(role)}")
            raise
        finally:
            self._building.pop()
        worker.rank_info = info
        return worker

    def invoke(self, role: str, method: str, call: Call) -> Any:
        """Call a method of a role's worker; return its result, or None where the call does not return one.

        An exception gets a note that names role, method and rank. Raises AssertionError where the method
        wrote into a tensor among its arguments, which belong to the driver and may be read by other ranks, or
        returned a column that it is not registered to write.
        """
        bound = getattr(self.worker(role), method)
        args, kwargs = replace((call.args, call.kwargs), DataProto, DataProto.materialized)
        arguments: dict[str, Any] = {f"argument {index}": value for index, value in enumerate(args)}
        versions = TensorVersions(arguments | kwargs)
        try:
            with profiler.span(f"{role}.{method}"):
                result = bound(*isolate(args), **isolate(kwargs))
            registration_of(bound).check_written(result)
        except Exception as error:
            error.add_note(f"in {role}.{method}, {self._where(role)}")
            raise
        written = ", ".join(versions.changed())
        assert not written, (
            f"{role}.{method} wrote in place into {written} of its arguments, which belong to the driver: "
            "write to a clone"
        )
        if not call.returns:
            return None
        return isolate(result)

    def clear(self) -> None:
        """Drop all workers; they are built again when they are needed."""
        self._workers.clear()

    def _where(self, role: str) -> str:
        rank = f"rank {self._infos[role].rank}"
        if self.place.node:
            return f"{rank} on node {self.place.node}"
        return rank


Make: TypeAlias = Callable[[WorkerHost], Factories]
"""A function from the host of a process to the factories of its workers; each backend is given one."""
