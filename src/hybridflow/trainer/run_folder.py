"""The folder of a run, in which everything that a reader needs later has a fixed name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from hybridflow.checkpoint.durable import locked
from hybridflow.config.checks.paths import unwritable
from hybridflow.config.tree import flatten
from hybridflow.errors import ConfigError
from hybridflow.observability.machine import machine_facts

LOCK = ".run_lock"
KEY = "trainer.default_local_dir"


class RunFolder:
    """A folder with `config.yaml`, `machine.json`, `metrics.jsonl`, `timeline.jsonl`, `rollouts.jsonl`,
    `failures.json`, `samples/`, `validation/`, `rows/`, `nonfinite/`, `reference/`, `summary.json`,
    `report.html` and `global_step_N/`.
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
    def failures(self) -> Path:
        """File with the text of the first failed trajectory of each cause."""
        return self.path / "failures.json"

    def write_config(self, text: str) -> list[str]:
        """Write the resolved configuration; gives what differs from the file there, as `key: old → new`."""
        path = self.path / "config.yaml"
        before: dict[str, Any] = {}
        if path.is_file():
            before = dict(flatten(_read(path.read_text(encoding="utf-8")) or {}))
        path.write_text(text, encoding="utf-8")
        now = dict(flatten(_read(text)))
        return [
            f"{key}: {before[key]} → {value}"
            for key, value in now.items()
            if key in before and before[key] != value
        ]

    def write_machine(self) -> None:
        """Write the processor, threads and versions of this process, which the results depend on."""
        (self.path / "machine.json").write_text(json.dumps(machine_facts(), indent=2) + "\n")

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the run's closing numbers."""
        (self.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def _read(text: str) -> Any:
    """The content of a YAML text, by libyaml where PyYAML has it: that is ten times as fast."""
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
