"""The folder of a run: everything a reader needs later stands there, under fixed names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from hybridflow.checkpoint.durable import locked
from hybridflow.config.tree import flatten
from hybridflow.errors import ConfigError

LOCK = ".run_lock"


class RunFolder:
    """`config.yaml`, `metrics.jsonl`, `samples/`, `validation/`, `nonfinite/`, `summary.json`, `report.html`,
    `global_step_N/`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder and keep other runs out while this one writes here; ConfigError where that cannot
        be or one is at work.

        A run that was killed holds nothing, and one that is refused before it has written anything leaves no
        folder.
        """
        made = self._make()
        with locked(self.path / LOCK) as free:
            if not free:
                raise ConfigError(
                    f"another run is writing into {self.path}: wait for its end, or give this one its own "
                    "trainer.experiment_name or trainer.default_local_dir"
                )
            try:
                yield
            finally:
                if made and [path.name for path in self.path.iterdir()] == [LOCK]:
                    (self.path / LOCK).unlink()
                    with suppress(OSError):  # another run may have made its folder beside this one
                        for folder in made:
                            folder.rmdir()

    def _make(self) -> list[Path]:
        """The folders that were not there and are now, innermost first."""
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"The run folder {self.path} cannot be made ({error}): set trainer.default_local_dir to a "
                "writable place."
            ) from error
        return missing

    @property
    def nonfinite(self) -> Path:
        """Rows of optimizer steps that were skipped."""
        return self.path / "nonfinite"

    def write_config(self, text: str) -> list[str]:
        """Keep the resolved configuration; gives the keys that the one kept before had other values of, as
        `key: old → new`.
        """
        path = self.path / "config.yaml"
        before = dict(flatten(_read(path.read_text()) or {})) if path.is_file() else {}
        path.write_text(text)
        now = dict(flatten(_read(text)))
        return [
            f"{key}: {before[key]} → {value}"
            for key, value in now.items()
            if key in before and before[key] != value
        ]

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Keep the run's closing numbers."""
        (self.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def _read(text: str) -> Any:
    """The content of a YAML text, by libyaml where PyYAML has it: that is ten times as fast."""
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
