"""The driver's view of generation: replicas of the workers that many callers share, and their weights.

generate(list) ──submit_many──► WorkerReplica ──submit──► EngineReplica in the worker ─┐
opened(), run(work) ──LLMClient──submit──┘ ▲                                           │ collect
                                           └── outputs, as they finish ◄── serve ◄─────┘
actor ──stage──► StagedWeights ──take, between two steps──► all replicas
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, TypeVar

from hybridflow.controller import Future, WorkerGroup
from hybridflow.controller.mesh import cut_items, plan_items
from hybridflow.errors import RolloutError, WorkerError, WorkerLost
from hybridflow.observability.progress import progress
from hybridflow.observability.timing import Occupancy
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, RolloutStats
from hybridflow.rollout.client import LLMClient, in_own_loop
from hybridflow.rollout.session_engine import check_ids
from hybridflow.stop_token import stop_token
from hybridflow.weight_sync.push import WeightShare
from hybridflow.workers.actor import ActorGroup, ActorWorker
from hybridflow.workers.rollout import FinishedOutputs, Kind, Paused, RolloutWorker
from hybridflow.workers.rollout_replica import WorkerReplica

T = TypeVar("T")

Over = Callable[[], bool]
"""Whether enough was served; called in the thread that serves."""
Finished = Callable[[GenerationOutput], None]
"""Called with each output as soon as it is there."""

POLL_SECONDS = 5.0
"""Longest wait for the next output of a rank before it is asked again."""
LEAVE_SECONDS = 5.0
"""Longest wait for the end of a step in this process where a caller wants to leave at once."""
UNWIND_SECONDS = 1.0
"""Time for work to hear that its engines are lost, before it is cancelled."""


@dataclass(frozen=True)
class Generated:
    """The outputs of a list of requests."""

    outputs: list[GenerationOutput]
    """In the order of the requests."""
    stats: RolloutStats
    """Counts of all replicas together."""


@dataclass(eq=False)
class StagedWeights:
    """The actor's weights as they were when they were staged, outside of the actor and of all replicas."""

    version: int
    shares: Future[list[WeightShare]] | None
    """The parts of the actor's ranks, by reference; None once they were taken, which frees their memory."""
    again: Callable[[], Future[list[WeightShare]]]
    """Function that returns them as whole tensors, while the actor has exported no newer ones."""


@dataclass(eq=False)
class GroupState:
    """What the two sets of a group have in common."""

    openings: Iterator[int]
    """Numbers of the times that requests of either kind are taken."""
    broken: BaseException | None = None
    """The error of an engine of several ranks: its other ranks may wait for it in a collective, for ever."""


