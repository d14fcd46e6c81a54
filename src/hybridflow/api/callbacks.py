"""Callbacks of a run, called beside the trackers and in the same way.

Trackers.log, log_samples ──► CallbackTracker ──on_step_end, on_validation, …──► the user's callbacks
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridflow.data.plugin import blaming, check_signature
from hybridflow.errors import BY_CALLBACK, ConfigError, HybridFlowError, Stopped
from hybridflow.observability.progress import progress
from hybridflow.observability.trackers import Tracker
from hybridflow.observability.trackers.console import VALIDATION

SAVED = "timing_s/save_checkpoint"


class StopTraining(Exception):
    """Raised in a callback to end the run in order: the last whole step is saved."""


class Callback:
    """Base class of callbacks; write the methods that you want.

    A method that returns True ends the run in order. What a callback raises ends the run too, after the last
    whole step is saved, as a ConfigError that names the callback.
    """

    def on_run_start(self, folder: Path, total_steps: int) -> bool | None:
        """The model and the data are loaded, and the first step is about to begin.

        It is called again by each restart of trainer.max_restarts.
        """

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """A training step is done; `metrics` has all that is logged for it, a validation's among them."""

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """A validation is done: before the first step with `step` 0, else after a step and its metrics; with
        trainer.val_in_background some steps later.
        """

    def on_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> bool | None:
        """Some samples of a validation, as many as trainer.log_val_generations says."""

    def on_checkpoint(self, step: int, folder: Path) -> bool | None:
        """A checkpoint was written, or with checkpoint.async_save is being written."""

    def on_run_end(self, folder: Path) -> None:
        """The run has ended by its last step, a callback or a signal; not called after an error."""


Callbacks = Sequence[Any] | Callback | Callable[[int, Mapping[str, float]], Any]
"""A list of callbacks, or one alone; `as_callbacks` says what a callback may be."""

METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class _OfFunction(Callback):
    """A function that is called at the end of each step."""

    def __init__(self, function: Callable[[int, Mapping[str, float]], Any]) -> None:
        self.on_step_end = function  # type: ignore[method-assign, assignment]


def as_callbacks(callbacks: Callbacks) -> list[Any]:
    """Check the callbacks: objects with some methods of Callback, or functions of (step, metrics).

    A single callback is taken as a list of one. Raises ConfigError for what is neither, and for a method
    that cannot be called as it will be.
    """
    if not isinstance(callbacks, list | tuple):
        callbacks = [callbacks]
    found = []
    for given in callbacks:
        listener = given
        if isinstance(given, type):
            name = given.__name__
            raise ConfigError(f"callbacks: got the class {name}, wanted an object: {name}()")
        methods = [name for name in METHODS if callable(getattr(given, name, None))]
        if not methods and callable(given):
            listener = _OfFunction(given)
            methods = ["on_step_end"]
        if not methods:
            raise ConfigError(
                f"callbacks: got {type(given).__name__}, wanted an object with some of {', '.join(METHODS)}, "
                "or a function of (step, metrics), or a list of these"
            )
        for name in methods:
            arguments = list(inspect.signature(getattr(Callback, name)).parameters)[1:]
            wanted = f"{name}({', '.join(arguments)})"
            check_signature(getattr(listener, name), wanted, arguments, whose=f"callbacks: {_name(listener)}")
        found.append(listener)
    return found


class CallbackTracker(Tracker):
    """The callbacks of a run as one tracker.

    `error` has what a callback has raised: the run is ended in order first.
    """

    def __init__(self, callbacks: Sequence[Any], folder: Path) -> None:
        self._callbacks = callbacks
        self._folder = folder
        self.error: HybridFlowError | None = None
        self._due: Exception | None = None

    def start(self, total_steps: int) -> None:
        """Report that the run begins."""
        with self._in_order():
            if self._tell("on_run_start", self._folder, total_steps):
                raise StopTraining

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Report metrics to the method for their event: a step, a validation, a checkpoint."""
        validation = {name: value for name, value in metrics.items() if VALIDATION.match(name)}
        with self._in_order():
            stops = False
            if "training/global_step" in metrics:
                stops = self._tell("on_step_end", step, dict(metrics))
            if validation:
                stops = self._tell("on_validation", step, validation) or stops
            if SAVED in metrics and "training/global_step" not in metrics:
                stops = self._tell("on_checkpoint", step, self._folder / f"global_step_{step}") or stops
            if stops:
                raise StopTraining
            if self._due is not None:
                due = self._due
                self._due = None  # saving the last step is logged, too
                raise due

    def log_samples(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Send validation samples to callbacks; a stop request waits until the validation is logged."""
        try:
            if self._tell("on_samples", step, rows):
                self._due = StopTraining()
        except HybridFlowError as error:
            self._due = error

    def end(self) -> None:
        """Report that the run has ended."""
        self._tell("on_run_end", self._folder)

    def _tell(self, method: str, *args: Any) -> bool:
        """Call a method of each callback that has it; return whether one stops the run."""
        stops = False
        for listener in self._callbacks:
            function = getattr(listener, method, None)
            if function is None:
                continue
            try:
                with blaming(f"callbacks: {_name(listener)}.{method}"):
                    stops = function(*args) is True or stops
            except ConfigError as error:
                if not isinstance(error.__cause__, StopTraining):
                    raise
                stops = True
        return stops

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """End the run as after a signal, which saves the last whole step."""
        try:
            yield
        except StopTraining:
            raise Stopped(BY_CALLBACK, progress.place()) from None
        except HybridFlowError as error:
            self.error = self.error or error
            raise Stopped(BY_CALLBACK, progress.place()) from error


def _name(listener: Any) -> str:
    if isinstance(listener, _OfFunction):
        return str(getattr(listener.on_step_end, "__qualname__", "function"))
    return type(listener).__name__
