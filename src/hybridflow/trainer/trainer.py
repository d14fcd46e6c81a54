"""The loop of every run: take a batch from the source, learn from it, publish, validate, log, save, stop.

BatchSource ──next(step)──► rows ──► step ──► metrics ──► trackers
     ▲                                │
     └─────publish(version)───────────┘
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.errors import BY_CALLBACK, HybridFlowError, Stopped
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.progress import progress
from hybridflow.observability.timing import Timer
from hybridflow.observability.trackers import Trackers
from hybridflow.protocol import DataProto
from hybridflow.stop_token import stop_token
from hybridflow.trainer.source import BatchSource, TrainBatch
from hybridflow.trainer.state import RunState
from hybridflow.trainer.stopping import Expiry

logger = logging.getLogger(__name__)

AfterStep = Callable[[int, dict[str, float]], bool]
"""Called with the step just done and the metrics logged for it; True ends the run there."""

FAILED_COPIES = "checkpoint/failed_copies"
"""Metric: copies to trainer.remote_checkpoint_dir that could not be completed, since the run began."""

Validate = Callable[[int], dict[str, float]]
"""Returns the metrics of a validation after this number of steps."""


class BackgroundValidator(Protocol):
    """Validates beside the steps that follow, the weights of one step at a time."""

    @property
    def step(self) -> int | None:
        """The step whose validation is under way or has not been reported yet; None: there is none."""
        ...

    def begin(self, step: int, /) -> None:
        """Begin to validate the weights as they are now, after `step` steps."""
        ...

    def wait(self) -> None:
        """Wait until no validation is under way; one that takes too long is given up."""
        ...

    def finished(self) -> tuple[int, dict[str, float]] | None:
        """Return the step and the metrics of the validation that has ended, once, or None."""
        ...


class TrainStep(Protocol):
    """One step of an algorithm: rows in, updated weights and metrics out."""

    def __call__(self, batch: DataProto, step: int, /) -> tuple[DataProto, Metrics]:
        """Learn from `batch` as step number `step` (from 1); return the batch with the columns that were
        added, and the metrics, `perf/total_num_tokens` among them.
        """
        ...


Source = TypeVar("Source", bound=BatchSource)
Step = TypeVar("Step", bound=TrainStep)


def _no_metrics(*_: object) -> dict[str, float]:
    return {}


def _nothing(*_: object) -> None:
    """Do nothing."""


def _no_context(*_: object) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass
class Trainer(Generic[Source, Step]):
    """Owns the loop and nothing else: the parts are built by `ppo/build.py` and `sft/build.py`."""

    source: Source
    step: Step
    validator: Validate | None
    """None: the run has no validation data."""
    state: RunState
    store: CheckpointStore
    trackers: Trackers
    timer: Timer
    total_steps: int
    test_freq: int
    """Validate every `test_freq` steps, and after the last one; 0 or less: never."""
    save_freq: int
    """Save every `save_freq` steps, after the last one, and when a signal ends the run; 0 or less: never."""
    expiry: Expiry = field(default_factory=Expiry)
    """When the machine is reclaimed, where that is known: the run saves before it."""
    validates_first: bool = False
    """Validate before the first step."""
    only_validates: bool = False
    """Validate once, and train nothing."""
    keeping: Callable[[TrainBatch, int], AbstractContextManager[None]] = _no_context
    """Context around the step that learns from a batch: its rows are written here, to be trained again."""
    profiling: Callable[[int], AbstractContextManager[None]] = _no_context
    """Context of each step, in which it may be recorded."""
    after_update: Callable[[DataProto], None] = _nothing
    """Called with each batch that was trained, before `publish`: a curriculum sampler learns from it."""
    log_samples: Callable[[DataProto, Mapping[str, float], int], dict[str, float]] = _no_metrics
    """Called with each batch, its metrics and its step, to keep samples; gives further metrics."""
    beside: BackgroundValidator | None = None
    """Validates in the place of `validator`, which training waits for."""
    last_validation: dict[str, float] = field(default_factory=dict)
    """The metrics of the validation that was logged last."""

    def fit(self, after_step: AfterStep | None = None) -> dict[str, float]:
        """Run to the last step, or to where `after_step` says so; gives the last validation's metrics or {}.

        Raises Stopped after a signal, with the last whole step saved where the run saves at all.
        """
        done = self.state.step
        with (
            stop_token.training(self._has_unsaved_steps),
            self._saved_when_stopped(),
            self._errors_say_what_is_open(),
            progress.steps(self.total_steps),
        ):
            self.source.publish(done)
            self._validate_before(done)
            last_step = done if self.only_validates else self.total_steps
            for step in range(done + 1, last_step + 1):
                stop_token.stop_here()
                logged = self._train_step(step)
                if after_step is not None and after_step(step, logged):
                    break
            if self._wait_for_validation():
                self._log_testing()
            if self.state.validation_due:  # a signal has left out the validation of the last step
                stop_token.stop_here()
            self.state.saves.commit(self.store)
            if self.store.remote is not None:
                self.store.remote.wait()
                self.trackers.log({FAILED_COPIES: self.store.remote.failed}, self.state.step)
        return self.last_validation

    def _validate_before(self, done: int) -> None:
        """Validate before the first step, or after the last one where a signal has left that out."""
        left_out = self.state.validation_due
        before_training = self.validates_first and done == 0
        if self.validator is None or not (self.only_validates or before_training or left_out):
            return
        validation = self._validate(self.validator, done)
        if validation:
            self.trackers.log(validation, done)
        if left_out and done == self.total_steps and self.save_freq > 0:
            self._wait_for_validation()
            self._save(done)  # no later step does: the run started once more would validate again

    def _validate(self, validator: Validate, step: int) -> dict[str, float]:
        """Validate, or begin to beside training, once the validation of an earlier step has ended."""
        with self.timer("testing"):
            if self.beside is not None:
                self._wait_for_validation()
                self.beside.begin(step)
                self.state.validation_due = True
                return {}
            with stop_token.leavable(), self.source.validating(step):
                validation = validator(step)
        self.state.validation_due = False
        self.last_validation = validation
        return validation

    def _wait_for_validation(self) -> bool:
        """Wait until no validation is under way beside training, and log it; return whether one was."""
        if self.beside is None or self.beside.step is None:
            return False
        with self.timer("testing"), stop_token.leavable():
            self.beside.wait()
        self._log_finished_validation()
        return True

    def _log_testing(self) -> None:
        """Log what training has waited in this step for validations beside it."""
        self.trackers.log({"timing_s/testing": self.timer.seconds("testing")}, self.state.step)

    def _log_finished_validation(self) -> None:
        """Log the validation beside training that has ended, if one has, under its own step."""
        found = None
        if self.beside is not None:
            found = self.beside.finished()
        if found is not None:
            step, self.last_validation = found
            self.trackers.log(self.last_validation, step)
            if step == self.state.step:
                self.state.validation_due = False

    def _train_step(self, step: int) -> dict[str, float]:
        """Run one training step with all around it; returns all logged metrics."""
        progress.step = step
        self.timer.reset()
        self.state.saves.commit_done(self.store)
        with self.profiling(step), self.timer("step"):
            with stop_token.leavable():
                made = self.source.next(step)
            with self.keeping(made, step):
                batch, metrics = self.step(made.rows, step)
            self.after_update(batch)
            with self.timer("update_weights"):
                self.source.publish(step)
            self.state.finish(step)
            self.state.validation_due = False  # what is under way is of an earlier step
            progress.finished_step = step
            validation = self._validate_after(step)
        # logged before it is saved: a run killed in between resumes after this step, whose line must stand by
        # then
        logged = self._log(made, batch, metrics, validation, step)
        self.expiry.step_took(self.timer.seconds("step"))
        self.expiry.save_took(self.state.saves.longest)
        self._log_finished_validation()
        ends_soon = self.save_freq > 0 and self.expiry.due()
        if ends_soon:  # before any wait
            self._save(step)
            self.state.saves.commit(self.store)  # also one that is written beside the run
        self._begin_validation()
        saves = not ends_soon and self._due(self.save_freq, step)
        is_older = self.beside is not None and self.beside.step not in (None, step)
        if saves and (is_older or step == self.total_steps):
            # its weights are not in this checkpoint, from which a resumed run could not redo it
            self._wait_for_validation()
        if self.beside is not None and (waited := self.timer.seconds("testing")):
            self._log_testing()
            self.expiry.step_took(self.timer.seconds("step") + waited)
        if saves:
            self._save(step)
        return logged

    def _begin_validation(self) -> None:
        """Begin the validation beside training that is due, if one is and is not under way yet."""
        due = self.beside is not None and self.state.validation_due and self.beside.step != self.state.step
        if due and self.validator is not None:
            self._validate(self.validator, self.state.step)

    @contextmanager
    def _failure_told(self) -> Iterator[None]:
        """Log an error of a validation beside training in a run that ends for another reason."""
        try:
            yield
        except HybridFlowError as error:
            logger.error("the last validation beside training has failed: %s", error)

    def _validate_at_callback(self) -> None:
        """Validate beside training what a run that waits for it has validated when a callback ends it."""
        try:
            with self._failure_told():
                self._begin_validation()
                self._wait_for_validation()
        except Stopped as again:  # by a signal, or by a callback that hears of the validation
            if again.at_once:
                raise

    def _validate_after(self, step: int) -> dict[str, float]:
        """Validate where it is due. A signal leaves it out; a resumed run makes up for it."""
        if self.validator is None or not self._due(self.test_freq, step):
            return {}
        self.state.validation_due = True
        if self.beside is not None:
            return {}  # it begins once the step is logged
        try:
            return self._validate(self.validator, step)
        except Stopped as stopped:
            if stopped.at_once:
                raise
            return {}  # the loop ends before the next step

    def _save(self, step: int) -> None:
        with self.timer("save_checkpoint"):
            self.state.save(self.store)
        metrics = {"timing_s/save_checkpoint": self.timer.seconds("save_checkpoint")}
        if self.store.remote is not None:
            metrics[FAILED_COPIES] = self.store.remote.failed
        self.trackers.log(metrics, step)

    def _has_unsaved_steps(self) -> bool:
        return self.save_freq > 0 and self.state.step > self.state.saved_step

    @contextmanager
    def _saved_when_stopped(self) -> Iterator[None]:
        """Save the last whole step when a signal ends the loop, if no checkpoint has it and one is wanted."""
        try:
            yield
        except Stopped as stopped:
            if not stopped.at_once:
                try:
                    if stopped.number == BY_CALLBACK:
                        self._validate_at_callback()
                    if self._has_unsaved_steps():
                        self._save(self.state.step)
                    with self._failure_told():
                        self._log_finished_validation()
                except Stopped as again:  # by a tracker that the save was reported to
                    if again.at_once:
                        raise
                self.state.saves.commit(self.store)
            raise

    @contextmanager
    def _errors_say_what_is_open(self) -> Iterator[None]:
        """Add to an error what the source has begun and not finished, whichever thread it comes from."""
        try:
            yield
        except HybridFlowError as error:
            if items := self.source.open_items():
                error.add_note(f"open: {items}")
            raise

    def _log(
        self, made: TrainBatch, batch: DataProto, metrics: Metrics, validation: dict[str, float], step: int
    ) -> dict[str, float]:
        made.metrics.update(metrics)
        values = made.metrics.to_floats() | validation | made.timings | self.timer.as_metrics()
        seconds = values["timing_s/step"] - values.get("timing_s/testing", 0.0)
        values["perf/time_per_step"] = seconds
        values["perf/throughput"] = values["perf/total_num_tokens"] / seconds
        values |= self.source.idle_shares()
        values["training/global_step"] = step
        values["training/epoch"] = made.epoch
        values |= self.log_samples(batch, values, step)
        self.trackers.log(values, step)
        return values

    def _due(self, frequency: int, step: int) -> bool:
        return frequency > 0 and (step == self.total_steps or step % frequency == 0)
