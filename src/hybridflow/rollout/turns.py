"""An engine whose session is stepped in turns, so that other work of its process comes between them.

    submit, abort, park, rest (any thread) ──► Inbox ──take──► Turns ──► session ──► outputs
                                                 └── all ranks of a replica hear the same news

Weights change between two turns, and all collectives of a process stay in the thread that takes the turns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from hybridflow.distributed.replica_ranks import ReplicaRanks
from hybridflow.errors import HybridFlowError, RolloutError
from hybridflow.rollout.base import EngineSession, GenerationOutput, GenerationRequest, RolloutEngine

STEPS_PER_NEWS = 16
"""Steps of a closed session between two news that ranks tell each other: only an abort or a park can come."""


@dataclass(frozen=True)
class News:
    """Things that callers want of an engine since it was asked last."""

    joined: tuple[GenerationRequest, ...] = ()
    aborted: tuple[int, ...] = ()
    parks: int = 0
    """Number of the session that is to end, with what it has begun kept for the next one; 0: none."""
    rests: int = 0
    """Number of the session whose turn is to end, while what runs stays in the engine; 0: none."""
    over: bool = False
    """Whether the time of the turn is up."""


class Inbox:
    """Requests on their way to an engine; every method may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._news = News()

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Have requests join before the next step, those of one call before the same one.

        An abort that came before them meant an earlier request of the same number, which has ended.
        """
        joining = tuple(requests)
        numbers = {request.request_id for request in joining}
        with self._changed:
            aborted = tuple(number for number in self._news.aborted if number not in numbers)
            self._news = replace(self._news, joined=(*self._news.joined, *joining), aborted=aborted)
            self._changed.notify_all()

    def abort(self, request_ids: Iterable[int]) -> None:
        """Have requests end with what they have; unknown ones are passed over."""
        with self._changed:
            self._news = replace(self._news, aborted=(*self._news.aborted, *request_ids))
            self._changed.notify_all()

    def park(self, session: int) -> None:
        """Have the session of this number end before its next step; an older one has ended already."""
        with self._changed:
            self._news = replace(self._news, parks=session)
            self._changed.notify_all()

    def rest(self, session: int) -> None:
        """Have the turn of the session of this number end before its next step; the session stays open."""
        with self._changed:
            self._news = replace(self._news, rests=session)
            self._changed.notify_all()

    def forget(self) -> None:
        """Forget the requests that came, and the wishes to end some."""
        with self._changed:
            self._news = News(parks=self._news.parks, rests=self._news.rests)

    def take(self, seconds: float) -> News:
        """Return what came since the last call, and wait for it at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._news != News(), max(seconds, 0.0))
            news = self._news
            self._news = News()
        return news

    def put_back(self, requests: Iterable[GenerationRequest]) -> None:
        """Have requests join before all others that wait."""
        with self._changed:
            self._news = replace(self._news, joined=(*requests, *self._news.joined))


class Turns:
    """The session of an engine over several turns.

    A request that is parked goes on in the next session as `begun`: with the tokens that it has, whatever the
    weights are by then. `ranks` take the same turns together; the first of them has the inbox.
    """

    def __init__(self, ranks: ReplicaRanks) -> None:
        self.ranks = ranks
        self.inbox = Inbox()
        self._session: EngineSession | None = None
        self._running: dict[int, GenerationRequest] = {}

    @property
    def finished(self) -> bool:
        """Whether the newest turn has ended its session: parked it or, if closed, answered everything."""
        return self._session is None

    @property
    def has_requests(self) -> bool:
        """Whether the session has requests without an answer."""
        return bool(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that have joined and get no tokens yet, as any thread may ask."""
        session = self._session
        if session is None:
            return 0
        return max(0, len(self._running) - session.num_running)

    def turn(
        self, engine: RolloutEngine, number: int, *, closed: bool, seconds: float
    ) -> Iterator[GenerationOutput]:
        """Step the engine's session of this number for about `seconds`, and yield outputs as they finish.

        A `closed` session has the requests that are in the inbox when its first turn begins, and ends when
        they are answered; another waits for more until it is parked. Where an exception leaves the turn, all
        requests are dropped.
        """
        until = time.monotonic() + seconds
        try:
            session = self._session
            if session is None:
                session = self._session = engine.open(closed=closed)
            for step in count():
                news = News()
                if not closed or self.ranks.size == 1 or step % STEPS_PER_NEWS == 0:
                    news = self.ranks.from_first(self._news(session, until, closed))
                yield from self._heed(session, news)
                if news.parks == number:
                    self._park(session)
                    return
                if news.rests == number:
                    return
                if not session.idle:
                    yield from self._answered(session.step())
                if closed and session.idle:
                    self.end()
                    return
                if news.over:
                    return
        except HybridFlowError:
            self.drop()
            raise
        except Exception as error:
            left = len(self._running)
            self.drop()
            raise RolloutError(
                f"the engine failed with {left} requests left: {type(error).__name__}: {error}"
            ) from error
        except BaseException:  # also where whoever reads the outputs has left
            self.drop()
            raise

    def drop(self) -> None:
        """End the session and forget all requests, so that the engine can be used anew."""
        self.inbox.forget()
        self.end()

    def end(self) -> None:
        """End the session, if there is one, and forget what it runs."""
        session = self._session
        self._session = None
        self._running = {}
        if session is not None:
            session.close()

    def _news(self, session: EngineSession, until: float, closed: bool) -> News | None:
        """Return the news for all ranks, or None on those that are told."""
        if self.ranks.rank > 0:
            return None
        left = until - time.monotonic()
        wait = left if session.idle and not closed else 0.0
        news = self.inbox.take(wait)
        return replace(news, over=until <= time.monotonic())

    def _heed(self, session: EngineSession, news: News) -> Iterator[GenerationOutput]:
        """Add and abort requests, and yield the outputs that come of it."""
        if news.joined:
            self._running |= {request.request_id: request for request in news.joined}
            yield from self._answered(session.add(news.joined))
        if news.aborted:
            yield from self._answered(session.abort(news.aborted))

    def _answered(self, outputs: Sequence[GenerationOutput]) -> Sequence[GenerationOutput]:
        for output in outputs:
            del self._running[output.request_id]
        return outputs

    def _park(self, session: EngineSession) -> None:
        """End the session; what runs comes first in the next one, with its tokens so far as `begun`."""
        outputs = {output.request_id: output for output in session.abort(list(self._running))}
        begun = [request.continued(outputs[number]) for number, request in self._running.items()]
        self.end()
        if self.ranks.rank == 0:
            self.inbox.put_back(begun)
