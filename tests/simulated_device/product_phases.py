"""Phases of the product, for the device's counts: what is counted is entered by wrapping the methods that are
those phases. They are wrapped once a process.

    training step       one step of a run: generation, rewards, passes, updates
    quiet decode step   a step of generation in which no request joins or ends
    prefill             a pass over new prompts, with the choice of their first token
    log-prob pass       the answers of a model for all rows
    update              one optimizer step on a mini-batch
    optimizer           its last part: the norm, clipping, the step itself
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulated_accelerator import counts

from hybridflow.engines.micro_batch_engine import MicroBatchEngine
from hybridflow.rollout.native.session import Session
from hybridflow.trainer.trainer import Trainer

QUIET = "quiet decode step"


def _within(owner: Any, method: str, phase: str) -> None:
    plain = getattr(owner, method)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with counts.phase(phase):
            return plain(self, *args, **kwargs)

    setattr(owner, method, call)


def _sorted_steps(plain: Callable[[Session], Any]) -> Callable[[Session], Any]:
    """Count a step of generation as quiet where it has neither prefilled nor let go of a row."""

    def step(self: Session) -> Any:
        before = counts.Counts()
        before.launches.update(counts.total.launches)
        before.waits.update(counts.total.waits)
        marks = [counts.phases.get(name, counts.Counts()).entered for name in ("prefill", "rows end")]
        rows = self.rows.count
        recorded = _recorded(self)
        found = plain(self)
        after = [counts.phases.get(name, counts.Counts()).entered for name in ("prefill", "rows end")]
        if marks == after and rows and rows == self.rows.count and recorded == _recorded(self):
            quiet = counts.phases.setdefault(QUIET, counts.Counts())
            quiet.entered += 1
            quiet.launches.update(counts.total.launches - before.launches)
            quiet.waits.update(counts.total.waits - before.waits)
        return found

    return step


def _recorded(session: Session) -> int:
    """Return how many graphs were recorded so far; the step that records one is not quiet."""
    every = [each for each in (session._graphs, session._sampler) if each is not None]
    return sum(each.num_recorded for each in every)


_done = False


def install() -> None:
    """Wrap the methods, if they are not."""
    global _done
    if _done:
        return
    _done = True
    _within(Session, "_enter", "prefill")
    plain_leave = Session._leave

    def leave(self: Session, rows: Any, *args: Any, **kwargs: Any) -> Any:
        if not rows:
            return plain_leave(self, rows, *args, **kwargs)
        with counts.phase("rows end"):
            return plain_leave(self, rows, *args, **kwargs)

    Session._leave = leave  # type: ignore[method-assign]
    Session.step = _sorted_steps(Session.step)  # type: ignore[method-assign]
    _within(MicroBatchEngine, "forward", "log-prob pass")
    _within(MicroBatchEngine, "train_mini_batch", "update")
    _within(MicroBatchEngine, "_step", "optimizer")
    _within(Trainer, "_train_step", "training step")
