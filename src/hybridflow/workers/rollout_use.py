"""Whether a replica has something to do: its requests and its steps, of all channels together.

requests without an answer, engine stepped      busy
requests without an answer, engine not stepped  standing: for new weights, or while its devices train
no request                                      empty: none is admitted, or rewards and tools are awaited
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from hybridflow.observability.occupancy import Occupancy


class ReplicaUse:
    """Measures how long a replica is busy, standing or empty, as the driver sees it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._lock = threading.Lock()
        self._asked: set[int] = set()
        self._stepped: set[int] = set()
        self._occupancy = Occupancy("empty", clock)

    def be_asked(self, channel: int, asked: bool) -> None:
        """Note whether there are requests of a channel without an answer."""
        self._note(self._asked, channel, asked)

    def be_stepped(self, channel: int, stepped: bool) -> None:
        """Note whether the engine is stepped for the requests of a channel."""
        self._note(self._stepped, channel, stepped)

    def seconds(self) -> dict[str, float]:
        """Return the seconds in each state since the start."""
        return self._occupancy.seconds()

    def _note(self, channels: set[int], channel: int, there: bool) -> None:
        with self._lock:
            if there:
                channels.add(channel)
            else:
                channels.discard(channel)
            state = "empty"
            if self._asked:
                state = "busy" if self._asked & self._stepped else "standing"
            self._occupancy.be(state)


def mean_seconds(uses: Sequence[ReplicaUse], state: str) -> float:
    """Return the seconds that replicas were in a state, on the mean."""
    return sum(use.seconds().get(state, 0.0) for use in uses) / len(uses)
