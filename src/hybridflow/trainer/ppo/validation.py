"""Validation: responses to held-out prompts, their scores, and the samples kept for the reader."""

from __future__ import annotations

from typing import Any

from hybridflow.config import PPOConfig
from hybridflow.data.prompts import PromptDataset
from hybridflow.protocol import DataProto
from hybridflow.protocol.randomness import derive_seed
from hybridflow.trainer.ppo.trajectories import Trajectories
from hybridflow.trainer.ppo.val_metrics import validation_metrics


class Validator:
    """Scores the policy on the validation rows; the draws depend on (seed, step, row) alone."""

    def __init__(self, dataset: PromptDataset, trajectories: Trajectories, config: PPOConfig) -> None:
        self.dataset, self.trajectories, self.config = dataset, trajectories, config

    def __call__(self, step: int) -> tuple[dict[str, float], DataProto]:
        """Metrics (`val-core/…`, `val-aux/…`) and all rows of the validation."""
        size = self.config.data.val_batch_size or len(self.dataset)
        parts = []
        for number, start in enumerate(range(0, len(self.dataset), size)):
            prompts = [self.dataset[index] for index in range(start, min(start + size, len(self.dataset)))]
            part, _ = self.trajectories.for_validation(prompts, step)
            part.non_tensor_batch["uid"][:] = [f"{number}-{uid}" for uid in part.non_tensor_batch["uid"]]
            parts.append(_narrow(part))
        rows = DataProto.concat(parts)
        return self._metrics(rows), rows

    def _metrics(self, rows: DataProto) -> dict[str, float]:
        columns = rows.non_tensor_batch
        variables: dict[str, Any] = {"reward": rows.batch["score"].tolist()}
        for key, values in columns.items():
            if key not in _OWN_COLUMNS and all(isinstance(value, (bool, int, float)) for value in values):
                variables[key] = values
        predictions = list(columns["pred"]) if "pred" in columns else None
        seed = derive_seed(self.config.trainer.seed, "validation_bootstrap")
        metrics = validation_metrics(list(columns["data_source"]), list(columns["uid"]), variables, predictions, seed=seed)
        metrics["val-aux/response_length/mean"] = float(rows.batch["response_length"].float().mean())
        truncated = [reason == "length" for reason in columns["finish_reason"]]
        metrics["val-aux/response_length/clip_ratio"] = sum(truncated) / len(truncated)
        return metrics


_OWN_COLUMNS = {"uid", "finish_reason", "solution_str", "data_source", "ground_truth", "extra_info", "prompt_str"}


def _narrow(part: DataProto) -> DataProto:
    """Keep what does not depend on the padding, so that parts of different widths join."""
    scores = part.batch["token_level_scores"].sum(-1)
    narrow = part.select(["row_id"])
    return narrow.union(DataProto.from_dict({"score": scores, "response_length": part.batch["response_mask"].sum(-1)}))
