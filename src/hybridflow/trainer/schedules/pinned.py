"""The exact schedules (`one_step_off`, `exact_async`): each batch is generated whole under one version.

    batch k ──pinned to version max(0, k - run_ahead)──► made ──next──► step ──publish──► version k + 1

So a run is a function of its configuration, whatever the timing: equal to a loop that does one thing after
the other. Where generation has its own processes, a thread makes batches beside training, and weights that
are newer than the ones in use wait until all batches of the older version are made. Where it shares the
actor's processes, batch k + run_ahead is made before the update of step k begins.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hybridflow.agent.collate import group_index
from hybridflow.data.prompts import PromptRow
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.row_state import rows_of_state, state_of_rows
from hybridflow.trainer.ppo.columns import whole
from hybridflow.trainer.schedules.ahead import CLOSE_SECONDS, LOOK_SECONDS, AheadSource
from hybridflow.trainer.schedules.ledger import Ledger
from hybridflow.trainer.schedules.ledger_state import (
    Admitted,
    Failed,
    Filtered,
    Finished,
    Published,
    Scored,
    Taken,
    ranges,
)
from hybridflow.trainer.schedules.sync import SourceParts
from hybridflow.trainer.source import TrainBatch
from hybridflow.workers.rollout_group import StagedWeights

logger = logging.getLogger(__name__)


class PinnedSource(AheadSource):
    """Makes each batch under the version that it is pinned to.

    A batch has the groups `k·P … (k + 1)·P - 1`, with P = `data.train_batch_size`. Groups that fail or that
    dynamic sampling leaves out are not replaced: a further group would depend on the timing.
    """

    kind = "exact"

    def __init__(
        self,
        parts: SourceParts,
        *,
        run_ahead: int,
        total_steps: int,
        ledger: Ledger,
    ) -> None:
        """`run_ahead` is the number of steps between the weights that sample a batch and its own."""
        super().__init__(parts, ledger)
        self.run_ahead = run_ahead
        self.refill = not run_ahead
        self.total_steps = total_steps
        self._start = 0  # the version of the checkpoint that this attempt resumes from
        self._first = 0  # the first batch that this attempt makes
        self._next = 0  # the batch that is made next
        self._staged: dict[int, StagedWeights] = {}  # published, and no engine has them yet
        self._made: dict[int, TrainBatch] = {}  # not trained yet, by number of the batch
        # places in the data and in the ledger, before a batch was read
        self._places: dict[int, tuple[dict[str, Any], int]] = {}
        self._is_making = False
        self._validates: int | None = None  # the version of the waiting or running validation
        self._thread: threading.Thread | None = None

    def pinned_version(self, batch: int) -> int:
        """Return the version of the weights that generate a batch which this attempt makes."""
        return max(self._start, batch - self.run_ahead)

    def end_below(self, version: int) -> int:
        """Return the number of the first batch that is not pinned to a version below this one."""
        if version <= self._start:
            return self._first
        return max(self._first, min(self.total_steps, version + self.run_ahead))

    def next(self, step: int) -> TrainBatch:
        """Return the batch of step number `step`; raises the error of making it."""
        batch = step - 1
        began = time.perf_counter()
        if self.disaggregated:
            self._wait("waiting for rollouts", lambda: batch in self._made)
        with self._idle.waiting():
            while not self.disaggregated and self._next < self.end_below(self.version + 1):
                self._make()
        with self._changed:
            made = self._made[batch]
            state = self.ledger.state
            if batch not in state.batches:  # else a run that was stopped in this step had it
                taken = ranges(self._groups_of(made.rows))
                self.ledger.append(*(Taken(each.start, len(each), step=batch) for each in taken))
        waited = {"timing_s/wait_for_rollouts": time.perf_counter() - began}
        # a step adds columns to what it is given
        return replace(made, rows=made.rows.select(), timings=made.timings | waited)

    def publish(self, version: int) -> None:
        """Start the batches that are pinned to `version` with the actor's present weights.

        Where generation has its own processes, the weights wait until the batches of older ones are made.
        """
        actor = self.roles.actor
        staged = None
        if self.disaggregated:
            staged = self.roles.rollout.stage(actor, version)
        else:
            self.roles.rollout.update_from(actor, version)
        actor.version = version
        with self._changed:
            if staged is not None:
                self._staged[version] = staged
                for old in [each for each in self._staged if each < version]:
                    if old + self.run_ahead >= self.total_steps:
                        del self._staged[old]  # no batch is pinned to it
            self.version = version
            if self.ledger.state.version < version:
                self.ledger.append(Published(version))
            for trained in [batch for batch in self._made if batch < version]:
                del self._made[trained]
            for read in [batch for batch in self._places if batch < version]:
                del self._places[read]
            self._changed.notify_all()
        if self.disaggregated and self._thread is None:
            self._thread = threading.Thread(target=self._make_all, name="batches ahead", daemon=True)
            self._thread.start()

    @contextmanager
    def validating(self, version: int) -> Iterator[None]:
        """Run a validation under `version`, once the batches of older ones are made."""
        if not self.disaggregated:
            yield
            return
        with self._changed:
            self._validates = version
        try:
            end = self.end_below(version)
            self._wait(
                "waiting for rollouts of older weights",
                lambda: not self._is_making and self._next >= end,
            )
            self._take(version)
            yield
        finally:
            with self._changed:
                self._validates = None
                self._changed.notify_all()

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data, and the batches that are generated under older weights than a resumed
        run has; waits until these are made.
        """
        end = self.end_below(self.version)
        if self.disaggregated:
            self._wait("waiting for rollouts to save", lambda: self._next >= end)
        with self._changed:
            ready = [_to_state(self._made[batch]) for batch in range(self.version, end)]
            # of the batches behind these, nothing is kept
            place, position = self._places.get(end) or (self.place(), self.ledger.position)
            self.ledger.sync()
            own = {
                "ready": ready,
                "ledger": self.ledger.kept(position),
                "groups_per_step": self.groups_per_step,
            }
            return {**place, **own, "version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        super().load_state_dict(state)
        ready = [_from_state(each) for each in state["ready"]]
        self._start = self.version
        self._made = dict(enumerate(ready, self.version))
        self._first = self._next = self.version + len(ready)

    def close(self) -> None:
        """End the thread that generates, and the processes that read ahead."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        thread = self._thread
        if thread is not None:
            until = time.monotonic() + CLOSE_SECONDS
            while thread.is_alive() and time.monotonic() < until:
                self.roles.rollout.break_off()  # again: a list may have been about to begin
                thread.join(LOOK_SECONDS)
            if thread.is_alive():
                logger.warning("generation has not ended %g s after it was asked to", CLOSE_SECONDS)
        super().close()

    def admitted(self) -> Iterator[tuple[int, list[PromptRow]]]:
        """Yield generation batches: the index of the first group, and the prompts."""
        for first, prompts in super().admitted():
            version = self.pinned_version(self._next)
            with self._changed:
                self.ledger.append(Admitted(first, len(prompts), version=version))
            yield first, prompts

    def _groups_of(self, rows: DataProto) -> list[int]:
        """Return the indices of the groups that have rows, in order."""
        return sorted({group_index(uid, self.groups_per_step) for uid in rows.non_tensor_batch["uid"]})

    def _make_all(self) -> None:
        """The thread: make every batch as soon as its weights are published."""
        try:
            while self._next < self.total_steps:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing or self._may_make())
                    if self._closing:
                        return
                    self._is_making = True
                self._take(self.pinned_version(self._next))
                self._make()
        except BaseException as error:  # raised in the trainer's thread
            self._fail(error)

    def _may_make(self) -> bool:
        version = self.pinned_version(self._next)
        return version <= self.version and (self._validates is None or version < self._validates)

    def _make(self) -> None:
        """Generate and score the next batch under the weights that the engines have."""
        batch = self._next
        with self._changed:
            self._places[batch] = copy.deepcopy(self.place()), self.ledger.position
        first = self.num_admitted
        made = super().next(batch + 1)
        with self._changed:
            self._note(range(first, self.num_admitted), self._groups_of(made.rows))
            self._made[batch] = made
            self._next += 1
            self._is_making = False
            self._changed.notify_all()

    def _note(self, admitted: range, left: list[int]) -> None:
        """Note in the ledger which groups of a batch have rows; the others failed, or were filtered."""
        filters = self.config.algorithm.filter_groups.enable
        gone = ranges(sorted({*admitted} - {*left}))
        for each in ranges(left if not filters else admitted):
            self.ledger.append(Finished(each.start, len(each)), Scored(each.start, len(each)))
        for each in gone:
            lost = Filtered(each.start, len(each)) if filters else Failed(each.start, len(each), cause="rows")
            self.ledger.append(lost)

    def _take(self, version: int) -> None:
        """Give the engines the weights of `version`, unless they have them."""
        with self._changed:
            staged = self._staged.pop(version, None)
        if staged is not None:
            self.roles.rollout.take(staged)


def _to_state(batch: TrainBatch) -> dict[str, Any]:
    """Return a batch as plain data and tensors, without the seconds that it took."""
    rows = state_of_rows(whole(batch.rows))
    return {"rows": rows, "epoch": batch.epoch, "metrics": batch.metrics.state_dict()}


def _from_state(state: Mapping[str, Any]) -> TrainBatch:
    rows = rows_of_state(state["rows"])
    return TrainBatch(rows, state["epoch"], Metrics.from_state(state["metrics"]))
