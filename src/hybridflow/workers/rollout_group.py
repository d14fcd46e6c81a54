"""The driver's view of generation: each replica of the workers as one that many callers share.

generate(list) ──submit_many──► WorkerReplica ──submit──► worker's inbox ─┐
run(work) ──LLMClient──submit──────┘   ▲                                  │ serve, turn by turn
                                       └── outputs, as they finish ◄──────┘
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from hybridflow.controller import Future, WorkerGroup
from hybridflow.controller.dealing import cut_items, plan_items
from hybridflow.errors import RolloutError, WorkerError
from hybridflow.observability.progress import progress
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, RolloutStats
from hybridflow.rollout.client import LLMClient, ReplicaLost
from hybridflow.rollout.engine_replica import Tap
from hybridflow.rollout.own_loop import in_own_loop
from hybridflow.rollout.requests import check_ids
from hybridflow.workers.actor import ActorGroup, ActorWorker
from hybridflow.workers.rollout import Collected, Finished, RolloutWorker, Served

T = TypeVar("T")

TURN_SECONDS = 60.0
"""Longest turn of an engine, after which its process looks for other calls."""
POLL_SECONDS = 5.0
"""Longest wait for the next output of a replica before it is asked again."""
UNWIND_SECONDS = 1.0
"""Time for work to hear that its engines are lost, before it is cancelled."""


@dataclass(frozen=True)
class Generated:
    """The outputs of a list of requests."""

    outputs: list[GenerationOutput]
    """In the order of the requests."""
    stats: RolloutStats
    """Counts of all replicas together."""


@dataclass(frozen=True)
class StagedWeights:
    """Weights of a version on their way to the replicas."""

    version: int
    shares: Future[Any]


class WorkerReplica:
    """A replica in the workers (`client.Replica`); its methods may be called from any thread.

    It takes requests while `RolloutGroup.run` or `generate` serves them. `rank` is the replica's first.
    """

    def __init__(self, group: RolloutGroup, rank: int) -> None:
        self.name = f"{group.role}-{rank}"
        self.rank = rank
        self.version: int | None = None
        """Version of the weights, as the engine said at the end of its newest turn."""
        self.failure: str | None = None
        self._group = group
        self._lock = threading.Lock()
        self._answers: dict[int, concurrent.futures.Future[GenerationOutput]] = {}
        self._sent: Future[None] | None = None  # the newest call of `submit`; earlier ones end before it
        self._looked: Future[int] | None = None
        self._waiting = 0

    @property
    def load(self) -> int:
        """Number of requests without an answer."""
        return len(self._answers)

    @property
    def waiting(self) -> int:
        """Requests that had no room in the engine when it was last looked at; each time it is asked anew."""
        with suppress(WorkerError):  # it is lost, which whoever awaits its answers is told
            if self._looked is not None and self._looked.done():
                looked = self._looked
                self._looked = None
                self._waiting = looked.result()
            if self._looked is None:
                self._looked = self._group.call_one(self.rank, RolloutWorker.num_waiting)
        return self._waiting

    def submit(
        self, request: GenerationRequest, tap: Tap | None = None
    ) -> concurrent.futures.Future[GenerationOutput]:
        """Return a future of the output, which comes whole: `tap` gets no pieces. Errors as in
        `submit_many`.
        """
        return self.submit_many([request])[0]

    def submit_many(
        self, requests: Sequence[GenerationRequest]
    ) -> list[concurrent.futures.Future[GenerationOutput]]:
        """Return a future of each output; all requests join before the same step.

        RolloutError for an id that is running, ReplicaLost where the replica is closed.
        """
        with self._lock:
            if self.failure is not None:
                raise ReplicaLost(self.failure)
            check_ids(requests, self._answers)
            futures = [concurrent.futures.Future[GenerationOutput]() for _ in requests]
            for request, future in zip(requests, futures):
                future.set_running_or_notify_cancel()  # a caller that gives up says abort()
                self._answers[request.request_id] = future
            if requests:
                self._sent = self._group.call_one(self.rank, RolloutWorker.submit, requests)
        return futures

    def wait_until_submitted(self) -> None:
        """Return when the worker has all requests that were submitted."""
        if self._sent is not None:
            self._sent.result()

    def abort(self, request_ids: Iterable[int]) -> None:
        """End these requests with what they have; unknown ones are passed over."""
        self._group.call_one(self.rank, RolloutWorker.abort, list(request_ids))

    def pause(self) -> None:
        """Return when no engine of the role is stepped any more; the requests keep what they have begun.
        RolloutError where that takes too long.
        """
        self._group.pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._group.resume()

    def close(self, timeout_s: float = 60.0) -> None:
        """Take no more requests; those without an answer get ReplicaLost."""
        running = list(self._answers)
        self.lose(f"replica {self.name} was closed")
        self.abort(running)

    def open(self) -> None:
        """Take requests from now on."""
        self.failure = None

    def answer(self, output: GenerationOutput) -> None:
        """Give an output to whoever awaits it, if anybody does."""
        with self._lock:
            future = self._answers.pop(output.request_id, None)
        if future is not None:
            future.set_result(output)

    def lose(self, failure: str) -> None:
        """Fail the requests without an answer, and refuse others, for this reason."""
        with self._lock:
            self.failure = failure
            left = self._answers
            self._answers = {}
        if left:
            with suppress(WorkerError):  # the worker itself may be what is lost
                self._group.call_one(self.rank, RolloutWorker.forget)
        for future in left.values():
            future.set_exception(ReplicaLost(failure))


class RolloutGroup(WorkerGroup[RolloutWorker]):
    """The replicas of the rollout, of `tensor_model_parallel_size` ranks each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._changed = threading.Condition()
        self._pauses = 0
        self._is_open = False
        self._over: Callable[[], bool] | None = None
        self._serving = False
        self._session = 0  # number of the newest session of the engines

    @cached_property
    def replicas(self) -> tuple[WorkerReplica, ...]:
        """The replicas, in the order of their ranks."""
        return tuple(WorkerReplica(self, rank) for rank in self.mesh.leaders)

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
        with self._opened():
            for replica, part in zip(self.replicas, parts, strict=True):
                for request, answer in zip(part, replica.submit_many(part)):
                    answers[request.request_id] = answer
            for replica in self.replicas:
                replica.wait_until_submitted()
            stats = self._serve(
                closed=True,
                over=lambda: all(answer.done() for answer in answers.values()),
                total=len(requests),
                finished=lambda output: (
                    finished(output) if finished is not None and output.request_id in answers else None
                ),
            )
        return Generated([answers[request.request_id].result(0) for request in requests], stats)

    def run(self, work: Callable[[LLMClient], Coroutine[Any, Any, T]]) -> tuple[T, RolloutStats]:
        """Serve `work`, which runs in an event loop of its own thread, until it has ended.

        Returns its result, and counts of all replicas together; raises what it raises. Where an engine
        fails, `work` gets ReplicaLost, and the engine's error is raised here.
        """
        client = LLMClient(self.replicas)
        with self._opened(), in_own_loop(lambda: work(client)) as result:
            result.add_done_callback(lambda _: self._park())
            try:
                stats = self._serve(closed=False, over=result.done)
            except BaseException as error:
                self._lose(error)
                concurrent.futures.wait([result], UNWIND_SECONDS)  # its requests have just failed
                raise
        return result.result(), stats

    @contextmanager
    def opened(self) -> Iterator[LLMClient]:
        """Let the replicas take requests in this context, by the client that it gives or by `generate`.

        They are answered while `serve` runs; what it leaves is kept as far as it was begun.
        """
        with self._opened():
            yield LLMClient(self.replicas)

    def serve(self, over: Callable[[], bool]) -> RolloutStats:
        """Have the engines stepped, in this thread, until it is `over`, which is asked after each `wake`."""
        self._over = over
        try:
            return self._serve(closed=False, over=over)
        finally:
            self._over = None

    def wake(self) -> None:
        """Have `serve` look whether it is over."""
        over = self._over
        if over is not None and over():
            self._park()

    def pause(self) -> None:
        """Return when no engine is stepped any more; weights may then be changed. RolloutError where that
        takes longer than a call may.
        """
        with self._changed:
            self._pauses += 1
        self._park()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._serving, self._patience):
                self._pauses -= 1
                self._changed.notify_all()
                raise RolloutError(f"{self.role}: the engines were not parked within {self._patience:g} s")

    def resume(self) -> None:
        """Take back one `pause`."""
        with self._changed:
            self._pauses -= 1
            self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Step no engine in this context, so that other calls of the workers need not wait for a turn."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def update_from(self, actor: ActorGroup, version: int) -> None:
        """Give all replicas the actor's weights, called `version` from now on.

        Where replicas share the actor's module nothing is sent, and they learn its version. Raises
        RolloutError where an update does not reach a replica, and where the two share processes and the
        rollout is not on all processes of the actor.
        """
        if self.backend.together(actor.role, self.role):
            if self.world_size < actor.world_size:
                raise RolloutError(
                    f"{self.role} has {self.world_size} of the {actor.world_size} ranks of {actor.role}, "
                    "whose weights it shares: all must "
                    "take part where shards are gathered. Set trainer.placement.rollout to the actor's "
                    "pool, or to others only"
                )
            # a role lives on whole pools: it has no rank outside of the actor's
            if self.world_size == actor.world_size:
                self.call(RolloutWorker.renew_weights, version=version)
                return
        self.take(self.stage(actor, version))

    def stage(self, actor: ActorGroup, version: int) -> StagedWeights:
        """Export the actor's weights as they are now, for `take`; they wait where they were exported."""
        return StagedWeights(
            version, actor.submit_each(ActorWorker.export_buckets, [version] * actor.world_size)
        )

    def take(self, staged: StagedWeights) -> None:
        """Give staged weights to all replicas. RolloutError where they do not reach one."""
        self.call(RolloutWorker.update_weights, staged.shares.by_reference(), version=staged.version)

    def break_off(self) -> None:
        """Have `generate` or `run` in another thread end with ReplicaLost."""
        self._lose(RolloutError("it was broken off"))
        self._park()

    @property
    def _patience(self) -> float:
        """Seconds that a step of the workers may take before something is wrong."""
        return min(self.backend.call_timeout, threading.TIMEOUT_MAX)

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Let the replicas take requests in this context; afterwards nothing of them is left anywhere."""
        if self._is_open:
            yield
            return
        self._is_open = True
        self._pauses = 0
        for replica in self.replicas:
            replica.open()
        try:
            yield
        except BaseException as error:
            self._lose(error)
            raise
        finally:
            self._is_open = False
            for replica in self.replicas:
                replica.lose(replica.failure or "nothing is generated now: generate() or run() has ended")

    def _lose(self, error: BaseException) -> None:
        for replica in self.replicas:
            replica.lose(f"generation has ended: {type(error).__name__}: {error}")

    def _park(self) -> None:
        """Have the session end that the engines are stepped in, if there is one."""
        with self._changed:
            self._changed.notify_all()
            session = self._session if self._serving else 0
        if session:
            for replica in self.replicas:
                self.call_one(replica.rank, RolloutWorker.park, session)

    def _serve(
        self,
        *,
        closed: bool,
        over: Callable[[], bool],
        total: int | None = None,
        finished: Finished | None = None,
    ) -> RolloutStats:
        """Have the engines stepped in one session after the other, between which they may be paused, until it
        is `over`; return counts of all of them.
        """
        stats: list[RolloutStats] = []
        try:
            while self._begin(over):
                stats.append(self._serve_session(closed, total, finished))
                self._stand()
        finally:
            self._stand()
        return RolloutStats.join(stats, together=False)

    def _begin(self, over: Callable[[], bool]) -> bool:
        """Wait while the engines are paused; return whether a session is to begin."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._pauses or over(), self._patience):
                raise RolloutError(f"{self.role}: a pause was not ended within {self._patience:g} s")
            self._serving = not over()
            self._session += int(self._serving)
            return self._serving

    def _stand(self) -> None:
        with self._changed:
            self._serving = False
            self._changed.notify_all()

    def _serve_session(self, closed: bool, total: int | None, finished: Finished | None) -> RolloutStats:
        """Have the engines stepped until they sleep; return the counts of all replicas together."""
        heard = 0

        def arrived(output: GenerationOutput) -> None:
            nonlocal heard
            heard += 1
            if finished is not None:
                finished(output)

        turn = self._turn_here if self.backend.in_process else self._turn_there
        while True:
            served = turn(closed, (heard, total), arrived)
            for replica, state in zip(self.replicas, served, strict=True):
                replica.version = state.version
            if all(state.finished for state in served):
                return RolloutStats.join([state.stats for state in served], together=True)

    def _turn_here(self, closed: bool, awaited: tuple[int, int | None], finished: Finished) -> list[Served]:
        """Do a turn of the engine in this process, in this thread."""

        def arrived(output: GenerationOutput) -> None:
            self.replicas[0].answer(output)
            finished(output)

        return self.call_list(
            RolloutWorker.serve,
            self._session,
            closed=closed,
            seconds=TURN_SECONDS,
            awaited=awaited,
            finished=arrived,
        )

    def _turn_there(self, closed: bool, awaited: tuple[int, int | None], finished: Finished) -> list[Served]:
        """Do a turn of the engines in other processes, and take their outputs meanwhile.

        Where an exception of this thread's own leaves it, the session is ended on the workers too.
        """
        turn = _Turn(self, self._session, closed)
        try:
            for output in progress.results(turn.outputs(), awaited[1], done=awaited[0]):
                finished(output)
            return turn.result()
        except BaseException:
            if not turn.failed:
                self._park()
                while not turn.ended():
                    turn = _Turn(self, self._session, closed)
            raise


