"""Validation: responses to held-out prompts, their scores, and the samples kept for the reader; metrics by
data source: mean@n, best@k and maj@k with a seeded bootstrap.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

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
from hybridflow.trainer.evaluation.estimators import subset_sizes, support
from hybridflow.trainer.ppo.sample_log import SampleLog
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
        """Return the metrics after `step` steps, and write the samples that keys ask for."""
        metrics, shown = self.measure(step, self.rollout)
        self.samples.validation(shown, step)
        return metrics

    def measure(self, step: int, rollout: RolloutGroup) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return the metrics (`val-core/…`, `val-aux/…`, those of agents too) of the weights that `rollout`
        has, those after `step` steps, and the rows of which samples are kept.
        """
        size = self.config.data.val_batch_size or len(self.dataset)
        parts: list[DataProto] = []
        shown: list[dict[str, Any]] = []
        numbers = Metrics()
        for start in range(0, len(self.dataset), size):
            prompts = [self.dataset[index] for index in range(start, min(start + size, len(self.dataset)))]
            first_row = start * self.config.actor_rollout_ref.rollout.val_kwargs.n
            part, found = self.pipeline.for_validation(
                rollout, prompts, step, self.timer, first_row=first_row
            )
            shown += sample_rows(part, self.samples.decode, max_rows=self.samples.validation_rows)
            parts.append(_without_padding(part))
            numbers.update(found)
        of_agents = {
            f"val-aux/{name}": value
            for name, value in numbers.to_floats().items()
            if name.startswith("agent/")
        }
        return self._metrics(DataProto.concat(with_all_columns(parts))) | of_agents, shown

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


NUM_BOOTSTRAP = 1000


def validation_metrics(
    sources: Sequence[str],
    uids: Sequence[str],
    variables: dict[str, Sequence[Any]],
    predictions: Sequence[Any] | None,
    *,
    seed: int,
) -> dict[str, float]:
    """Return the metrics of each data source and of each variable (`reward`, `acc`, …) that is a number
    there.

    For n responses of a prompt: `mean@n`; for k = 2, 4, 8, … n: `best@k/mean` and, where there are
    predictions, `maj@k/mean`, each the mean over NUM_BOOTSTRAP draws of k responses with replacement. `acc`
    is the core variable of a source that has one, else `reward`. A response without the variable (its reward
    failed) counts as 0.
    """
    result: dict[str, float] = {}
    rows_of: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (source, uid) in enumerate(zip(sources, uids, strict=True)):
        rows_of[source][uid].append(row)
    for source, groups in rows_of.items():
        rows = [row for members in groups.values() for row in members]
        known = {
            name: values for name, values in variables.items() if any(_is_number(values[row]) for row in rows)
        }
        votes = predictions
        if predictions is None or all(predictions[row] is None for row in rows):
            votes = None
        core = "acc" if "acc" in known else "reward"
        for name, values in known.items():
            prefix = f"val-aux/{source}/{name}"
            if name == core:
                prefix = f"val-core/{source}/{name}"
            per_prompt: dict[str, list[float]] = defaultdict(list)
            for number, members in enumerate(groups.values()):
                scores = np.array([float(values[row]) if _is_number(values[row]) else 0.0 for row in members])
                answers = None
                if votes is not None:
                    answers = np.unique([str(votes[row]) for row in members], return_inverse=True)[1]
                for key, value in _prompt_metrics(
                    scores, answers, derive_seed(seed, "bootstrap", number)
                ).items():
                    per_prompt[key].append(value)
            result |= {f"{prefix}/{key}": float(np.mean(entries)) for key, entries in per_prompt.items()}
    return result


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) and not math.isnan(value)


def _prompt_metrics(scores: np.ndarray, answers: np.ndarray | None, seed: int) -> dict[str, float]:
    n = len(scores)
    metrics = {f"mean@{n}": float(scores.mean())}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = float(scores.std(ddof=1))
    rng = np.random.default_rng(seed)
    for k in subset_sizes(n):
        draws = rng.integers(0, n, size=(NUM_BOOTSTRAP, k))
        metrics[f"best@{k}/mean"] = float(scores[draws].max(axis=1).mean())
        metrics[f"worst@{k}/mean"] = float(scores[draws].min(axis=1).mean())
        if answers is not None:
            metrics[f"maj@{k}/mean"] = float(_majority_scores(scores, answers, draws).mean())
    return metrics


def _majority_scores(scores: np.ndarray, answers: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Return, for each draw [D, k], the score of the answer that most of its responses give.

    Of equally frequent answers the one drawn first wins.
    """
    winners = support(answers, draws).argmax(axis=1)
    won: np.ndarray = scores[draws[np.arange(len(draws)), winners]]
    return won
