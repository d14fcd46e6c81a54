"""The driver's view of generation: replicas of the workers that many callers share, and their weights.

generate(list) ──submit_many──► WorkerReplica ──submit──► worker's inbox ─┐
opened(), run(work) ──LLMClient──submit──┘ ▲                              │ serve, turn by turn
                                           └── outputs, as they finish ◄──┘
actor ──stage──► StagedWeights ──take, between two turns──► all replicas
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, TypeVar

from hybridflow.controller import Future, WorkerGroup
from hybridflow.controller.dealing import cut_items, plan_items
from hybridflow.errors import RolloutError
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, RolloutStats
from hybridflow.rollout.client import LLMClient
from hybridflow.rollout.own_loop import in_own_loop
from hybridflow.rollout.requests import check_ids
from hybridflow.weight_sync.remote_push import WeightShare
from hybridflow.workers.actor import ActorGroup, ActorWorker
from hybridflow.workers.rollout import CHANNELS, Finished, RolloutWorker
from hybridflow.workers.rollout_replica import WorkerReplica
from hybridflow.workers.rollout_service import Over, Service
from hybridflow.workers.rollout_use import ReplicaUse, mean_seconds

T = TypeVar("T")

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


class RolloutGroup(WorkerGroup[RolloutWorker]):
    """The replicas of the rollout, of `tensor_model_parallel_size` ranks each.

    `opened` gives a client for requests that come and go, and `serve` has the engines answer them. `generate`
    and `run` do both for a list of requests and for a piece of work; within `opened` they set the other
    requests aside, which go on afterwards.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        numbers = count(1)
        self._uses = [ReplicaUse() for _ in self.mesh.leaders]
        self._services = tuple(
            Service(self, channel, lambda: next(numbers), self._uses) for channel in range(CHANNELS)
        )
        self._main = self._services[0]
        self._is_open = False
        self._in_between = threading.Lock()

    @property
    def replicas(self) -> tuple[WorkerReplica, ...]:
        """The replicas, in the order of their ranks."""
        return self._main.replicas

    def seconds_in(self, state: Literal["busy", "standing"]) -> float:
        """Return the seconds since the start in which a replica, on the mean, was stepped for requests
        (`busy`), or had requests and was not stepped (`standing`).
        """
        return mean_seconds(self._uses, state)

    def note_asked(self, asked: bool) -> None:
        """Note whether processes beside the driver have requests without an answer (`seconds_in`)."""
        for use in self._uses:
            use.be_asked(0, asked)

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

        Call `wake` when `over()` has become true: it is asked then, in the thread that wakes and in this one,
        and between two sessions. Requests without an answer keep what they have begun, and go on in the next
        `serve`, under the weights of then. Where an engine fails, its error is raised and all these requests
        get ReplicaLost.
        """
        return self._main.serve(over)

    def wake(self) -> None:
        """Have `serve` end if it is over by now; any thread may call this."""
        self._main.wake()

    def generate(
        self, requests: Sequence[GenerationRequest], *, finished: Finished | None = None
    ) -> Generated:
        """Answer all requests; those of one prompt go to one replica.

        `finished` hears of each output once, as soon as it is there, in the caller's thread.
        """
        check_ids(requests)
        parts = [list(requests)]
        if len(self.replicas) > 1:
            parts = cut_items(requests, plan_items(requests, self.mesh))
        answers = {}
        with self._service() as (service, _):
            for replica, part in zip(service.replicas, parts, strict=True):
                for request, answer in zip(part, replica.submit_many(part)):
                    answers[request.request_id] = answer
            for replica in service.replicas:
                replica.wait_until_submitted()
            stats = service.serve(
                lambda: not any(replica.load for replica in service.replicas),
                closed=True,
                total=len(requests),
                finished=finished,
            )
        return Generated([answers[request.request_id].result(0) for request in requests], stats)

    def run(self, work: Callable[[LLMClient], Coroutine[Any, Any, T]]) -> tuple[T, RolloutStats]:
        """Serve `work`, which runs in an event loop of its own thread, until it has ended.

        Returns its result, and counts of all replicas together; raises what it raises. Where an engine
        fails, `work` gets ReplicaLost, and the engine's error is raised here.
        """
        with self._service() as (service, client), in_own_loop(lambda: work(client)) as result:
            result.add_done_callback(lambda _: service.wake())
            try:
                stats = service.serve(result.done)
            except BaseException:
                concurrent.futures.wait([result], UNWIND_SECONDS)  # its requests have just failed
                raise
        return result.result(), stats

    def pause(self) -> None:
        """Return when no request of `opened` is served any more; all keep what they have begun. RolloutError
        where that takes longer than a call may.
        """
        self._main.pause()

    def resume(self) -> None:
        """Take back one `pause`."""
        self._main.resume()

    def paused(self) -> AbstractContextManager[None]:
        """Have the engines stand in this context, so that other calls of the workers wait for no turn."""
        return self._main.paused("rest")

    def break_off(self) -> None:
        """Have `generate` or `serve` in another thread end; requests without an answer get ReplicaLost."""
        self._main.lose(RolloutError("it was broken off"))
        self._main.wake()

    def can_stage(self, actor: ActorGroup) -> bool:
        """Return whether the actor's weights can be kept beside those that generate, until they are taken.

        They cannot where the two share processes: the replicas then generate with the actor's own module, or
        gather its shards as they are at that time.
        """
        return not self.backend.together(actor.role, self.role)

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
        return _exported(actor, version)

    def take(self, staged: StagedWeights) -> None:
        """Give all replicas staged weights, between two turns of whatever they serve, and free these.

        Raises RolloutError where they do not arrive as the actor held them, or were taken before, WorkerError
        where that takes longer than trainer.worker_timeout.
        """
        shares = staged.shares
        if shares is None:
            raise RolloutError(f"weights of version {staged.version} were taken already: stage them again")
        staged.shares = None
        with self._standing(staged.version):
            self.call(RolloutWorker.update_weights, shares.by_reference(), version=staged.version)

    def update_from(self, actor: ActorGroup, version: int) -> None:
        """Give all replicas the actor's weights, called `version` from now on, between two turns of whatever
        they serve.

        Where replicas share the actor's module nothing is sent, and they learn its version. Raises
        RolloutError where an update does not reach a replica, and where the two share processes and the
        rollout is not on all processes of the actor.
        """
        if self.backend.together(actor.role, self.role):
            if self.world_size != actor.world_size:
                raise RolloutError(
                    f"{self.role} shares processes with {actor.role} and has {self.world_size} ranks where "
                    f"{actor.role} has {actor.world_size}: all must take part where shards are gathered, and "
                    "no others. Set trainer.placement.rollout to the actor's pool, or to others only"
                )
            with self._standing(version):
                self.call(RolloutWorker.renew_weights, version=version)
            return
        self.take(_exported(actor, version))

    @contextmanager
    def _service(self) -> Iterator[tuple[Service, LLMClient]]:
        """Give a service to one caller, with a client: within `opened` the one in between, while the requests
        of the other stand.
        """
        if not self._is_open:
            with self.opened() as client:
                yield self._main, client
            return
        between = self._services[1]
        if not self._in_between.acquire(blocking=False):
            raise RolloutError(f"{self.role} generates a list already: one caller at a time may")
        try:
            with self._main.paused(), between.opened() as client:
                yield between, client
        finally:
            self._in_between.release()

    @contextmanager
    def _standing(self, version: int) -> Iterator[None]:
        """Have the engines stand while they get weights of this version, which their replicas then have."""
        names = ", ".join(replica.name for replica in self.replicas)
        try:
            with self._main.paused("rest"), self._services[1].paused("rest"):
                yield
        except Exception as error:
            error.add_note(f"while {names} took weights of version {version}")
            raise
        for service in self._services:
            for replica in service.replicas:
                replica.version = version


def _exported(actor: ActorGroup, version: int) -> StagedWeights:
    return StagedWeights(version, actor.submit_each(ActorWorker.export_buckets, [version] * actor.world_size))