class ReplicaSet:
    """All replicas, for the requests of one kind: they are sent here, and the engines stepped for them.

    One thread at a time serves; every other method may be called from any thread.
    """

    def __init__(self, group: WorkerGroup[RolloutWorker], kind: Kind, state: GroupState) -> None:
        self._group = group
        self._state = state
        self._opening = 0
        self._kind = kind
        self._occupancy = Occupancy("paused")
        self.replicas = tuple(
            WorkerReplica(group, rank, kind, self._stepped_seconds) for rank in group.mesh.leaders
        )
        self._lock = threading.RLock()  # held while engines are resumed or paused
        self._serves = False
        self._steps = False
        self._closed = False
        self._holds = 0  # contexts in which the requests are set aside
        self._stats: list[RolloutStats] = []
        self._polls: dict[int, Future[FinishedOutputs]] = {}
        self._leaving: Future[list[Paused]] | None = None  # a pause that is not awaited yet

    @property
    def patience(self) -> float:
        """Longest time of a step of the engines, in seconds; a longer one is an error."""
        return min(self._group.backend.call_timeout, threading.TIMEOUT_MAX / 4)

    @contextmanager
    def opened(self) -> Iterator[LLMClient]:
        """Open the replicas for requests in this context; afterwards none of these are left.

        RolloutError where an engine of several ranks has failed before.
        """
        if self._state.broken is not None:
            raise RolloutError(
                f"{self._group.role} generates no more: a rank of an engine has failed, and others may wait "
                f"for it for ever ({self._state.broken})"
            ) from self._state.broken
        if self._leaving is not None:
            leaving = self._leaving
            self._leaving = None
            with suppress(Exception):  # it was raised when it came
                leaving.result()
        self._opening = next(self._state.openings)
        self._polls = {}
        for replica in self.replicas:
            replica.open(self._opening)
        try:
            yield LLMClient(self.replicas)
        except BaseException as error:
            self.lose(error)
            raise
        finally:
            for replica in self.replicas:
                replica.lose(replica.failure or "nothing is generated now: generate() or run() has ended")

    def lose(self, error: BaseException) -> None:
        """Fail the requests without an answer, and accept no others, because of this error."""
        for replica in self.replicas:
            replica.lose(f"generation has ended: {type(error).__name__}: {error}")

    def serve(
        self,
        over: Over,
        *,
        closed: bool = False,
        total: int | None = None,
        finished: Finished | None = None,
    ) -> RolloutStats:
        """Step the engines and deliver their outputs until `over`; return their counts.

        With `closed` the engines have all requests already. For the display, there will be `total` outputs.
        Where the engines fail, all requests without an answer fail with them.
        """
        if over():
            return RolloutStats()
        try:
            with self._lock:
                self._serves = True
                self._closed = closed
                self._stats = []
                if not self._holds:
                    self._resume()
            for output in progress.results(stop_token.each(self._outputs(over)), total):
                if finished is not None:
                    finished(output)
            self._end()
        except BaseException as error:
            left = sum(replica.load for replica in self.replicas)
            if left:
                names = ", ".join(replica.name for replica in self.replicas)
                error.add_note(f"{left} requests had no answer of {names}")
            self.lose(error)
            with suppress(WorkerError, RolloutError):
                if not isinstance(error, Exception):
                    # in other processes a step may take its time: a second signal interrupts this wait
                    self._end(LEAVE_SECONDS if self._group.backend.in_process else None)
                elif not isinstance(error, WorkerLost):  # else it would never come to the end of a step
                    # not awaited: where one rank has failed, others may wait for it in a collective
                    self._serves = self._steps = False
                    self._occupancy.be("paused")
                    self._leaving = self._group.submit_list(RolloutWorker.pause, self._kind)
            raise
        return RolloutStats.join(self._stats, together=False)

    def wake(self) -> None:
        """Make `serve` check at once whether it is over."""
        with suppress(WorkerError):  # it is lost, which `serve` raises
            self._group.call_one(0, RolloutWorker.end_poll, self._kind, self._opening)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Pause the requests in this context; partial responses are continued afterwards."""
        with self._lock:
            self._holds += 1
        try:
            with self._lock:
                self._pause()
            yield
        finally:
            with self._lock:
                self._holds -= 1
                if self._serves and not self._holds and self._state.broken is None:
                    self._resume()

    @contextmanager
    def weights_change(self) -> Iterator[None]:
        """Stop the clock of deadlines in this context, which lasts until the weights have changed."""
        with self._lock:
            before = self._occupancy.be("paused")
            try:
                yield
            finally:
                self._occupancy.be(before)

    def _end(self, timeout_s: float | None = None) -> None:
        with self._lock:
            self._serves = False
            self._pause(timeout_s)

    def _resume(self) -> None:
        self._steps = True
        self._occupancy.be("stepped")
        self._group.call(RolloutWorker.resume, self._kind, self._opening, closed=self._closed)

    def _pause(self, timeout_s: float | None = None) -> None:
        if self._steps:
            self._occupancy.be("paused")
            paused = self._group.call_list(RolloutWorker.pause, self._kind, timeout_s)
            self._steps = False
            self._stats.append(RolloutStats.join([state.stats for state in paused], together=True))
            for replica, state in zip(self.replicas, paused, strict=True):
                replica.version = state.version

    def _outputs(self, over: Over) -> Iterator[GenerationOutput]:
        """Hand outputs to their callers, and yield them, as they come; raise what an engine has failed of."""
        seconds = min(POLL_SECONDS, self.patience / 4)
        by_rank = {replica.rank: replica for replica in self.replicas}
        while not over():
            if self._state.broken is not None:
                raise self._state.broken
            for rank in range(self._group.world_size):
                if rank not in self._polls:  # a poll may outlive the `serve` that has sent it
                    self._polls[rank] = self._group.call_one(
                        rank, RolloutWorker.collect, seconds, self._kind, self._opening
                    )
            parts = [part for poll in self._polls.values() for part in poll.parts.values()]
            concurrent.futures.wait(parts, return_when=concurrent.futures.FIRST_COMPLETED)
            for rank in [rank for rank, poll in self._polls.items() if poll.done()]:
                found = self._found(rank, self._polls.pop(rank))
                for output in found.outputs:
                    by_rank[rank].answer(output)
                    yield output
                if found.silence > self.patience:
                    lost = WorkerLost(
                        f"{self._group.role}-{rank} has read and sampled no token for {self.patience:g} s "
                        "(trainer.worker_timeout) while requests waited: an engine hangs"
                    )
                    stack = self._group.call_one(rank, RolloutWorker.stack, self._kind).result()
                    lost.add_note(f"it is here:\n{stack}")
                    raise lost

    def _found(self, rank: int, poll: Future[FinishedOutputs]) -> FinishedOutputs:
        """Return what a rank has. Where its engine has failed because another rank is lost, in the middle of
        a collective, the loss is raised: it counts before what follows from it.
        """
        try:
            return poll.result()
        except WorkerError:
            raise
        except Exception as error:
            if self._group.world_size > len(self.replicas):
                self._state.broken = error
            for other in sorted({*range(self._group.world_size)} - {rank}):
                try:
                    self._poll(other).result()
                except WorkerLost as lost:
                    lost.add_note(f"then failed {self._group.role}-{rank}: {error}")
                    raise lost from error
                except Exception as further:  # of the same cause, or less telling than the first one
                    error.add_note(f"then failed {self._group.role}-{other}: {further}")
            raise

    def _poll(self, rank: int) -> Future[FinishedOutputs]:
        """Return the rank's poll, which ends at once, or when the rank is known to be lost."""
        self._group.call_one(rank, RolloutWorker.end_poll, self._kind, self._opening)
        if rank in self._polls:
            return self._polls.pop(rank)
        return self._group.call_one(rank, RolloutWorker.collect, 0.0, self._kind, self._opening)

    def _stepped_seconds(self) -> float:
        return self._occupancy.seconds().get("stepped", 0.0)


