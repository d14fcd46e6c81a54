"""The part that all engines have in common which work in sessions of their own kind.

open() ──► EngineSession: requests join and leave at any time ──► EngineReplica
generate(requests) ──► a closed session, which has these requests only, read to its end
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from hybridflow.errors import RolloutError
from hybridflow.rollout.base import EngineSession, GenerationOutput, GenerationRequest, RolloutStats
from hybridflow.rollout.requests import check_ids


class SessionEngine(ABC):
    """A `RolloutEngine` whose sessions a subclass makes; it has at most one at a time."""

    def __init__(self) -> None:
        self._stats = RolloutStats()
        self._session: EngineSession | None = None

    @property
    def stats(self) -> RolloutStats:
        """Statistics of the newest `generate` or session, up to now."""
        return self._stats

    @property
    def asleep(self) -> bool:
        """Whether `wake_up` must come before anything is generated."""
        return False

    def open(self, *, closed: bool = False) -> EngineSession:
        """Return a session that requests may join at any time or, if it is `closed`, in one call before its
        first step. RolloutError when asleep or in use.
        """
        self._check_ready("open()")
        self._stats = RolloutStats()
        self._session = self._new_session(closed)
        return self._session

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationOutput]:
        """Yield one output for each request, as they finish.

        A request that cannot be served gives reason "error" and the others go on. RolloutError for a repeated
        request id, when asleep, and while another call runs or a session is open.
        """
        self._check_ready("generate()")
        check_ids(requests)
        return self._generate(requests)

    def _generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationOutput]:
        session = self.open(closed=True)
        try:
            yield from session.add(requests)
            while not session.idle:
                yield from session.step()
        finally:
            session.close()

    def abort(self, request_ids: Iterable[int]) -> list[GenerationOutput]:
        """End requests of the running `generate` or session; their partial responses come back here."""
        if self._session is None:
            return []
        return self._session.abort(request_ids)

    @abstractmethod
    def _new_session(self, closed: bool) -> EngineSession:
        """Return a session, `closed` as in `open`, that calls `_closed` when it ends."""

    def _closed(self) -> None:
        self._session = None

    def _check_ready(self, call: str) -> None:
        self._check_free(call)
        if self.asleep:
            raise RolloutError(f"{call} was called on a sleeping engine: call wake_up() first")

    def _check_free(self, call: str) -> None:
        if self._session is not None:
            raise RolloutError(
                f"{call} was called while generate() is running or a session is open: read its outputs to "
                "the end or close it first"
            )
