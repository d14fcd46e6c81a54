"""The folder of a run, in which everything that a reader needs later has a fixed name."""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.durable import locked
from hybridflow.config.paths import unwritable
from hybridflow.config.tree import flatten
from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.observability.machine import MACHINE_FILE, machine_facts
from hybridflow.observability.report import write_report
from hybridflow.observability.report.files import read_yaml

logger = logging.getLogger(__name__)

MAX_TRACEBACK = 20_000
"""Characters that are kept of a traceback, from its end, where the error stands."""
LOCK = ".run_lock"
KEY = "trainer.default_local_dir"


class RunFolder:
    """A folder with `config.yaml`, `machine.json`, `metrics.jsonl`, `timeline.jsonl`, `rollouts.jsonl`,
    `failures.json`, `samples/`, `validation/`, `rows/`, `nonfinite/`, `reference/`, `summary.json`,
    `log.txt`, `failure.json`, `report.html` and `global_step_N/`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder and keep other runs out while this one writes here.

        Raises ConfigError where the folder cannot be written, and where another run is writing into it. A run
        that was killed holds nothing, and one that has written nothing leaves no folder.
        """
        made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        with ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                free = stack.enter_context(locked(self.path / LOCK))
            except OSError as error:
                raise ConfigError(unwritable(KEY, self.path, error)) from error
            if not free:
                raise ConfigError(
                    f"another run is writing into {self.path}: wait for its end, or give this one its own "
                    f"trainer.experiment_name or {KEY}"
                )
            try:
                yield
            finally:
                if made and [path.name for path in self.path.iterdir()] == [LOCK]:
                    (self.path / LOCK).unlink()
                    with suppress(OSError):  # another run may have made its folder beside this one
                        for folder in made:
                            folder.rmdir()

    def check_writable(self) -> None:
        """Raise ConfigError where `held` would; the folder is left as it was."""
        with self.held():
            pass

    @property
    def nonfinite(self) -> Path:
        """Folder for the rows of optimizer steps that were skipped."""
        return self.path / "nonfinite"

    @property
    def failure(self) -> Path:
        """File with the error by which the run has ended."""
        return self.path / "failure.json"

    @property
    def failures(self) -> Path:
        """File with the text of the first failed trajectory of each cause."""
        return self.path / "failures.json"

    def write_config(self, text: str) -> list[str]:
        """Write the resolved configuration, and return what differs from the file there, as `key: old → new`.

        A file there that cannot be read is replaced, with a warning.
        """
        path = self.path / "config.yaml"
        before: dict[str, Any] = {}
        if path.is_file():
            try:
                before = dict(flatten(read_yaml(path)))
            except ValueError as error:
                logger.warning("%s could not be read and is rewritten: %s", path, error)
        path.write_text(text, encoding="utf-8")
        now = dict(flatten(read_yaml(path)))
        return [
            f"{key}: {before[key]} → {value}"
            for key, value in now.items()
            if key in before and before[key] != value
        ]

    def write_machine(self, device: str) -> None:
        """Write the processor, cards, threads and versions of this process, which the results depend on.

        `device` is the kind of device of the run.
        """
        (self.path / MACHINE_FILE).write_text(json.dumps(machine_facts(device), indent=2) + "\n")

    @contextmanager
    def failure_kept(self, steps_done: Callable[[], int]) -> Iterator[None]:
        """Write an error that ends the context into `failure.json`, and a report that shows it."""
        self.failure.unlink(missing_ok=True)
        try:
            yield
        except Exception as error:  # whatever ends a run
            with suppress(OSError, HybridFlowError):  # a full disk: the error itself is what counts
                self._write_failure(error, steps_done())
                report = write_report(self.path)
                logger.info("the run has failed: %s shows its configuration, the failure and its log", report)
            raise

    def _write_failure(self, error: Exception, steps_done: int) -> None:
        notes: list[str] = getattr(error, "__notes__", [])
        failure = {
            "error": type(error).__name__,
            "message": "\n".join([str(error), *notes]),
            "steps_done": steps_done,
            "traceback": "".join(traceback.format_exception(error))[-MAX_TRACEBACK:],
            "at": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        self.failure.write_text(json.dumps(failure, indent=2) + "\n", encoding="utf-8", errors="replace")

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the run's closing numbers."""
        (self.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
