"""One turn of the engines, as the driver takes it: a call of `serve`, with the outputs that finish meanwhile.

in this process       the call runs in the caller's thread, and gives each output as it finishes
in other processes    a poll at each replica brings its outputs while the call runs
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hybridflow.controller import Future, WorkerGroup
from hybridflow.observability.progress import progress
from hybridflow.rollout.base import GenerationOutput
from hybridflow.workers.rollout import Collected, Finished, RolloutWorker, Served
from hybridflow.workers.rollout_replica import WorkerReplica

TURN_SECONDS = 60.0
"""Longest turn of an engine, after which its process looks for other calls."""
POLL_SECONDS = 5.0
"""Longest wait for the next output of a replica before it is asked again."""


@dataclass(frozen=True)
class Session:
    """A session of the engines of a group, which serve the requests of one channel."""

    group: WorkerGroup[RolloutWorker]
    replicas: Sequence[WorkerReplica]
    channel: int
    number: int
    closed: bool
    """Whether it has the requests that are there when it begins, and ends when they are answered."""

    def turn(
        self, done: int, total: int | None, finished: Finished, stop: Callable[[], None]
    ) -> list[Served]:
        """Do a turn and return the state of each replica after it; callers and `finished` hear of outputs.

        For the display, `done` outputs were there before and `total` will be (None: nobody knows). Where
        `finished` raises, the session has ended when that is raised: `stop` parks it.
        """
        if self.group.backend.in_process:
            return self._turn_here(done, total, finished)
        return self._turn_there(done, total, finished, stop)

    def _turn_here(self, done: int, total: int | None, finished: Finished) -> list[Served]:
        def arrived(output: GenerationOutput) -> None:
            self.replicas[0].answer(output)
            finished(output)

        return self.group.call_list(
            RolloutWorker.serve,
            self.number,
            self.channel,
            closed=self.closed,
            seconds=TURN_SECONDS,
            awaited=(done, total),
            finished=arrived,
        )

    def _turn_there(
        self, done: int, total: int | None, finished: Finished, stop: Callable[[], None]
    ) -> list[Served]:
        turn = _RemoteTurn(self)
        try:
            for output in progress.results(turn.outputs(), total, done=done):
                finished(output)
            return turn.result()
        except BaseException:
            if not turn.failed:
                stop()
                while not turn.ended():
                    turn = _RemoteTurn(self)
            raise


class _RemoteTurn:
    """A call of `serve`, with a poll at each replica for the outputs that finish meanwhile."""

    def __init__(self, session: Session) -> None:
        self._session = session
        part_of_limit = session.group.backend.call_timeout / 4
        self._poll_seconds = min(POLL_SECONDS, part_of_limit)
        self._call = session.group.submit_list(
            RolloutWorker.serve,
            session.number,
            session.channel,
            closed=session.closed,
            seconds=min(TURN_SECONDS, part_of_limit),
        )
        self._polls = {replica: self._poll(replica) for replica in session.replicas}

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
        session = self._session
        return session.group.call_one(replica.rank, RolloutWorker.collect, session.number, self._poll_seconds)

    def _wait(self) -> None:
        """Wait for the next answer of a poll or of the call; raise where the call has failed."""
        waiting = [part for part in self._call.parts.values() if not part.done()]
        waiting += [part for poll in self._polls.values() for part in poll.parts.values()]
        concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
        if any(part.done() and part.exception() is not None for part in self._call.parts.values()):
            self._call.result()
