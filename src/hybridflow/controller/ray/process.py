"""The process of one device: it joins the torch.distributed world of its pool, builds the workers of all
roles placed there, and serves calls on them one after the other.

    driver ──invoke──► the calls' thread: decode ─► WorkerHost ─► encode ──► (failure or None, packet)
    driver ──ping, stacks──► a thread of their own, which answers while a call runs

This module is the door to torch in the process: it is imported there, not sent there.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from hybridflow.controller.dispatch import Call
from hybridflow.controller.future import replace
from hybridflow.controller.ray.failure import Failure, telling
from hybridflow.controller.ray.parts import Slot
from hybridflow.controller.ray.transport import Packet, decode, encode
from hybridflow.controller.worker import Place, RankInfo
from hybridflow.controller.worker_host import WorkerHost
from hybridflow.distributed import process_group
from hybridflow.distributed.device import set_threads
from hybridflow.errors import WorkerLost
from hybridflow.observability.logging_setup import setup_logging

Answer = tuple[Failure | None, Packet | Failure]
"""How it went, which the driver looks at, and the result, which it fetches when it is wanted."""


@dataclass(frozen=True)
class SetUp:
    """What a process is told before it builds its workers."""

    device: str
    """cpu or cuda."""
    num_threads: int | None
    log_level: int
    """Of rank 0 of a pool; the others speak from warnings on."""
    address: str
    port: int
    """Where the rank 0 of the pool listens."""
    timeout: float
    """Seconds that a collective may wait."""
    folder: str
    """Where the driver is: relative paths mean the same in both. On a node without that folder the process
    stays where Ray put it.
    """


@dataclass(frozen=True)
class Met:
    """What a process says of itself."""

    pid: int
    address: str
    """Of its node."""
    port: int
    """Free there a moment ago."""


class RankProcess:
    """A Ray actor. Each method but those of the control group runs in one and the same thread, in the order
    of the driver's calls.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._host: WorkerHost | None = None
        self._calls_thread = 0

    def __repr__(self) -> str:
        return f"{self.place.pool}/{self.place.rank}"  # Ray puts it before each line that the process prints

    @ray.method(num_returns=2)
    def meet(self) -> Answer:
        """Say `Met`."""
        self._calls_thread = threading.get_ident()
        return self._answer(lambda: Met(os.getpid(), ray.util.get_node_ip_address(), _free_port()))

    @ray.method(num_returns=2)
    def set_up(self, how: SetUp) -> Answer:
        """Threads, device, log lines, and the torch.distributed world of the pool where it has more than one
        rank.
        """
        return self._answer(lambda: self._set_up(how))

    @ray.method(num_returns=2)
    def build(self, make: Packet, infos: Mapping[str, RankInfo]) -> Answer:
        """Build the workers of all roles placed here."""
        return self._answer(lambda: self._build(decode(make), infos))

    @ray.method(num_returns=2)
    def invoke(
        self, role: str, method: str, returns: bool, arguments: Packet | None, references: list[Any]
    ) -> Answer:
        """Call a method of a role's worker.

        Large arguments (`arguments` is None) lie under the first of `references`, results of earlier calls
        under the others. References in a list are fetched here and not by Ray before the call: it would hold
        back all later calls, pings too.
        """
        return self._answer(lambda: self._invoke(role, method, returns, arguments, references))

    @ray.method(concurrency_group="control")
    def ping(self) -> None:
        """Answer."""

    @ray.method(concurrency_group="control")
    def stacks(self) -> str:
        """What each thread is doing, that of the calls first; frames of the machinery are left out."""
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
        """Let go of the workers and leave the group."""

        def leave() -> None:
            self._host = None
            process_group.destroy()

        return self._answer(leave)

    def _answer(self, work: Callable[[], Any]) -> Answer:
        try:
            return None, encode(work())
        except Exception as error:  # a worker's own code: whatever it raises belongs to the driver
            failure = Failure.of(error, self.place)
            return failure, failure

    def _set_up(self, how: SetUp) -> None:
        place = self.place
        if os.path.isdir(how.folder):
            # in a cluster that was joined, Ray starts processes where its node was started
            os.chdir(how.folder)
        setup_logging(
            logging.getLevelName(how.log_level if place.rank == 0 else max(how.log_level, logging.WARNING)),
            rich=False,
        )
        set_threads(how.num_threads)  # of this thread: OpenMP counts them for each
        # Ray shows each process its own GPU
        device = torch.device(how.device, 0) if how.device == "cuda" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if place.world_size > 1:
            process_group.init(place.rank, place.world_size, how.address, how.port, device, how.timeout)

    def _build(self, make: Callable[[WorkerHost], Any], infos: Mapping[str, RankInfo]) -> None:
        self._host = WorkerHost(self.place, make, infos)
        for role in infos:
            self._host.worker(role)

    def _invoke(
        self, role: str, method: str, returns: bool, arguments: Packet | None, references: list[Any]
    ) -> Any:
        assert self._host is not None, "the workers are not built yet"
        try:
            packets = ray.get(references) if references else []
        except RayError as error:
            message = (
                f"what {role}.{method} was to take is lost with the process or the node that had it: {error}"
            )
            raise WorkerLost(message, role=role, method=method) from error
        args, kwargs = decode(arguments if arguments is not None else packets.pop(0))
        results = [_result(packet, role, method) for packet in packets]
        if results:
            args, kwargs = (
                replace(value, Slot, lambda slot: results[slot.index]) for value in (args, kwargs)
            )
        return self._host.invoke(role, method, Call(args, kwargs, returns))


def _result(packet: Packet | Failure, role: str, method: str) -> Any:
    if isinstance(packet, Failure):
        error = packet.original()
        error.add_note(f"{role}.{method} was to take its result")
        raise error
    return decode(packet)


def _free_port() -> int:
    """A port that is free on this node, below those that the kernel gives to outgoing connections, which may
    take one at any moment.
    """
    first = random.SystemRandom().randrange(12_000)  # runs that start together look in different places
    for port in (20_000 + (first + step) % 12_000 for step in range(12_000)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no port between 20000 and 32000 is free on this node")
