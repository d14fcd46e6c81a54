"""The worker process of one device: it joins the torch.distributed world of its pool, builds the workers of
all roles placed there, and serves calls on them one after the other.

    driver ──invoke──► thread of the calls: decode ─► WorkerHost ─► encode ──► (failure or None, packet)
    driver ──requests, polls──► a thread, and two, beside the calls
    driver ──ping, stacks──► a further thread, which answers while a call runs

Each worker process imports this module, and torch with it; neither is pickled and sent there.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.exceptions import RayError

from hybridflow.controller.backend import replace
from hybridflow.controller.dispatch import Call, Lane
from hybridflow.controller.local import WorkerHost
from hybridflow.controller.ray.running import Failure, Slot, telling
from hybridflow.controller.ray.transport import Packet, StoredPacket, decode, encode
from hybridflow.controller.worker import Place, RankInfo
from hybridflow.distributed import process_group
from hybridflow.distributed.device import resolve_device, set_current, set_threads
from hybridflow.errors import WorkerLost
from hybridflow.observability.logging_setup import setup_logging
from hybridflow.protocol import DataProto

if TYPE_CHECKING:
    from hybridflow.controller.ray.transfer_queue import TransferQueue

TASKS: dict[Lane, str] = {"ordered": "invoke", "requests": "invoke_request", "collect": "invoke_collect"}
"""The method of `RankProcess` for calls of a lane."""
Answer = tuple[Failure | StoredPacket | None, Packet | StoredPacket | Failure]
"""The status, which the driver reads, and the result, which it fetches when it is needed. Both say
where a result is that is in TransferQueue.
"""


@dataclass(frozen=True)
class ProcessSettings:
    """Settings that a process receives before it builds its workers."""

    device: str
    """cpu or cuda."""
    num_threads: int | None
    address: str
    """Where rank 0 of the pool listens for torch.distributed, with `port`; empty: there is no such world."""
    port: int
    timeout: float
    """Seconds after which a collective that waits fails."""
    folder: str
    """The driver's working folder, so that relative paths mean the same in both processes. On a node without
    that folder the process stays where Ray started it.
    """
    join_queue: Callable[[], TransferQueue] | None = None
    """A function that joins the queue which has the rows that calls return; None: Ray has them."""


@dataclass(frozen=True)
class ProcessAddress:
    """A process's pid, address and a free port."""

    pid: int
    address: str
    """The address of its node."""
    port: int
    """A port that was free on the node when it was asked."""