class RolloutGroup(WorkerGroup[RolloutWorker]):
    """The replicas of the rollout, of `tensor_model_parallel_size` ranks each.

    `opened` gives a client for requests that come and go, and `serve` has the engines answer them. `generate`
    and `run` do both for a list of requests and for a piece of work; within `opened` they set the other
    requests aside, which go on afterwards.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        state = GroupState(count(1))
        self._main = ReplicaSet(self, "main", state)
        self._between = ReplicaSet(self, "between", state)
        self._is_open = False
        self._in_between = threading.Lock()
        self._pushed_bytes = 0

    @property
    def replicas(self) -> tuple[WorkerReplica, ...]:
        """The replicas, in the order of their ranks."""
        return self._main.replicas

    def seconds_in(self, state: Literal["busy", "standing"]) -> float:
        """Return the seconds since the start in which a replica, on average, was stepped for requests
        (`busy`), or had requests and was not stepped (`standing`).
        """
        calls = [self.call_one(rank, RolloutWorker.seconds_by_state) for rank in self.mesh.leaders]
        return sum(call.result().get(state, 0.0) for call in calls) / len(calls)

    @contextmanager
    def opened(self) -> Iterator[LLMClient]:
        """Give a client whose requests `serve` answers; they may be sent from any thread or event loop.

        At the end of the context, requests without an answer fail with ReplicaLost. RolloutError where the
        group is open already.
        """
        if self._is_open:
            raise RolloutError(f"{self.role} is open already: one caller at a time opens it")
        self._is_open = True
        try:
            with self._main.opened() as client:
                yield client
        finally:
            self._is_open = False

    def serve(self, over: Over) -> RolloutStats:
        """Answer the requests of `opened` in the caller's thread, until `over()` is true; return counts.

        Call `wake` when `over()` has become true. Requests without an answer keep what they have begun, and
        go on in the next `serve`, under the weights of then. Where an engine fails, its error is raised and
        all these requests get ReplicaLost.
        """
        return self._main.serve(over)

    def wake(self) -> None:
        """End `serve` if it is over by now; any thread may call this."""
        self._main.wake()

    def generate(
        self, requests: Sequence[GenerationRequest], *, finished: Finished | None = None
    ) -> Generated:
        """Answer all requests; those of one prompt go to one replica.

        `finished` is called once with each output, as soon as it is there, in the caller's thread.
        """
        check_ids(requests)
        parts = [list(requests)]
        if len(self.replicas) > 1:
            parts = cut_items(requests, plan_items(requests, self.mesh))
        answers = {}
        with self._serving() as (serving, _):
            for replica, part in zip(serving.replicas, parts, strict=True):
                for request, answer in zip(part, replica.submit_many(part)):
                    answers[request.request_id] = answer
            for replica in serving.replicas:
                replica.wait_until_submitted()
            stats = serving.serve(
                lambda: not any(replica.load for replica in serving.replicas),
                closed=True,
                total=len(requests),
                finished=finished,
            )
        return Generated([answers[request.request_id].result(0) for request in requests], stats)

    def run(self, work: Callable[[LLMClient], Coroutine[Any, Any, T]]) -> tuple[T, RolloutStats]:
        """Serve `work`, which runs in an event loop in another thread, until it has ended.

        Returns its result, and counts of all replicas together; raises what it raises. Where an engine
        fails, `work` gets ReplicaLost, and the engine's error is raised here.
        """
        with self._serving() as (serving, client), in_own_loop(lambda: work(client)) as result:
            result.add_done_callback(lambda _: serving.wake())
            try:
                stats = serving.serve(result.done)
            except BaseException:
                concurrent.futures.wait([result], UNWIND_SECONDS)  # its requests have just failed
                raise
        return result.result(), stats

    def set_aside(self) -> AbstractContextManager[None]:
        """Pause the requests of `opened` in this context, and step no engine for them, so that
        other calls in the workers' processes have the devices for themselves.
        """
        return self._main.set_aside()

    def break_off(self) -> None:
        """End `generate` or `serve` in another thread; requests without an answer get ReplicaLost."""
        self._main.lose(RolloutError("it was broken off"))
        self._main.wake()

    def can_stage(self, actor: ActorGroup) -> bool:
        """Return whether the actor's weights can be kept beside those that generate, until they are taken.

        They cannot where the two share processes: the replicas then generate with the actor's own module, or
        gather its shards as they are at that time.
        """
        return not self.backend.are_colocated(actor.role, self.role)

    def stage(self, actor: ActorGroup, version: int) -> StagedWeights:
        """Copy the actor's weights as they are after the calls so far, to be taken as `version` later.

        The copy is made while the caller goes on, and an error of it is raised when it is taken. It is in
        the memory of the actor's nodes (Ray's object store) until then. RolloutError where `can_stage` is
        false.
        """
        if not self.can_stage(actor):
            raise RolloutError(
                f"weights of version {version} cannot be staged: {self.role} shares processes with "
                f"{actor.role} and generates with its weights. Set trainer.placement.{self.role} to a pool "
                "of its own"
            )
        return stage_weights(actor, version)

    def take(self, staged: StagedWeights) -> None:
        """Give all replicas staged weights, between two steps of whatever they serve, and free these.

        Raises RolloutError where they do not arrive as the actor held them, or were taken before, WorkerError
        where that takes longer than trainer.worker_timeout.
        """
        shares = staged.shares
        if shares is None:
            raise RolloutError(f"weights of version {staged.version} were taken already: stage them again")
        staged.shares = None
        version = staged.version
        with self._taking(version):
            took = self.call_list(RolloutWorker.update_weights, shares.by_reference(), version=version)
            if None in took:  # a replica has not the weights that the shares change
                whole = staged.again().by_reference()
                took += self.call_list(RolloutWorker.update_weights, whole, version=version)
        self._pushed_bytes += sum(each or 0 for each in took) // len(self.replicas)

    def pushed_bytes(self) -> int:
        """Return the bytes of weights that a replica has been sent since the last call, on average."""
        pushed = self._pushed_bytes
        self._pushed_bytes = 0
        return pushed

    def update_from(self, actor: ActorGroup, version: int) -> None:
        """Give all replicas the actor's weights, called `version` from now on, between two steps of whatever
        they serve.

        Where replicas share the actor's module nothing is sent, and they learn its version. Raises
        RolloutError where an update does not reach a replica, and where the two share processes and the
        rollout is not on all processes of the actor.
        """
        if self.backend.are_colocated(actor.role, self.role):
            if self.world_size != actor.world_size:
                raise RolloutError(
                    f"{self.role} shares processes with {actor.role} and has {self.world_size} ranks where "
                    f"{actor.role} has {actor.world_size}: all must take part where shards are gathered, and "
                    "no others. Set trainer.placement.rollout to the actor's pool, or to others only"
                )
            with self._taking(version):
                self.call(RolloutWorker.renew_weights, version=version)
            return
        self.take(_exported(actor, version, ActorWorker.export_buckets))

    @contextmanager
    def _serving(self) -> Iterator[tuple[ReplicaSet, LLMClient]]:
        """Yield a replica set for one caller, with a client: within `opened` the one for requests in between,
        while those of the other are set aside.
        """
        if not self._is_open:
            with self.opened() as client:
                yield self._main, client
            return
        if not self._in_between.acquire(blocking=False):
            raise RolloutError(f"{self.role} generates a list already: one caller at a time may")
        try:
            with self._main.set_aside(), self._between.opened() as client:
                yield self._between, client
        finally:
            self._in_between.release()

    @contextmanager
    def _taking(self, version: int) -> Iterator[None]:
        """Mark the replicas as taking weights of this version; after the context they have it."""
        try:
            with self._main.weights_change(), self._between.weights_change():
                yield
        except Exception as error:
            names = ", ".join(replica.name for replica in self.replicas)
            error.add_note(f"while {names} took weights of version {version}")
            raise
        for serving in (self._main, self._between):
            for replica in serving.replicas:
                replica.version = version


def stage_weights(actor: ActorGroup, version: int) -> StagedWeights:
    """Copy the actor's weights as `RolloutGroup.stage` does, for replicas in processes of their own."""
    return _exported(actor, version, ActorWorker.export_whole)


def _exported(actor: ActorGroup, version: int, export: Callable[..., Any]) -> StagedWeights:
    def submit(method: Callable[..., Any]) -> Future[list[WeightShare]]:
        return actor.submit_each(method, [version] * actor.world_size)

    return StagedWeights(version, submit(export), lambda: submit(ActorWorker.export_again))
