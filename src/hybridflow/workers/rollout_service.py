"""Requests of one channel, which the engines of all replicas serve in one session after the other.

serve(over)  closed ──begin──► stepping ──turn──► stepping ─ … ─► closed, when it is over or parked
                                │    ▲
                                ▼    │ resume
                               resting: the weights change between two turns of the session
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Literal

from hybridflow.controller import WorkerGroup
from hybridflow.errors import RolloutError, WorkerError, WorkerLost
from hybridflow.observability.occupancy import Occupancy
from hybridflow.rollout.base import GenerationOutput, RolloutStats
from hybridflow.rollout.client import LLMClient
from hybridflow.workers.rollout import Finished, RolloutWorker
from hybridflow.workers.rollout_replica import WorkerReplica
from hybridflow.workers.rollout_turn import Session
from hybridflow.workers.rollout_use import ReplicaUse

Over = Callable[[], bool]
"""Whether enough was served; called in the thread that serves and in those that wake it."""
Pause = Literal["park", "rest"]
"""park: the session ends, and what it runs goes on in the next. rest: it stays open where the worker keeps
keys and values when the weights change.
"""


class Deadline:
    """A moment after which something has taken too long, so many seconds after it was last renewed."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.renew()

    @property
    def left(self) -> float:
        """Seconds until then; negative ones afterwards."""
        return self._at - time.monotonic()

    def renew(self) -> None:
        """Begin anew."""
        self._at = time.monotonic() + self.seconds