class RankProcess:
    """The Ray actor of a device. All methods without a concurrency group run in one thread, in the order of
    the driver's calls.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._host: WorkerHost | None = None
        self._queue: TransferQueue | None = None
        self._calls_thread = 0

    def __repr__(self) -> str:
        return f"{self.place.pool}/{self.place.rank}"  # Ray puts it before each line that the process prints

    @ray.method(num_returns=2)
    def meet(self) -> Answer:
        """Report this process's pid, address and a free port."""
        self._calls_thread = threading.get_ident()
        return self._answer(lambda: ProcessAddress(os.getpid(), ray.util.get_node_ip_address(), _free_port()))

    @ray.method(num_returns=2)
    def set_up(self, how: ProcessSettings) -> Answer:
        """Set threads, device and logging, and join the torch.distributed world of the pool."""
        return self._answer(lambda: self._set_up(how))

    @ray.method(num_returns=2)
    def build(self, make: Packet, infos: Mapping[str, RankInfo]) -> Answer:
        """Build the workers of all roles that are placed in this process."""
        return self._answer(lambda: self._build(decode(make), infos))

    @ray.method(num_returns=2)
    def invoke(
        self, role: str, method: str, returns: bool, arguments: Packet | None, references: list[Any]
    ) -> Answer:
        """Call a method of a role's worker.

        Large arguments (`arguments` is None) are under the first of `references`, results of earlier calls
        under the others. They are in a list so that this method fetches them and not Ray before the call,
        which would hold back all later calls and pings.
        """
        return self._answer(lambda: self._invoke(role, method, returns, arguments, references), self._queue)

    @ray.method(num_returns=2, concurrency_group="requests")
    def invoke_request(self, *call: Any) -> Answer:
        """Do what `invoke` does, beside the ordered calls. Rows that it returns are not held: they may be for
        another worker.
        """
        return self._answer(lambda: self._invoke(*call))

    @ray.method(num_returns=2, concurrency_group="collect")
    def invoke_collect(self, *call: Any) -> Answer:
        """Do what `invoke` does, beside the ordered calls and requests."""
        return self._answer(lambda: self._invoke(*call), self._queue)

    @ray.method(concurrency_group="control")
    def ping(self) -> None:
        """Answer, as a sign of life."""

    @ray.method(concurrency_group="control")
    def stacks(self) -> str:
        """Return each thread's stack, that of the calls first, without frames of Ray and this module."""
        names = {thread.ident: thread.name for thread in threading.enumerate()} | {
            self._calls_thread: "of the calls"
        }
        texts = {}
        for ident, frame in sorted(
            sys._current_frames().items(), key=lambda item: item[0] != self._calls_thread
        ):
            lines = traceback.format_list(telling(traceback.extract_stack(frame)))
            if ident == self._calls_thread or (lines and ident != threading.get_ident()):
                texts[ident] = "".join(lines) or "  waits for a call\n"
        return "\n".join(f"thread {names.get(ident, ident)}:\n{text}" for ident, text in texts.items())

    @ray.method(num_returns=2)
    def close(self) -> Answer:
        """Drop the workers and leave the process group."""

        def leave() -> None:
            host = self._host
            self._host = None
            if host is not None:
                host.clear()
            process_group.destroy()

        return self._answer(leave)

    def _answer(self, work: Callable[[], Any], queue: TransferQueue | None = None) -> Answer:
        try:
            value = work()
            packet = encode(value)
            if queue is not None and isinstance(value, DataProto):
                held = queue.hold(packet)
                return held, held
            return None, packet
        except Exception as error:  # whatever a worker's own code raises goes to the driver
            failure = Failure.of(error, self.place)
            return failure, failure

    def _set_up(self, how: ProcessSettings) -> None:
        place = self.place
        if os.path.isdir(how.folder):
            # in a cluster that was joined, Ray starts processes where its node was started
            os.chdir(how.folder)
        level = "INFO"
        if place.rank != 0:
            level = "WARNING"
        setup_logging(level, rich=False)
        set_threads(how.num_threads)  # in this thread, because OpenMP's number is a thread's own
        device = torch.device("cpu")
        if how.device != "cpu":
            device = resolve_device(how.device, 0)  # Ray shows each process its own one
            set_current(device)
        if place.world_size > 1 and how.address:
            process_group.init(place.rank, place.world_size, how.address, how.port, device, how.timeout)
        if how.join_queue is not None:
            self._queue = how.join_queue()

    def _build(self, make: Callable[[WorkerHost], Any], infos: Mapping[str, RankInfo]) -> None:
        self._host = WorkerHost(self.place, make, infos)
        for role in infos:
            self._host.worker(role)

    def _invoke(
        self, role: str, method: str, returns: bool, arguments: Packet | None, references: list[Any]
    ) -> Any:
        assert self._host is not None, "the workers are not built yet"
        try:
            packets: list[Any] = []
            if references:
                packets = ray.get(references)
        except RayError as error:
            message = (
                f"an argument of {role}.{method} is lost with the process or the node that held it: {error}"
            )
            raise WorkerLost(message, role=role, method=method) from error
        if arguments is None:
            arguments = packets.pop(0)
        args, kwargs = decode(arguments)
        results = [self._result(packet, role, method) for packet in packets]
        if results:
            args, kwargs = replace((args, kwargs), Slot, lambda slot: results[slot.index])
        return self._host.invoke(role, method, Call(args, kwargs, returns))

    def _result(self, packet: Packet | StoredPacket | Failure, role: str, method: str) -> Any:
        if isinstance(packet, Failure):
            error = packet.original()
            error.add_note(f"its result was an argument of {role}.{method}")
            raise error
        if isinstance(packet, StoredPacket):
            assert self._queue is not None, "rows are held where there is a queue"
            packet = self._queue.opened(packet)
        return decode(packet)


def _free_port() -> int:
    """Return a free port below those that the kernel gives to outgoing connections at any moment."""
    first = random.SystemRandom().randrange(12_000)  # so that runs which start together try different ports
    for port in (20_000 + (first + step) % 12_000 for step in range(12_000)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no port between 20000 and 32000 is free on this node")
