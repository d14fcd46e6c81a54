"""A tracker whose library works in a thread of its own, so that it can neither end a run nor slow it.

    log, log_samples, close ──queue──► thread: the library is started, called in order, and closed

`metrics.jsonl` is written by the run itself, so whatever a library loses can be read there.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from hybridflow.errors import ConfigError
from hybridflow.observability.advice import Advice
from hybridflow.observability.trackers.base import Outcome, SampleRow, Tracker

logger = logging.getLogger(__name__)

START_SECONDS = 30.0
"""How long a run waits for a library to start; after that the library starts beside the run."""
CLOSE_SECONDS = 60.0
"""How long the end of a run waits until a library has sent what it holds."""
QUIET_SECONDS = 2.0
"""After so much of that, the wait is announced."""
MOST_WAITING = 1000
"""Calls that may wait for a library; later ones are left out, and counted."""


class BackgroundTracker(Tracker):
    """Hands calls to the tracker that `build` makes; its failures are counted, and the first one is logged.

    Raises ConfigError if `build` does so, for example because a library is missing.
    """

    def __init__(self, name: str, build: Callable[[], Tracker]) -> None:
        self.name = name
        self.failures = 0
        """Calls that the library has not taken."""
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(MOST_WAITING)
        self._started = threading.Event()
        self._mistake: ConfigError | None = None
        self._outcome: Outcome = "finished"
        self._thread = threading.Thread(target=self._work, args=(build,), name=f"tracker {name}", daemon=True)
        self._thread.start()
        self._started.wait(START_SECONDS)
        if self._mistake is not None:
            self._calls.put(None)
            raise self._mistake

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = dict(metrics)
        self._put(lambda tracker: tracker.log(values, step))

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:
        kept = [dict(row) for row in rows]
        self._put(lambda tracker: tracker.log_samples(kept, step))

    def alert(self, advice: Advice, step: int) -> None:
        self._put(lambda tracker: tracker.alert(advice, step))

    def close(self, outcome: Outcome = "finished") -> None:
        self._outcome = outcome
        until = time.monotonic() + CLOSE_SECONDS
        try:
            self._calls.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            pass  # the library hangs, as the thread that is still alive says below
        else:
            self._thread.join(QUIET_SECONDS)
            if self._thread.is_alive():
                logger.info(
                    "waiting at most %.0f s until %s has sent what it holds", CLOSE_SECONDS, self.name
                )
                self._thread.join(max(until - time.monotonic(), 0.0))
        if self._thread.is_alive():
            logger.warning(
                "%s had not ended after %.0f s and is left behind: what it has not sent is in metrics.jsonl",
                self.name,
                CLOSE_SECONDS,
            )
        if self.failures:
            logger.warning(
                "%s failed %d times in this run: metrics.jsonl has every step", self.name, self.failures
            )

    def _put(self, call: Callable[[Tracker], None]) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._failed("it does not keep up")

    def _work(self, build: Callable[[], Tracker]) -> None:
        tracker: Tracker | None = None
        try:
            tracker = build()
        except ConfigError as error:  # where nobody waits for it any more, the first call tells it
            self._mistake = error
        except (Exception, SystemExit) as error:  # a library's own: the network, a change of its interface
            self._failed(f"{type(error).__name__}: {error}")
        finally:
            self._started.set()
        while (call := self._calls.get()) is not None:
            self._do(tracker, call)
        if tracker is not None:
            self._do(tracker, lambda each: each.close(self._outcome))

    def _do(self, tracker: Tracker | None, call: Callable[[Tracker], None]) -> None:
        if tracker is None:
            self._failed(str(self._mistake))
            return
        try:
            call(tracker)
        except (Exception, SystemExit) as error:  # as above
            self._failed(f"{type(error).__name__}: {error}")

    def _failed(self, why: str) -> None:
        self.failures += 1
        if self.failures == 1:
            logger.warning(
                "%s (trainer.logger) failed: %s. The run goes on, and metrics.jsonl has every step; further "
                "failures of %s are counted, and told at the end",
                self.name,
                why,
                self.name,
            )
