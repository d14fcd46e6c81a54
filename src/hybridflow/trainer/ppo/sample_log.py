"""Samples kept for readers: the metrics of all, a few of some steps token by token for the report, and all
where a key asks for them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.config import PPOConfig
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.observability.samples import SampleWriter, rollout_columns, sample_rows
from hybridflow.observability.trackers import Trackers
from hybridflow.observability.trackers.jsonl import StepLines, read_metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.prompt import MEDIA
from hybridflow.trainer.ppo.columns import whole
from hybridflow.trainer.ppo.reward_watch import RewardWatch, Sign

logger = logging.getLogger(__name__)

REPORT_ROWS = 16
"""Rows of a step that the report shows."""
SHOWN = 3
"""Responses that the log shows of a sign of the reward watch."""
SHOWN_CHARS = 300
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
        self.numbers = StepLines(run_dir / "rollouts.jsonl", keep_to)
        self.watch = RewardWatch() if config.reward.watch else None
        self._earlier: Path | None = run_dir / "metrics.jsonl" if done else None
        self.rollouts = _writer(config.trainer.rollout_data_dir)
        self.validations = _writer(config.trainer.validation_data_dir)

    @property
    def validation_rows(self) -> int | None:
        """Number of rows to keep of a validation part; None: all."""
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

    def training(self, batch: DataProto, values: Mapping[str, float], step: int) -> dict[str, float]:
        """Keep samples of a finished training step, and return what the reward watch adds to its metrics.

        Where that sees a sign, the log and the report show the samples that it is seen in.
        """
        figures: dict[str, float] = {}
        signs: list[Sign] = []
        if self.watch is not None:
            if self._earlier is not None:  # by now it has a validation that a resumed run has made up for
                lines = read_metrics(self._earlier)
                self.watch.replay({number: line for number, line in lines.items() if number < step})
                self._earlier = None
            figures, signs = self.watch.look(batch, values, step)
        shown = batch
        if signs:
            first = [row for sign in signs for row in sign.rows[:SHOWN]]
            rows = list(dict.fromkeys([*first, *range(len(batch))]))
            shown = whole(batch.select_idxs(rows[:REPORT_ROWS]))
            for sign in signs:
                self._tell(sign, batch, step)
        if signs or self.shows(step):
            rows_shown = sample_rows(shown, self.decode, token_level=True, max_rows=REPORT_ROWS)
            if signs:
                told = "; ".join(sign.message for sign in signs)
                rows_shown = [{**row, "reward_watch": told} for row in rows_shown]
            self.report.write(rows_shown, step)
        self.numbers.write(step, rollout_columns(batch))
        if self.rollouts:
            self.rollouts.write(sample_rows(batch, self.decode), step)
        return figures

    def _tell(self, sign: Sign, batch: DataProto, step: int) -> None:
        samples = sample_rows(whole(batch.select_idxs(sign.rows[:SHOWN])), self.decode)
        texts = [f"score {row['score']:g}: {row['response'][:SHOWN_CHARS]!r}" for row in samples]
        logger.warning(
            "step %d, reward watch (%s): %s; look whether this is what the reward is to pay for "
            "(docs/rewards.md). Responses:\n%s",
            step,
            sign.name,
            sign.message,
            "\n".join(texts),
        )

    def validated(self, metrics: Mapping[str, float], step: int) -> None:
        """Have the reward watch look at a validation beside training, whose step has been logged."""
        if self.watch is not None and self._earlier is None:
            self.watch.validated(step, metrics)

    def validation(self, rows: list[dict[str, Any]], step: int) -> None:
        """Samples of a validation."""
        self.report_validation.write(rows[:REPORT_ROWS], step)
        if self.validations:
            self.validations.write(rows, step)
        if self.num_shown:
            # a table of texts has no use for the bytes of pictures
            texts = [{name: row[name] for name in row if name != MEDIA} for row in rows[: self.num_shown]]
            self.trackers.log_samples(texts, step)


def _writer(folder: str | None) -> SampleWriter | None:
    if not folder:
        return None
    return SampleWriter(Path(folder).expanduser())