class Service:
    """The requests of one channel and the sessions in which they are served.

    One thread at a time serves; every other method may be called from any thread. `number` gives the number
    of the next session, which is the group's own. `uses` has what is measured of each replica.
    """

    def __init__(
        self,
        group: WorkerGroup[RolloutWorker],
        channel: int,
        number: Callable[[], int],
        uses: Sequence[ReplicaUse],
    ) -> None:
        self.replicas = tuple(
            WorkerReplica(
                group, rank, channel, use, stepped=self.stepped, pause=self.pause, resume=self.resume
            )
            for rank, use in zip(group.mesh.leaders, uses, strict=True)
        )
        self._uses = uses
        self._occupancy = Occupancy("closed")
        self._group = group
        self._channel = channel
        self._number = number
        self._changed = threading.Condition()
        self._state: Literal["closed", "stepping", "resting"] = "closed"
        self._pauses: dict[Pause, int] = {"park": 0, "rest": 0}
        self._contexts = 0  # pauses that end by themselves
        self._wakes = 0
        self._over: Over = lambda: False
        self._session = 0  # number of the newest session

    @contextmanager
    def opened(self) -> Iterator[LLMClient]:
        """Let the replicas take requests in this context; afterwards nothing of them is left anywhere."""
        self._pauses = {"park": 0, "rest": 0}
        for replica in self.replicas:
            replica.open()
        try:
            yield LLMClient(self.replicas)
        except BaseException as error:
            self.lose(error)
            raise
        finally:
            for replica in self.replicas:
                replica.lose(replica.failure or "nothing is generated now: generate() or run() has ended")

    def stepped(self) -> float:
        """Return the seconds in which the engines were stepped for these requests."""
        return self._occupancy.seconds().get("stepping", 0.0)

    def lose(self, error: BaseException) -> None:
        """Fail the requests without an answer, and take no others, because of this error."""
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
        """Have the engines stepped in one session after the other, between which they may be paused, until it
        is `over`; return counts of all of them.

        Where the engines fail, all requests without an answer fail with them.
        """
        stats: list[RolloutStats] = []
        self._over = over
        try:
            while self._begin(over):
                stats.append(self._serve_session(closed, total, finished))
                self._be("closed")
        except BaseException as error:
            left = sum(replica.load for replica in self.replicas)
            if left:
                error.add_note(f"{left} requests had no answer of {', '.join(self._names)}")
            self.lose(error)
            raise
        finally:
            self._be("closed")
        return RolloutStats.join(stats, together=False)

    def wake(self) -> None:
        """Have `serve` end if it is over by now."""
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()
            is_open = self._state != "closed"
        if is_open and self._over():
            with suppress(WorkerError):  # of a lost worker, which whoever serves is told
                self._end("park")

    def pause(self, how: Pause = "park") -> None:
        """Return when the engines are not stepped any more. WorkerLost where that takes twice as long as a
        call may: whoever watches the calls ends one that hangs before, and then says where it hangs.
        """
        with self._changed:
            self._pauses[how] += 1
            self._changed.notify_all()
            is_open = self._state != "closed"
        if is_open:
            self._end(how)
        still = ("closed",) if how == "park" else ("closed", "resting")
        patience = 2 * self.patience
        with self._changed:
            if not self._changed.wait_for(lambda: self._state in still, patience):
                self._pauses[how] -= 1
                self._changed.notify_all()
                raise WorkerLost(
                    f"{', '.join(self._names)} did not come to the end of a step within {patience:g} s, "
                    "twice trainer.worker_timeout: an engine hangs"
                )

    def resume(self, how: Pause = "park") -> None:
        """Take back one `pause`."""
        with self._changed:
            self._pauses[how] = max(0, self._pauses[how] - 1)
            self._changed.notify_all()

    @contextmanager
    def paused(self, how: Pause = "park") -> Iterator[None]:
        """Have the engines stand in this context; errors as in `pause`."""
        with self._changed:
            self._contexts += 1
        try:
            self.pause(how)
            try:
                yield
            finally:
                self.resume(how)
        finally:
            with self._changed:
                self._contexts -= 1
                self._changed.notify_all()

    @property
    def patience(self) -> float:
        """Seconds that a step of the workers may take before something is wrong."""
        return min(self._group.backend.call_timeout, threading.TIMEOUT_MAX / 4)

    @property
    def _names(self) -> list[str]:
        return [replica.name for replica in self.replicas]

    def _end(self, how: Pause) -> None:
        """Have the open session end, or rest, before its next step."""
        method = RolloutWorker.park if how == "park" else RolloutWorker.rest
        for replica in self.replicas:
            with suppress(WorkerError):  # it is lost, which whoever serves is told
                self._group.call_one(replica.rank, method, self._session, self._channel)

    def _be(self, state: Literal["closed", "stepping", "resting"]) -> None:
        with self._changed:
            self._set(state)

    def _set(self, state: Literal["closed", "stepping", "resting"]) -> None:
        self._state = state
        self._occupancy.be(state)
        for use in self._uses:
            use.be_stepped(self._channel, state == "stepping")
        self._changed.notify_all()

    def _begin(self, over: Over) -> bool:
        """Wait while the engines are paused; return whether a session has begun."""
        stood = Deadline(3 * self.patience)
        while True:
            with self._changed:
                seen = self._wakes
            if over():  # without the lock, since whoever asks may hold another one
                return False
            with self._changed:
                if self._wakes == seen and not any(self._pauses.values()):
                    self._set("stepping")
                    self._session = self._number()
                    return True
                self._stand(stood, partial(self._may_go_on, seen))

    def _may_go_on(self, seen: int) -> bool:
        return self._wakes != seen or not any(self._pauses.values())

    def _serve_session(self, closed: bool, total: int | None, finished: Finished | None) -> RolloutStats:
        """Have the engines stepped until they sleep; return the counts of all replicas together."""
        heard = 0

        def arrived(output: GenerationOutput) -> None:
            nonlocal heard
            heard += 1
            if finished is not None:
                finished(output)

        session = Session(self._group, self.replicas, self._channel, self._session, closed)
        before: list[int] = []
        worked_at = self.stepped()
        while True:
            served = session.turn(heard, total, arrived, lambda: self._end("park"))
            done = [heard, *(state.stats.generated_tokens + state.stats.prefill_tokens for state in served)]
            asked = any(replica.load for replica in self.replicas)
            asked = asked or any(state.has_requests for state in served)  # those of collectors too
            if done != before or not asked:
                worked_at = self.stepped()
            elif self.stepped() - worked_at > self.patience:  # rests do not count
                raise WorkerLost(
                    f"{', '.join(self._names)} have read and sampled no token for {self.patience:g} s "
                    "(trainer.worker_timeout) while requests waited: an engine hangs"
                )
            before = done
            for replica, state in zip(self.replicas, served, strict=True):
                replica.version = state.version
            if all(state.finished for state in served):
                return RolloutStats.join([state.stats for state in served], together=True)
            self._rest(self._over)

    def _rest(self, over: Over) -> None:
        """Stand between two turns of a session while its weights change; return where it is to end."""
        stood = Deadline(3 * self.patience)
        while True:
            with self._changed:
                seen = self._wakes
            ends = over()
            with self._changed:
                if ends or not self._pauses["rest"] or self._pauses["park"]:
                    self._set("stepping")
                    return
                self._set("resting")
                self._stand(stood, partial(self._may_leave, seen))

    def _may_leave(self, seen: int) -> bool:
        return self._wakes != seen or not self._pauses["rest"] or bool(self._pauses["park"])

    def _stand(self, deadline: Deadline, goes_on: Callable[[], bool]) -> None:
        """Wait, with the lock held, for what ends a pause.

        A pause that ends with a context may last: what is done in it has deadlines of its own.
        """
        if self._contexts:
            self._changed.wait_for(lambda: goes_on() or not self._contexts)
            deadline.renew()
        elif not self._changed.wait_for(lambda: goes_on() or bool(self._contexts), deadline.left):
            raise RolloutError(
                f"{', '.join(self._names)} stood for {deadline.seconds:g} s, thrice trainer.worker_timeout: "
                "a pause was not ended by a resume"
            )
