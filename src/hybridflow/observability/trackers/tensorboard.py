"""TensorBoard event files in `{run}/tensorboard`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from hybridflow.observability.trackers.base import Outcome, RunInfo, SampleRow, Tracker, import_extra


class TensorBoardTracker(Tracker):
    """Writes scalars, and validation samples as text. The purge mark hides the steps after a resumed one.

    Raises ConfigError where the tensorboard package is missing.
    """

    def __init__(self, run: RunInfo) -> None:
        library = import_extra("torch.utils.tensorboard", "tensorboard")
        purge = None if run.resume_step is None else run.resume_step + 1
        self._writer = library.SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=purge)
        if run.config:
            self._writer.add_text(
                "config", f"```json\n{json.dumps(run.config, indent=2, default=str)}\n```", 0
            )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:
        for index, row in enumerate(rows):
            text = "\n\n".join(f"**{name}**\n\n    {_code(value)}" for name, value in row.items())
            self._writer.add_text(f"val/generations/{index}", text, step)

    def close(self, outcome: Outcome = "finished") -> None:
        self._writer.add_text("outcome", f"run {outcome}")
        self._writer.close()


def _code(value: object) -> str:
    """Return text as an indented Markdown block, so that nothing in a response is read as markup."""
    return str(value).replace("\n", "\n    ")
