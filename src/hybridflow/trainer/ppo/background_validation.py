"""Validation in a replica of its own, beside the training steps that follow (`trainer.val_in_background`).

    trainer   begin(step): the actor's weights are staged         finished() ──► metrics, of that step
    thread    the replica takes them ──► Validator.measure ─────────┘
              └── a replica that is lost is started again, takes the weights again, and measures all again

One validation is under way at a time. Its requests, seeds and scores are those of a validation that training
waits for. Rewards are scored by the processes that score for training, too; agents have processes of their
own, so that each side counts its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hybridflow.episodes.pipeline import ValidationFailed
from hybridflow.errors import HybridFlowError, RolloutError, WorkerError
from hybridflow.models.exact_mode import ExactMode
from hybridflow.observability.progress import progress
from hybridflow.stop_token import stop_token
from hybridflow.trainer.ppo.validation import Validator
from hybridflow.workers import ActorGroup, RolloutGroup, RolloutWorker
from hybridflow.workers.rollout_group import StagedWeights, stage_weights

logger = logging.getLogger(__name__)

MOST_TRIES = 3
"""Times that a validation is begun; then it is given up, with its numbers missing."""
FIRST_PAUSE = 5.0
"""Seconds after a replica that did not start; each further pause is twice as long."""
LOOK_SECONDS = 0.5
"""Longest wait after which the trainer's thread looks for a signal that ends the run."""
CLOSE_SECONDS = 30.0
"""Longest wait at the end of a run for a validation that is ended with it."""
SECONDS = "timing_s/testing_in_background"
"""Metric: seconds that a validation has taken beside training."""


@dataclass(eq=False)
class ValidationJob:
    """A validation that is under way, or has ended and was not reported yet."""

    step: int
    staged: StagedWeights
    """The weights of the step, which are kept so that they can be taken again."""
    given_up: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    metrics: dict[str, float] = field(default_factory=dict)
    """Its metrics, once it is over; empty where it was given up."""
    shown: list[dict[str, Any]] = field(default_factory=list)
    """The rows of which samples are kept."""
    error: Exception | None = None
    """Its error that a validation which training waits for would have had, too."""


class BackgroundValidation:
    """Measures the actor's weights of one step at a time, in a thread; close it at the end of the run."""

    def __init__(
        self,
        validator: Validator,
        actor: ActorGroup,
        start: Callable[[], RolloutGroup],
        exact: ExactMode | None,
        *,
        patience: float,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        """Start the replica. `start` starts it again where it is lost, and it generates in the mode `exact`.

        After `patience` seconds of a wait a validation is given up; `close` waits `close_seconds` for the end
        of what it ends.
        """
        self._validator = validator
        self._actor = actor
        self._start = start
        self._exact = exact
        self._patience = patience
        self._close_seconds = close_seconds
        self._lock = threading.Lock()  # while a replica is taken into use, or out of it
        self._job: ValidationJob | None = None
        self._group: RolloutGroup | None = self._started()

    @property
    def step(self) -> int | None:
        """The step whose validation is under way or has not been reported yet; None: there is none."""
        return None if self._job is None else self._job.step

    def begin(self, step: int) -> None:
        """Begin to measure the actor's weights as they are after the calls so far."""
        assert self._job is None, "one validation is under way at a time"
        self._job = ValidationJob(step, stage_weights(self._actor, step))
        threading.Thread(
            target=self._run, args=(self._job,), name=f"validation of step {step}", daemon=True
        ).start()

    def finished(self) -> tuple[int, dict[str, float]] | None:
        """Return the step and the metrics of the validation that has ended, once; keep its samples.

        None where none has ended, or it was given up. Raises what its reward or its data have raised, or
        ValidationFailed.
        """
        job = self._job
        if job is None or not job.over.is_set():
            return None
        self._job = None
        if job.error is not None:
            raise job.error
        if not job.metrics:
            return None
        self._validator.samples.validation(job.shown, job.step)
        self._validator.samples.validated(job.metrics, job.step)
        return job.step, job.metrics

    def wait(self) -> None:
        """Wait until no validation is under way, or `patience` seconds; then it is given up."""
        job = self._job
        if job is None:
            return
        with progress.phase(f"waiting for the validation of step {job.step}"):
            ends = time.monotonic() + self._patience
            while not job.over.is_set() and time.monotonic() < ends:
                with stop_token.breakable():
                    job.over.wait(LOOK_SECONDS)
                stop_token.check()
        if not job.over.is_set():
            logger.error(
                "the validation of step %d is given up: it has not ended within %g s "
                "(trainer.worker_timeout), and its numbers are missing",
                job.step,
                self._patience,
            )
            self._leave(job)
            self._job = None

    def close(self) -> None:
        """End what is under way; it is redone by a run that goes on from the checkpoint of its step."""
        job = self._job
        if job is not None and not job.over.is_set():
            logger.warning(
                "the validation of step %d is left: its numbers are missing, unless the run goes on from a "
                "checkpoint of that step or an earlier one",
                job.step,
            )
            self._leave(job)
            job.over.wait(self._close_seconds)  # also where a replica is just being started

    def _leave(self, job: ValidationJob) -> None:
        """End the replica of a validation that nobody waits for any longer."""
        with self._lock:
            job.given_up.set()
            group = self._group
            self._group = None
        if group is not None:
            group.backend.shutdown()

    def _run(self, job: ValidationJob) -> None:
        """Measure a job, in its thread."""
        began = time.perf_counter()
        try:
            assert job.staged.shares is not None, "what is taken is a copy"
            job.staged.shares.wait()  # an error of the actor's ranks is none of the replica's
            with progress.phase(f"validating step {job.step} beside training"):
                if self._measure(job):
                    job.metrics[SECONDS] = time.perf_counter() - began
        except Exception as error:  # raised in the trainer's thread
            job.error = error
        finally:
            job.over.set()

    def _measure(self, job: ValidationJob) -> bool:
        """Measure a job in as many tries as it may have; return whether one has succeeded."""
        pause = 0.0
        for number in range(1, MOST_TRIES + 1):
            if job.given_up.wait(pause):
                return False
            group = self._group
            try:
                if group is None:
                    pause = max(FIRST_PAUSE, 2 * pause)
                    group = self._started()
                    if not self._used(job, group):
                        return False
                    logger.warning("the replica that validates was started again")
                pause = 0.0
                group.take(replace(job.staged))
                job.metrics, job.shown = self._validator.measure(job.step, group)
                return True
            except ValidationFailed:
                raise  # the engine has answered: it would give the same answers once more
            except (WorkerError, RolloutError) as error:
                if job.given_up.is_set():
                    return False
                logger.error(
                    "validation of step %d, try %d of %d, has failed: %s: %s",
                    job.step,
                    number,
                    MOST_TRIES,
                    type(error).__name__,
                    error,
                )
                if group is not None:
                    self._group = None
                    group.backend.shutdown()
        logger.error("the validation of step %d is given up, and its numbers are missing", job.step)
        return False

    def _used(self, job: ValidationJob, group: RolloutGroup) -> bool:
        """Take a replica into use; return whether the job still wants it, else it is ended."""
        with self._lock:
            if not job.given_up.is_set():
                self._group = group
                return True
        group.backend.shutdown()
        return False

    def _started(self) -> RolloutGroup:
        """Start the replica; RolloutError where it cannot be started again."""
        again = self._job is not None
        try:
            group = self._start()
            if self._exact is not None:
                group.call_list(RolloutWorker.set_exact, self._exact)
        except HybridFlowError as error:
            if not again:
                raise
            raise RolloutError(f"the replica that validates did not start: {error}") from error
        return group
