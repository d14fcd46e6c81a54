"""Objects of the user's code (tools, environments) in worker processes that can be killed.

    create(factory) ─► a free worker makes the object ─► its pickle is the state, which the driver holds
    call(method) ────► state and arguments to a free worker ─► result and new state ─► the driver
                          └─ past the deadline: the worker is killed, another takes its place

A worker remembers nothing between calls, so a few of them serve thousands of objects, and a call that hangs
costs no other one. What is to be shared by objects, or is large, belongs into a module, which each worker
loads once. An object that does not pickle (it holds a socket, a lock, a generator, a temporary folder) stays
in its worker, which serves it alone until it is closed; another worker takes over from that one. A task of
asyncio (a trajectory) that holds one such worker gets the next without waiting for other tasks to let go.

One event loop at a time uses the workers. They are started when they are needed, see `supervisor.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import subprocess
import weakref
from collections import deque
from typing import Any

from hybridflow.processes.channel import CHUNK, ChannelBroken, dumps, frame, take_messages
from hybridflow.processes.errors import CallRaised, CallTooLong, ProcessLost
from hybridflow.processes.host import BEGUN, Reply, Request
from hybridflow.processes.supervisor import SupervisedProcess

logger = logging.getLogger(__name__)

START_TIMEOUT = 120.0
"""Seconds a worker may take to import what it needs."""
MAX_KEPT = 32
"""Most tasks whose objects may stay in their own workers at the same time."""
WAIT_TIMEOUT = 3600.0
"""Seconds that a call waits for a free worker."""
NUM_TRIES = 3
"""Workers that may end in a row before they have begun a call."""
MAX_KIND = 200
"""Characters that messages show of a factory and its argument."""
NOTHING = pickle.dumps(None)


class _Worker(SupervisedProcess):
    """A worker, with one thread for each maths library, and what it has sent.

    Its creator closes its socket.
    """

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        with theirs:
            super().__init__(
                ["hybridflow.processes.host"],
                file_descriptor=theirs.fileno(),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **threads},
            )
        self.kept: Hosted | None = None  # the object that cannot leave it
        self.calling = False
        self.given_up = False
        self._received = bytearray()
        self._messages: deque[bytes] = deque()

    async def send(self, payload: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, frame(payload))

    async def receive(self) -> bytes:
        """Return the next message. Raises OSError if the worker has ended, or ChannelBroken."""
        while not self._messages:
            chunk = await asyncio.get_running_loop().sock_recv(self.socket, CHUNK)
            if not chunk:
                raise ConnectionError
            self._received += chunk
            self._messages.extend(take_messages(self._received))
        return self._messages.popleft()


class Hosted:
    """An object on the other side; calls of one object come one after the other."""

    def __init__(self, hosts: Hosts, kind: str) -> None:
        self._hosts = hosts
        self._lock = asyncio.Lock()
        self.kind = kind
        self.owner = asyncio.current_task()
        self.state: bytes | None = None
        """Pickle of the object, where it travels."""
        self.home: _Worker | None = None
        """The worker that has the object, where it cannot travel."""

    async def call(self, method: str, /, *args: Any, deadline_s: float, **kwargs: Any) -> Any:
        """Call a method, which may be async, and return its result.

        `deadline_s` counts from when a worker begins. Raises CallRaised if the method raises or its result
        does not pickle, and keeps what it has changed in the object; CallTooLong, ProcessLost: the object is
        as it was before the call, or lost if it could not travel. A call that is cancelled ends its worker.
        """
        async with self._lock:
            if self.state is None and self.home is None:
                raise ProcessLost(f"{self.kind}: it was closed, or its process has ended with it")
            request = Request("", method, _pack(args, kwargs), self.state)
            return await self._hosts.run(self, request, deadline_s)

    def value(self) -> Any:
        """Return a copy of the object, which is one that travels."""
        assert self.state is not None, f"{self.kind} does not travel"
        return pickle.loads(self.state)

    async def close(self) -> None:
        """Forget the object; where it holds a worker, that one is free for others."""
        async with self._lock:
            if self.home is not None:
                # whatever the worker makes next displaces the object
                with contextlib.suppress(CallTooLong, ProcessLost):
                    await self._hosts.run(self, Request("builtins:object", "", _pack((), {})), START_TIMEOUT)
            self.state = None


class Hosts:
    """`num_workers` processes, and more for objects that cannot travel, of `max_kept` tasks at a time.

    `counts` has the numbers of calls, of workers that died ("deaths"), and of those that were ended ("kills")
    at a deadline or because the call was cancelled.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        max_kept: int = MAX_KEPT,
        start_timeout: float = START_TIMEOUT,
        wait_timeout: float = WAIT_TIMEOUT,
    ) -> None:
        assert num_workers > 0, "no process to run in"
        self.counts = {"calls": 0, "deaths": 0, "kills": 0}
        self._num_workers = num_workers
        self._max_kept = max_kept
        self._start_timeout = start_timeout
        self._wait_timeout = wait_timeout
        self._closed = False
        self._workers: set[_Worker] = set()  # with those that are given up, until they have ended
        self._idle: list[_Worker] = []
        self._kinds_that_stay: set[str] = set()
        self._waiting: dict[asyncio.Future[_Worker], Hosted] = {}  # the objects whose calls wait
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)  # also when the interpreter ends

    @property
    def waiting(self) -> int:
        """Number of calls that wait for a free worker process."""
        return sum(not future.done() for future in self._waiting)

    async def create(self, factory: str, *args: Any, deadline_s: float, **kwargs: Any) -> Hosted:
        """Make an object by `factory`, "package.module:function" or "path/to/file.py:function".

        The deadline counts from when the factory is loaded; what it loads itself is part of its call. Raises
        CallRaised, CallTooLong or ProcessLost. Objects of one factory and one first argument, where
        that is a text, are of one kind: if one of them cannot travel, the others wait while objects of
        `max_kept` other tasks hold workers.
        """
        kind = " ".join([factory, *[word for word in args[:1] if isinstance(word, str)]])[:MAX_KIND]
        hosted = Hosted(self, kind)
        await self.run(hosted, Request(factory, "", _pack(args, kwargs)), deadline_s)
        return hosted

    async def run(self, hosted: Hosted, request: Request, deadline_s: float) -> Any:
        """Make one call, give the object its new state or its home, and return the result."""
        what = f"{hosted.kind}: {request.method or 'create'}"
        self.counts["calls"] += 1
        tries_left = NUM_TRIES
        if hosted.home:
            tries_left = 1
        reply = None
        while reply is None:
            worker = hosted.home or await self._take(hosted, what)
            tries_left -= 1
            reply = await self._exchange(worker, request, deadline_s, what, last_try=not tries_left)
        self._settle(hosted, worker, reply)
        if reply.error:
            raise reply.error
        try:
            return pickle.loads(reply.result or NOTHING)
        except Exception as error:  # a user's class may do anything when it is read
            raise CallRaised.by(error) from error

    def close(self) -> None:
        """End all workers, and all processes that were started in them; running calls raise ProcessLost."""
        self._closed = True
        workers = list(self._workers)
        self._finalizer()
        for worker in workers:
            if not worker.calling:  # else its call notices, and closes the socket
                worker.socket.close()
        for future in list(self._waiting):
            with contextlib.suppress(RuntimeError):  # its event loop is closed
                future.get_loop().call_soon_threadsafe(self._serve)

    async def _take(self, hosted: Hosted, what: str) -> _Worker:
        """Wait for a free worker. Raises CallTooLong, or ProcessLost if there can be none."""
        future: asyncio.Future[_Worker] = asyncio.get_running_loop().create_future()
        self._waiting[future] = hosted
        self._serve()
        try:
            async with asyncio.timeout(self._wait_timeout):
                return await future
        except BaseException as error:
            if future.done() and not future.cancelled() and not future.exception():
                self._release(future.result())  # it came as the call was cancelled
            if isinstance(error, TimeoutError):
                raise CallTooLong(
                    f"{what} found no free process within {self._wait_timeout:g} seconds; objects that "
                    f"do not pickle, of {len(self._keepers())} tasks, hold one each until they are closed"
                ) from None
            raise
        finally:
            self._waiting.pop(future, None)

    def _serve(self) -> None:
        """Give free workers to calls that wait, in the order in which they came."""
        self._workers -= {worker for worker in self._workers if worker.given_up and worker.has_ended()}
        keepers = self._keepers()
        no_more_stay = len(keepers) >= self._max_kept and not self._closed
        for future, hosted in self._waiting.items():
            # an owner of a worker gets its next one now: two that hold one and wait would wait for ever
            waits = no_more_stay and hosted.kind in self._kinds_that_stay and hosted.owner not in keepers
            if future.done() or waits:
                continue
            try:
                worker = self._free_worker()
            except (ProcessLost, OSError) as error:
                future.set_exception(ProcessLost(f"no process can be started: {error}"))
                continue
            if worker is None:
                return
            future.set_result(worker)

    def _free_worker(self) -> _Worker | None:
        if self._closed:
            raise ProcessLost("the pool of processes is closed")
        while self._idle:
            worker = self._idle.pop()
            if not worker.has_ended():
                return worker
            self.counts["deaths"] += 1
            self._give_up(worker)
        if self._num_shared() >= self._num_workers:
            return None
        worker = _Worker()
        self._workers.add(worker)
        return worker

    async def _exchange(
        self, worker: _Worker, request: Request, deadline_s: float, what: str, *, last_try: bool
    ) -> Reply | None:
        """Return a worker's answer, or None if it ended before it began; end it if there is no answer."""
        worker.calling = True
        has_begun = False
        reply: Reply | None = None
        try:
            async with asyncio.timeout(self._start_timeout):
                await worker.send(pickle.dumps(request))
                message = await worker.receive()
            if message == BEGUN:
                has_begun = True
                async with asyncio.timeout(deadline_s):
                    message = await worker.receive()
            reply = pickle.loads(message)
        except TimeoutError:
            self.counts["kills"] += 1
            if has_begun:
                raise CallTooLong(f"{what} ran past its deadline of {deadline_s:g} seconds") from None
            raise CallTooLong(
                f"{what}: its process was not ready within {self._start_timeout:g} seconds; keep the imports "
                "of the file light"
            ) from None
        except ChannelBroken as error:
            self.counts["deaths"] += 1
            raise ProcessLost(
                f"{what} wrote bytes of its own into the socket of its process, which only the library uses "
                f"({error})"
            ) from error
        except OSError as error:
            self.counts["deaths"] += 1
            if has_begun or last_try:
                how = await asyncio.to_thread(worker.ending)
                raise ProcessLost(f"{what}: its process {how}") from error
        except asyncio.CancelledError:
            self.counts["kills"] += 1
            raise
        finally:
            worker.calling = False
            if reply is None:
                self._give_up(worker)
                self._serve()
        return reply

    def _settle(self, hosted: Hosted, worker: _Worker, reply: Reply) -> None:
        """Keep the state of the object after a call, and its worker if the object stays in it."""
        if reply.kept:
            if hosted.kind not in self._kinds_that_stay:
                logger.warning(
                    "objects of %s do not pickle (%s): each has a process of its own, for at most %d tasks "
                    "at a time",
                    hosted.kind,
                    reply.kept,
                    self._max_kept,
                )
            self._kinds_that_stay.add(hosted.kind)
            hosted.state = None
            hosted.home = worker
            worker.kept = hosted
            self._serve()  # another worker may take its place
        else:
            hosted.state = reply.state or hosted.state
            hosted.home = None
            worker.kept = None
            self._release(worker)

    def _release(self, worker: _Worker) -> None:
        """Let a worker serve a waiting call or a later one, unless enough workers are idle."""
        self._idle.append(worker)
        self._serve()
        if worker in self._idle and (self._closed or self._num_shared() > self._num_workers):
            self._idle.remove(worker)
            self._give_up(worker)

    def _give_up(self, worker: _Worker) -> None:
        if worker.kept:
            worker.kept.home = None
            worker.kept = None
        worker.given_up = True
        worker.terminate()
        worker.socket.close()

    def _keepers(self) -> set[asyncio.Task[Any] | None]:
        """Return the tasks whose objects hold workers."""
        return {worker.kept.owner for worker in self._workers if worker.kept}

    def _num_shared(self) -> int:
        return sum(worker.kept is None and not worker.given_up for worker in self._workers)


def _kill_all(workers: set[_Worker]) -> None:
    """End workers, all at the same time, and forget them."""
    ending = list(workers)
    workers.clear()
    for worker in ending:
        worker.terminate()  # all at once, before any is waited for
    for worker in ending:
        worker.kill()


def _pack(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle the arguments of a call. Raises CallRaised if they do not pickle."""
    try:
        return dumps((args, kwargs))
    except Exception as error:  # a user's class may do anything when it is written
        raise CallRaised.by(error) from error
