"""The synchronous schedule: generate, train, validate, save; each step starts after the one before has ended.

loader ──prompts──► Trajectories ──scored rows──► PPOStep ──► metrics ──► trackers
                         ▲                           │
                         └──── the same weights ◄────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.config import PPOConfig
from hybridflow.data.build import PromptData
from hybridflow.data.loader import StatefulLoader
from hybridflow.data.prompts import PromptRow
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import Stopped
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.progress import progress
from hybridflow.observability.timing import Timer
from hybridflow.observability.trackers import Trackers
from hybridflow.protocol import DataProto
from hybridflow.trainer.ppo.sample_log import SampleLog
from hybridflow.trainer.ppo.state import RunState
from hybridflow.trainer.ppo.step import PPOStep
from hybridflow.trainer.ppo.trajectories import Trajectories
from hybridflow.trainer.ppo.validation import Validator
from hybridflow.trainer.stopping import StopSignals

AfterStep = Callable[[int, dict[str, float]], bool]
"""Called with the step just done and the metrics logged for it; True ends the run there."""


@dataclass
class SyncTrainer:
    """Owns the loop and nothing else: the parts are built by `build.py`."""

    config: PPOConfig
    data: PromptData
    loader: StatefulLoader[PromptRow]
    trajectories: Trajectories
    step: PPOStep
    validator: Validator | None
    state: RunState
    store: CheckpointStore
    trackers: Trackers
    samples: SampleLog
    timer: Timer
    total_steps: int
    tokenizer: Tokenizer
    signals: StopSignals = field(default_factory=StopSignals)
    """Asks the loop to end after SIGINT or SIGTERM."""

    def fit(self, after_step: AfterStep | None = None) -> dict[str, float]:
        """Run to the last step, or to where `after_step` says so; gives the last validation's metrics (empty
        where there was none).

        Raises Stopped after a signal, with the last whole step saved where `trainer.save_freq` asks for
        checkpoints.
        """
        trainer = self.config.trainer
        done = self.state.step
        with (
            self.signals.training(self._has_unsaved_steps),
            self._saved_when_stopped(),
            progress.steps(self.total_steps),
        ):
            self.trajectories.rollout.update_from(self.step.roles.actor, done)
            last_validation = self._validate_before(done)
            if trainer.val_only:
                return last_validation
            prompts = self.loader.endless()
            for step in range(done + 1, self.total_steps + 1):
                self.signals.check()
                # read first: with an epoch's last batch the loader moves on to the next one
                epoch = self.loader.epoch
                validation, logged = self._train_step(prompts, step, epoch)
                last_validation = validation or last_validation
                if after_step is not None and after_step(step, logged):
                    break
            if self.state.validation_due:  # a signal has left out the validation of the last step
                self.signals.check()
            self.state.saves.commit(self.store)
        return last_validation

    def _validate_before(self, done: int) -> dict[str, float]:
        """The validation before the first step, or the one that an interrupted run has left out after its
        last step.
        """
        trainer = self.config.trainer
        before_training = trainer.val_before_train and done == 0
        if self.validator is None or not (trainer.val_only or before_training or self.state.validation_due):
            return {}
        with self.timer("testing"), self.signals.leavable():
            validation = self.validator(done)
        self.trackers.log(validation, done)
        self.state.validation_due = False
        return validation

    def _train_step(
        self, prompts: Iterator[list[PromptRow]], step: int, epoch: int
    ) -> tuple[dict[str, float], dict[str, float]]:
        """One training step with all that belongs to it; gives the validation's metrics where there was one,
        and all that was logged.
        """
        progress.step = step
        self.timer.reset()
        self.state.saves.commit_done(self.store)
        with self.timer("step"):
            with self.signals.leavable():
                batch, metrics = self.trajectories.for_training(prompts, step)
            batch, step_metrics = self.step(batch, step)
            metrics.update(step_metrics)
            with self.timer("update_weights"):
                self.trajectories.rollout.update_from(self.step.roles.actor, step)
            self.data.finish_batch(batch)
            self.state.finish(step)
            progress.finished_step = step
            validation = self._validate_after(step)
        # logged before it is saved: a run killed in between resumes after this step, whose line must stand by
        # then
        logged = self._log(batch, metrics, validation, step, epoch)
        if self.config.trainer.save_freq > 0 and self._due(self.config.trainer.save_freq, step):
            self._save(step)
        return validation, logged

    def _validate_after(self, step: int) -> dict[str, float]:
        """Validate where it is due. A signal leaves it out; a resumed run makes up for it."""
        if self.validator is None or not self._validation_is_due(step):
            return {}
        self.state.validation_due = True
        try:
            with self.timer("testing"), self.signals.leavable():
                validation = self.validator(step)
        except Stopped as stopped:
            if stopped.at_once:
                raise
            return {}  # the loop ends before the next step
        self.state.validation_due = False
        return validation

    def _validation_is_due(self, step: int) -> bool:
        trainer = self.config.trainer
        if trainer.test_freq <= 0 and not trainer.val_before_train:
            return False
        return self._due(trainer.test_freq, step)

    def _save(self, step: int) -> None:
        with self.timer("save_checkpoint"):
            self.state.save(self.store)
        self.trackers.log({"timing_s/save_checkpoint": self.timer.seconds("save_checkpoint")}, step)

    def _has_unsaved_steps(self) -> bool:
        return self.config.trainer.save_freq > 0 and self.state.step > self.state.saved_step

    @contextmanager
    def _saved_when_stopped(self) -> Iterator[None]:
        """Save the last whole step when a signal ends the loop, if no checkpoint has it and one is wanted."""
        try:
            yield
        except Stopped as stopped:
            if not stopped.at_once:
                if self._has_unsaved_steps():
                    with self.timer("save_checkpoint"):
                        self.state.save(self.store)
                self.state.saves.commit(self.store)
            raise

    def _log(
        self, batch: DataProto, metrics: Metrics, validation: dict[str, float], step: int, epoch: int
    ) -> dict[str, float]:
        timings = self.timer.as_metrics()
        values = metrics.to_floats() | validation | timings
        seconds = timings["timing_s/step"] - timings.get("timing_s/testing", 0.0)
        values["perf/time_per_step"] = seconds
        values["perf/throughput"] = values["perf/total_num_tokens"] / seconds
        values["training/global_step"] = step
        values["training/epoch"] = epoch
        self.samples.training(batch, step)
        self.trackers.log(values, step)
        return values

    def _due(self, frequency: int, step: int) -> bool:
        return step == self.total_steps or (frequency > 0 and step % frequency == 0)
