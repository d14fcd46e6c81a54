"""Samples that are kept for readers: a few of some steps, token by token, for the report, and all that is
asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridflow.config import PPOConfig
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.observability.samples import SampleWriter, sample_rows
from hybridflow.observability.trackers import Trackers
from hybridflow.protocol import DataProto

REPORT_ROWS = 16
"""Rows of a step that the report shows."""
REPORT_STEPS = 20
"""Steps of a run that the report shows, about."""


class SampleLog:
    """Writes samples of training steps and validations; those in the run folder after step `done` are of an
    earlier run, and removed.
    """

    def __init__(
        self,
        run_dir: Path,
        config: PPOConfig,
        tokenizer: Tokenizer,
        total_steps: int,
        trackers: Trackers,
        done: int = 0,
    ) -> None:
        self.tokenizer = tokenizer
        self.total_steps = total_steps
        self.trackers = trackers
        self.num_shown = config.trainer.log_val_generations
        keep_to = done or -1  # a fresh run begins with the validation before its first step
        self.report = SampleWriter(run_dir / "samples", keep_to=keep_to)
        self.report_validation = SampleWriter(run_dir / "validation", keep_to=keep_to)
        self.rollouts = _writer(config.trainer.rollout_data_dir)
        self.validations = _writer(config.trainer.validation_data_dir)

    @property
    def validation_rows(self) -> int | None:
        """How many rows of a validation part are wanted; None: all."""
        if self.validations:
            return None
        return max(REPORT_ROWS, self.num_shown)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        return str(self.tokenizer.decode(list(token_ids)))

    def shows(self, step: int) -> bool:
        """Return whether the report shows samples of a training step, token by token."""
        every = max(1, self.total_steps // REPORT_STEPS)
        return step == 1 or step % every == 0 or step == self.total_steps

    def training(self, batch: DataProto, step: int) -> None:
        """Samples of a finished training step."""
        if self.shows(step):
            self.report.write(sample_rows(batch, self.decode, token_level=True, max_rows=REPORT_ROWS), step)
        if self.rollouts:
            self.rollouts.write(sample_rows(batch, self.decode), step)

    def validation(self, rows: list[dict[str, Any]], step: int) -> None:
        """Samples of a validation."""
        self.report_validation.write(rows[:REPORT_ROWS], step)
        if self.validations:
            self.validations.write(rows, step)
        if self.num_shown:
            self.trackers.log_samples(rows[: self.num_shown], step)


def _writer(folder: str | None) -> SampleWriter | None:
    if not folder:
        return None
    return SampleWriter(Path(folder).expanduser())
