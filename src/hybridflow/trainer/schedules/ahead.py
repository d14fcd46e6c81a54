"""The base of schedules that generate ahead: a ledger, waits of the trainer's thread, and errors of others.

Errors of other threads are raised in the trainer's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from hybridflow.agent.collate import group_index
from hybridflow.errors import CheckpointError
from hybridflow.observability.progress import progress
from hybridflow.observability.timing import Occupancy
from hybridflow.stop_token import stop_token
from hybridflow.trainer.schedules.ledger import Ledger
from hybridflow.trainer.schedules.ledger_state import Replayed
from hybridflow.trainer.schedules.sync import SourceParts, SyncSource

EnginesIn = Callable[[Literal["busy", "standing"]], float]
"""Returns the seconds since the start in which the engines, on average, were in this state."""


class IdleShares:
    """Measures from the first wait on; `waiting` is for the trainer's thread."""

    def __init__(self, engines_in: EnginesIn, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engines_in = engines_in
        self._clock = clock
        self._trainer: Occupancy | None = None
        self._before = (0.0, 0.0, 0.0, 0.0)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in this context as a wait for rollouts."""
        if self._trainer is None:
            self._trainer = Occupancy("working", self._clock)
            self._before = self._measured(self._trainer)
        before = self._trainer.be("waiting")
        try:
            yield
        finally:
            self._trainer.be(before)

    def taken(self) -> dict[str, float]:
        """Return the shares since the last call; none where no time has passed."""
        if self._trainer is None:
            return {}
        now = self._measured(self._trainer)
        span, waited, busy, stood = (new - old for new, old in zip(now, self._before))
        self._before = now
        if span <= 0.0:
            return {}
        return {
            "fully_async/trainer/idle_ratio": waited / span,
            "fully_async/rollouter/idle_ratio": 1.0 - busy / span,
            "fully_async/rollouter/standing_ratio": stood / span,
        }

    def _measured(self, trainer: Occupancy) -> tuple[float, float, float, float]:
        seconds = trainer.seconds()
        return (
            sum(seconds.values()),
            seconds.get("waiting", 0.0),
            self._engines_in("busy"),
            self._engines_in("standing"),
        )


LOOK_SECONDS = 0.5
"""Longest wait after which the trainer's thread looks for a signal that ends the run."""
CLOSE_SECONDS = 60.0
"""Longest wait for a thread that generates, once it was asked to end."""


class AheadSource(SyncSource):
    """A base of sources that make rows before the trainer asks for them."""

    def __init__(self, parts: SourceParts, ledger: Ledger) -> None:
        """`ledger` is that of the run, and is closed with the source."""
        super().__init__(parts)
        self.ledger = ledger
        self.disaggregated = not parts.roles.are_colocated(parts.roles.actor.role, parts.roles.rollout.role)
        """Whether generation has its own processes, and goes on in a thread beside training."""
        self._changed = threading.Condition()  # guards the ledger, and what subclasses have
        self._error: BaseException | None = None
        self._closing = False
        self._idle = IdleShares(parts.roles.rollout.seconds_in)

    def idle_shares(self) -> dict[str, float]:
        """Return the shares of the time since the last call, or the first batch, in which a side was idle,
        and the bytes of weights that were pushed.
        """
        return super().idle_shares() | self._idle.taken()

    def open_items(self) -> str:
        """Return the unfinished groups of the ledger."""
        with self._changed:
            return self.ledger.state.open_items()

    @property
    def groups_per_step(self) -> int:
        """Groups that a step trains."""
        return self.config.data.train_batch_size

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state`, also in the ledger.

        CheckpointError where the checkpoint's run trained another number of groups a step.
        """
        super().load_state_dict(state)
        theirs = state["groups_per_step"]
        if theirs != self.groups_per_step:
            raise CheckpointError(
                f"the checkpoint's run trained {theirs} groups a step, and this one trains "
                f"{self.groups_per_step}: groups that are ahead of training belong to steps of that size. "
                f"Set data.train_batch_size={theirs}"
            )
        self.ledger.go_on_from(state["ledger"])

    def note_replayed(self, step: int, draws: Mapping[str, int]) -> None:
        """Write into the ledger which groups of earlier steps are trained again, and how often drawn."""
        found = sorted((group_index(uid, self.groups_per_step), count) for uid, count in draws.items())
        with self._changed:
            self.ledger.append(*(Replayed(index, step=step - 1, draws=count) for index, count in found))

    def close(self) -> None:
        """Close the ledger, and end the processes that read ahead."""
        self.ledger.close()
        super().close()

    def _wait(self, words: str, ready: Callable[[], bool]) -> None:
        """Wait in the trainer's thread until something is `ready`; raise what another thread has raised.

        How long an engine, a response or a reward may take has its own limits, after which that raises.
        """
        with progress.phase(words), self._idle.waiting():
            while True:
                with self._changed:
                    if ready():
                        return
                    if self._error is not None:
                        raise self._error
                    with stop_token.breakable():
                        self._changed.wait(LOOK_SECONDS)
                stop_token.check()

    def _fail(self, error: BaseException) -> None:
        """Raise an error in the trainer's thread; only the first one counts."""
        while isinstance(error, BaseExceptionGroup):  # of tasks that ran side by side
            error = error.exceptions[0]
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()