class _Turn:
    """A call of `serve`, with a poll at each replica for the outputs that finish meanwhile."""

    def __init__(self, group: RolloutGroup, session: int, closed: bool) -> None:
        self._group = group
        self._session = session
        part_of_limit = group.backend.call_timeout / 4
        self._poll_seconds = min(POLL_SECONDS, part_of_limit)
        seconds = min(TURN_SECONDS, part_of_limit)
        self._call = group.submit_list(RolloutWorker.serve, session, closed=closed, seconds=seconds)
        self._polls = {replica: self._poll(replica) for replica in group.replicas}

    @property
    def failed(self) -> bool:
        """Whether a worker has raised or was lost."""
        parts = [
            *self._call.parts.values(),
            *(part for poll in self._polls.values() for part in poll.parts.values()),
        ]
        return any(part.done() and part.exception() is not None for part in parts)

    def outputs(self) -> Iterator[GenerationOutput]:
        """Yield outputs as they come until the turn is over; raise what a worker raised."""
        while self._polls:
            self._wait()
            for replica, poll in list(self._polls.items()):
                if not poll.done():
                    continue
                found = poll.result()
                del self._polls[replica]
                if not found.turn_is_over:
                    self._polls[replica] = self._poll(replica)
                for output in found.outputs:
                    replica.answer(output)
                    yield output

    def result(self) -> list[Served]:
        """Return the state of each replica after the turn."""
        return self._call.result()

    def ended(self) -> bool:
        """Wait for the end of a turn whose outputs nobody wants; return whether all sessions ended."""
        for _ in self.outputs():
            pass
        return all(state.finished for state in self.result())

    def _poll(self, replica: WorkerReplica) -> Future[Collected]:
        return self._group.call_one(replica.rank, RolloutWorker.collect, self._session, self._poll_seconds)

    def _wait(self) -> None:
        """Wait for the next answer of a poll or of the call; raise where the call has failed."""
        waiting = [part for part in self._call.parts.values() if not part.done()]
        waiting += [part for poll in self._polls.values() for part in poll.parts.values()]
        concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
        if any(part.done() and part.exception() is not None for part in self._call.parts.values()):
            self._call.result()
