"""The Ray backend: one process for each device of each pool, which hosts the workers of all roles placed
there.

    start          Cluster.place ─► RankProcess on each device ─► one torch.distributed world for each pool ─►
                   workers are built
    run, submit    arguments are encoded, and stored once for all ranks that share them ─► invoke on each rank
                   ─► parts
    Watchdog       follows answers, signs of life and deadlines

Calls from any number of driver threads reach all ranks in the same order, so collectives match. Calls on
roles in different processes overlap.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from hybridflow.controller.backend import Part, replace
from hybridflow.controller.dispatch import Call, Lane
from hybridflow.controller.local import Make
from hybridflow.controller.mesh import MeshInfo
from hybridflow.controller.ray.cluster import PlacedPool, RayCluster
from hybridflow.controller.ray.process import TASKS, ProcessAddress, ProcessSettings, RankProcess
from hybridflow.controller.ray.running import Process, RayPart, Running, Slot, Traffic
from hybridflow.controller.ray.transport import Packet, encode
from hybridflow.controller.ray.watchdog import Watchdog
from hybridflow.controller.resource_pool import Placement
from hybridflow.controller.worker import Place
from hybridflow.errors import WorkerError
from hybridflow.protocol import DataProto

if TYPE_CHECKING:
    from hybridflow.controller.ray.transfer_queue import TransferQueue


from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from hybridflow.controller.backend import Future
from hybridflow.controller.dispatch import registration_of
from hybridflow.controller.ray.running import Failure
from hybridflow.controller.ray.transport import decode
from hybridflow.errors import WorkerLost

logger = logging.getLogger(__name__)

INLINE_BYTES = 64 * 1024
"""Arguments up to this size travel inside the call, larger ones through the object store, which holds them
once for all ranks that share them.
"""
CLOSE_SECONDS = 5.0
GROUPS = {"control": 1, "requests": 1, "collect": 2}
"""Threads of a process beside that of the ordered calls. Polls have separate threads, since they would
hold back the requests, and two of them, so that the poll for one kind of outputs does not hold back that for
the other. The other lanes have one, which keeps the order of calls.
"""


class RayBackend:
    """The backend on Ray. Creating it starts the processes and builds their workers; `shutdown` ends them.

    `meshes` arranges the ranks of each role. `make` is sent to the processes and returns the factories there.
    Times are in seconds: `call_timeout` for a call, `heartbeat_timeout` without a sign of life after which a
    process counts as lost, and `startup_timeout` for devices, processes and models together. `runtime_env` is
    Ray's, for the processes. `start_queue` starts the queue that has the rows, within some seconds; None:
    Ray's object store has them. Raises what a worker raises while it is built, WorkerError where starting
    takes too long, and WorkerLost where a process dies.
    """

    in_process = False

    def __init__(
        self,
        cluster: RayCluster,
        placement: Placement,
        meshes: Mapping[str, MeshInfo],
        make: Make,
        *,
        device: str,
        num_threads: int | None,
        call_timeout: float,
        heartbeat_timeout: float,
        startup_timeout: float,
        start_queue: Callable[[float], TransferQueue] | None = None,
        runtime_env: dict[str, Any] | None = None,
        report_every: float = 60.0,
    ) -> None:
        for role, mesh in meshes.items():
            size = len(placement.ranks(role))
            assert mesh.world_size == size, (
                f"role {role!r} has {size} ranks but its mesh says {mesh.world_size}"
            )
        self._placement = placement
        self._meshes = dict(meshes)
        self.call_timeout = call_timeout
        self._began = time.monotonic()
        self._until = self._began + startup_timeout
        self._order = threading.Lock()
        self._traffic = Traffic()
        self._pools: list[PlacedPool] = []
        self._processes: dict[tuple[str, int], Process] = {}
        self._watch: Watchdog | None = None
        self._queue: TransferQueue | None = None
        try:
            if start_queue is not None:
                self._queue = start_queue(self._left())
            for pool in placement.pools:
                if pool.has_devices:
                    self._pools.append(cluster.place(pool, device, deadline=self._left()))
                else:
                    self._pools.append(cluster.place_without_devices(pool))
                self._start(self._pools[-1], runtime_env)
            self._watch = Watchdog(
                list(self._processes.values()), heartbeat_timeout, report_every=report_every
            )
            join = None if self._queue is None else self._queue.joining()
            self._set_up(ProcessSettings(device, num_threads, "", 0, call_timeout, os.getcwd(), join))
            self._build(make)
            self._watch.expect_signs()
        except BaseException:
            self.shutdown()
            raise

    def driver_bytes(self) -> int:
        """See `Backend.driver_bytes`; references are not counted."""
        return self._traffic.taken()

    def mesh(self, role: str) -> MeshInfo:
        """Return the mesh of a role's ranks, over all its pools."""
        assert role in self._meshes, f"there is no role {role!r}: the roles are {sorted(self._meshes)}"
        return self._meshes[role]

    def are_colocated(self, role: str, other: str) -> bool:
        """Return whether two roles share a process."""
        return self._placement.are_colocated(role, other)

    def peers(self, role: str) -> RayPeers:
        """See `Backend.peers`."""
        return RayPeers(role, [self._processes[place].actor for place in self._placement.ranks(role)])

    def run(self, role: str, method: str, calls: Sequence[Call | None]) -> list[Any]:
        """See `Backend.run`."""
        parts = self.submit(role, method, calls)
        _wait(parts)
        return [parts[rank].result() for rank, call in enumerate(calls) if call is not None and call.returns]

    def submit(
        self, role: str, method: str, calls: Sequence[Call | None], lane: Lane = "ordered"
    ) -> dict[int, Part]:
        """See `Backend.submit`."""
        assert self._watch is not None, f"{role}.{method}: the backend is shut down"
        world_size = self.mesh(role).world_size
        assert len(calls) == world_size, (
            f"{role}.{method} was dispatched to {len(calls)} ranks; there are {world_size}"
        )
        made: dict[tuple[int, int], tuple[Packet | None, list[Any]]] = {}
        arguments = {}
        for rank, call in enumerate(calls):
            if call is not None:
                if call.arguments_id not in made:
                    made[call.arguments_id] = self._arguments(call)
                inline = made[call.arguments_id][0]
                if inline is not None:
                    self._traffic.add(inline.nbytes)
                arguments[rank] = (role, method, call.returns, *made[call.arguments_id])
        ranks = self._placement.ranks(role)
        processes = {rank: self._processes[ranks[rank]] for rank in arguments}
        parts = self._send(
            role, method, TASKS[lane], processes, arguments, self.call_timeout, "trainer.worker_timeout"
        )
        return dict(parts)

    def store(self, columns: DataProto) -> Part:
        """See `Backend.store`."""
        packet = encode(columns)
        if self._queue is None:
            part = RayPart(self._put(packet), "driver", "put", 0, self._traffic)
        else:
            self._traffic.add(packet.nbytes)
            held = self._queue.hold(packet)
            part = RayPart(ray.put(held), "driver", "put", 0, self._traffic, self._queue)
            part.is_held(held)
        part.settle()
        return part

    def shutdown(self) -> None:
        """End all processes within seconds, whatever they are doing, and give their devices back.

        It may be called twice.
        """
        watch = self._watch
        left = self._processes
        self._watch = None
        self._processes = {}
        if watch is not None and watch.idle:
            self._close(left.values())
        for process in left.values():
            process.ended = True
        if watch is not None:
            watch.stop(WorkerError("the workers were shut down"))
        for process in left.values():
            ray.kill(process.actor)
        for placed in self._pools:
            placed.free()
        self._pools = []
        if self._queue is not None:
            self._queue.close()
            self._queue = None

    # ---- starting

    def _left(self) -> float:
        return max(1.0, self._until - time.monotonic())

    def _start(self, placed: PlacedPool, runtime_env: dict[str, Any] | None) -> None:
        remote: Any = ray.remote  # its annotations lack concurrency groups
        actor_class = remote(concurrency_groups=GROUPS, max_restarts=0, max_task_retries=0)(RankProcess)
        more: dict[str, Any] = {}
        if runtime_env:
            more["runtime_env"] = runtime_env
        size = placed.pool.world_size
        for rank, (options, node, node_id, local) in enumerate(
            zip(placed.bundles, placed.nodes, placed.node_ids, placed.local_ranks)
        ):
            place = Place(placed.pool.name, rank, size, local, node)
            self._processes[placed.pool.name, rank] = Process(
                place, actor_class.options(**options, **more).remote(place), node_id
            )

    def _set_up(self, how: ProcessSettings) -> None:
        everywhere = dict(enumerate(self._processes.values()))
        met: dict[int, ProcessAddress] = self._all("meet", everywhere, dict.fromkeys(everywhere, ()))
        heads = {}
        for rank, process in everywhere.items():
            process.pid = met[rank].pid
            if process.place.rank == 0:
                heads[process.place.pool] = met[rank]
        how_by_rank = {}
        bare = {placed.pool.name for placed in self._pools if not placed.pool.has_devices}
        for rank, process in everywhere.items():
            head = heads[process.place.pool]
            if process.place.pool in bare:
                how_by_rank[rank] = (dataclasses.replace(how, device="cpu"),)
            else:
                how_by_rank[rank] = (dataclasses.replace(how, address=head.address, port=head.port),)
        self._all("set_up", everywhere, how_by_rank)

    def _build(self, make: Make) -> None:
        everywhere = dict(enumerate(self._processes.values()))
        packet = ray.put(encode(make))
        arguments = {
            rank: (packet, self._placement.infos(process.place.pool, process.place.rank))
            for rank, process in everywhere.items()
        }
        started = time.monotonic()
        self._all("build", everywhere, arguments)
        now = time.monotonic()
        roles = ", ".join(self._meshes)
        names = ", ".join(dict.fromkeys(process.place.node for process in everywhere.values()))
        said = "%d worker processes on %s started in %.0f s and built their workers (%s) in %.0f s"
        logger.info(said, len(everywhere), names, started - self._began, roles, now - started)

    def _all(
        self, task: str, processes: Mapping[int, Process], arguments: Mapping[int, tuple[Any, ...]]
    ) -> dict[int, Any]:
        """Run one step of the start on all processes, which are numbered over all pools."""
        starting = ""
        if task == "meet":
            starting = f"starting {len(processes)} worker processes"
        parts = self._send(
            "worker", task, task, processes, arguments, self._left(), "trainer.startup_timeout", starting
        )
        _wait(parts)
        return {rank: part.result() for rank, part in parts.items()}

    def _close(self, processes: Any) -> None:
        """Ask the processes to leave; those that do not answer are killed afterwards."""
        try:
            ray.wait(
                [process.actor.close.remote()[0] for process in processes],
                num_returns=len(processes),
                timeout=CLOSE_SECONDS,
            )
        except RayError as error:
            logger.debug("closing the workers: %s", error)

    # ---- calling

    def _send(
        self,
        role: str,
        method: str,
        task: str,
        processes: Mapping[int, Process],
        arguments: Mapping[int, tuple[Any, ...]],
        limit: float,
        limit_key: str,
        starting: str = "",
    ) -> dict[int, RayPart]:
        """Call `task` of the processes; the watch follows it under the name `role.method`."""
        assert self._watch is not None, f"{role}.{method}: the backend is shut down"
        parts: dict[int, RayPart] = {}
        statuses: dict[int, Any] = {}
        with self._order:  # one call is sent to all its ranks before the next, whichever threads call
            self._watch.check(f"{role}.{method}")
            for rank, process in processes.items():
                statuses[rank], result = getattr(process.actor, task).remote(*arguments[rank])
                parts[rank] = RayPart(result, role, method, rank, self._traffic, self._queue)
            self._watch.follow(
                Running(role, method, dict(processes), parts, limit, limit_key, starting), statuses
            )
        return parts

    def _arguments(self, call: Call) -> tuple[Packet | None, list[Any]]:
        """Return a call's arguments as they travel: a packet and the references of earlier results in it.

        For a large packet the first entry is None, and the packet's own reference is the first of the
        references.
        """
        references: list[Any] = []

        def slot(part: Part) -> Any:
            if not isinstance(part, RayPart):
                return part.result()
            references.append(part.reference)
            return Slot(len(references) - 1)

        packet = encode(replace((call.args, call.kwargs), concurrent.futures.Future, slot))
        if packet.nbytes <= INLINE_BYTES:
            return packet, references
        return None, [self._put(packet), *references]

    def _put(self, packet: Packet) -> Any:
        self._traffic.add(packet.nbytes)
        return ray.put(packet)


def _wait(parts: Mapping[int, Part]) -> None:
    """Wait for all ranks and raise the failure that came first; the watch ends calls that hang."""
    concurrent.futures.wait(parts.values())
    for part in parts.values():
        error = part.exception()
        if error is not None:
            raise error


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
