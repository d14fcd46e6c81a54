"""The workers of one process, whichever backend the process belongs to: built when first needed, called by
name.

backend ──invoke(role, method, call)──► WorkerHost ──► the role's Worker ──► its result
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from hybridflow.controller.dispatch import Call
from hybridflow.controller.read_only import TensorVersions, isolate
from hybridflow.controller.worker import Factories, Place, RankInfo, Worker


class WorkerHost:
    """Builds the workers of a process by the factories that `make` gives, and calls methods on them.

    `infos` says which roles are placed here and as which rank; left out: all that have a factory, with the
    rank of the place.
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

    def has(self, role: str) -> bool:
        """Whether that role is placed in this process."""
        return role in self._infos

    def worker(self, role: str) -> Worker:
        """The worker of a role, built if need be: a factory asks here for the one whose module it shares."""
        if role not in self._workers:
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
            self._workers[role] = worker
        return self._workers[role]

    def invoke(self, role: str, method: str, call: Call) -> Any:
        """Call a method; None where the call does not return. An exception gets a note of role, method and
        rank.

        AssertionError where the method wrote into a tensor among its arguments: they are the driver's, and
        other ranks may read them.
        """
        worker = self.worker(role)
        arguments: dict[str, Any] = {f"argument {index}": value for index, value in enumerate(call.args)}
        versions = TensorVersions(arguments | call.kwargs)
        try:
            result = getattr(worker, method)(*isolate(call.args), **isolate(call.kwargs))
        except Exception as error:
            error.add_note(f"in {role}.{method}, {self._where(role)}")
            raise
        written = ", ".join(versions.changed())
        assert not written, (
            f"{role}.{method} wrote in place into {written} of its arguments, which are the driver's: write "
            "to a clone"
        )
        return isolate(result) if call.returns else None

    def clear(self) -> None:
        """Forget all workers; they are built anew when needed again."""
        self._workers.clear()

    def _where(self, role: str) -> str:
        node = f" on node {self.place.node}" if self.place.node else ""
        return f"rank {self._infos[role].rank}{node}"


Make: TypeAlias = Callable[[WorkerHost], Factories]
"""What a backend is given: the factories of a process's workers, told the host that they will live in."""
