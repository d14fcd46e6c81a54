"""Validation: responses to held-out prompts, their scores, and the samples kept for the reader."""

from __future__ import annotations

from typing import Any

from hybridflow.config import PPOConfig
from hybridflow.data.loader import MapDataset
from hybridflow.data.prompts import PromptRow
from hybridflow.episodes.pipeline import RolloutPipeline
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.samples import sample_rows
from hybridflow.observability.timing import Timer
from hybridflow.protocol import DataProto
from hybridflow.protocol.by_trajectory import ByTrajectory
from hybridflow.protocol.joining import with_all_columns
from hybridflow.protocol.randomness import derive_seed
from hybridflow.trainer.ppo.sample_log import SampleLog
from hybridflow.trainer.ppo.val_metrics import validation_metrics
from hybridflow.workers import RolloutGroup


class Validator:
    """Scores the policy on the validation rows; the draws depend on (seed, step, row) alone."""

    def __init__(
        self,
        dataset: MapDataset[PromptRow],
        pipeline: RolloutPipeline,
        rollout: RolloutGroup,
        samples: SampleLog,
        timer: Timer,
    ) -> None:
        self.dataset = dataset
        self.pipeline = pipeline
        self.rollout = rollout
        self.samples = samples
        self.timer = timer
        self.config: PPOConfig = pipeline.config

    def __call__(self, step: int) -> dict[str, float]:
        """Return the metrics (`val-core/…`, `val-aux/…`, those of agents too) after `step` steps and write
        the samples that keys ask for.
        """
        size = self.config.data.val_batch_size or len(self.dataset)
        parts: list[DataProto] = []
        shown: list[dict[str, Any]] = []
        numbers = Metrics()
        for start in range(0, len(self.dataset), size):
            prompts = [self.dataset[index] for index in range(start, min(start + size, len(self.dataset)))]
            first_row = start * self.config.actor_rollout_ref.rollout.val_kwargs.n
            part, found = self.pipeline.for_validation(
                self.rollout, prompts, step, self.timer, first_row=first_row
            )
            shown += sample_rows(part, self.samples.decode, max_rows=self.samples.validation_rows)
            parts.append(_without_padding(part))
            numbers.update(found)
        self.samples.validation(shown, step)
        of_agents = {
            f"val-aux/{name}": value
            for name, value in numbers.to_floats().items()
            if name.startswith("agent/")
        }
        return self._metrics(DataProto.concat(with_all_columns(parts))) | of_agents

    def _metrics(self, rows: DataProto) -> dict[str, float]:
        columns = rows.non_tensor_batch
        variables: dict[str, Any] = {"reward": rows.batch[_SCORE].tolist()}
        variables |= {key: values for key, values in columns.items() if key not in _OWN_COLUMNS}
        predictions = None
        if "pred" in columns:
            # NaN: none given
            predictions = [None if value != value else value for value in columns["pred"]]
        seed = derive_seed(self.config.trainer.seed, "validation_bootstrap")
        metrics = validation_metrics(
            list(columns["data_source"]), list(columns["uid"]), variables, predictions, seed=seed
        )
        truncated = [reason == "length" for reason in columns["finish_reason"]]
        metrics["val-aux/response_length/mean"] = float(rows.batch[_LENGTH].float().mean())
        metrics["val-aux/response_length/clip_ratio"] = sum(truncated) / len(truncated)
        return metrics


# names that no key of a reward has
_SCORE = "validation/score"
_LENGTH = "validation/response_length"
_OWN_COLUMNS = {"uid", "finish_reason", "solution_str", "data_source", "ground_truth", "extra_info"}


def _without_padding(part: DataProto) -> DataProto:
    """Keep what does not depend on the padding, one row a trajectory, so that parts of any widths join."""
    part = ByTrajectory(part).samples
    scores = part.batch["token_level_scores"].sum(-1)
    lengths = part.batch["response_mask"].sum(-1)
    return part.select(["row_id"]).union(DataProto.from_dict({_SCORE: scores, _LENGTH: lengths}))
