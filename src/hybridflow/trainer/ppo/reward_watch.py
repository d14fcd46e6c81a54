"""Signs of reward hacking, a policy that pleases the reward and nothing else, with samples that show it.

batch, metrics of a step ──RewardWatch.look──► further metrics, and a Sign for each rule that is broken

Figures of a step, over the trajectories that were sampled:

    reward_watch/repetition     share of runs of NGRAM tokens that stood in the response before, mean
    reward_watch/format_only    share whose `format` is right and whose `acc` is wrong, where there are both
    reward_watch/length         mean length, in tokens

Signs, too, are lengths that grow beyond those of the first FIRST_STEPS steps, and a score that rises in
training while the held-out one falls. A resumed run compares with the steps in its metrics.jsonl.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from hybridflow.protocol import DataProto
from hybridflow.protocol.by_trajectory import ByTrajectory
from hybridflow.workers.correction import sampled_rows

NGRAM = 4
FIRST_STEPS = 10
MAX_REPETITION = 0.3
MAX_FORMAT_ONLY = 0.5
MAX_LENGTH_RATIO = 3.0
MAX_DIVERGENCE = 0.05
"""Share of the largest score seen, which the training score has to rise by, and the held-out one to fall."""
QUIET_STEPS = 20
"""Steps before a persistent sign is reported again."""


@dataclass(frozen=True)
class Sign:
    """A rule that a step breaks."""

    name: str
    message: str
    rows: list[int]
    """Rows of the batch that show it, the clearest first."""


class RewardWatch:
    """Watches one run, step by step."""

    def __init__(self) -> None:
        self._lengths: list[float] = []
        self._scores: dict[int, float] = {}
        """Training scores of the steps since the last validation."""
        self._late: dict[int, Mapping[str, float]] = {}
        """Validations of earlier steps that no step has looked at yet."""
        self._best: tuple[float, float] | None = None
        """The highest held-out score, and the training score before that validation."""
        self._largest = 0.0
        self._told: dict[str, int] = {}

    def replay(self, lines: Mapping[int, Mapping[str, float]]) -> None:
        """Take the metrics of earlier steps, by step, as if they had been checked; nothing is reported."""
        for step in sorted(lines):
            if "reward_watch/length" in lines[step]:
                self._length_ratio(lines[step]["reward_watch/length"])
                self._scores[step] = lines[step].get("critic/score/mean", 0.0)
                self._divergence(lines[step], step)

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a validation that came after those of its step; the next look is at them."""
        self._late[step] = metrics

    def look(
        self, batch: DataProto, values: Mapping[str, float], step: int
    ) -> tuple[dict[str, float], list[Sign]]:
        """Return the figures of a step and the signs that are due; `values` are its other metrics."""
        view = ByTrajectory(batch)
        if not len(batch):
            return {}, []
        sampled = sampled_rows(view.samples)
        first_rows = view.first_rows
        figures: dict[str, float] = {}
        found: dict[str, tuple[float, str, Tensor]] = {}

        def note(name: str, figure: float, limit: float, message: str, shown_by: Tensor) -> None:
            figures[f"reward_watch/{name}"] = figure
            if figure > limit:
                found[name] = (figure, message, shown_by)

        mask = view.samples.batch["response_mask"]
        lengths = mask.sum(-1).double()
        if "responses" in view.samples:
            repeated = repeated_share(view.samples.batch["responses"], mask)
        else:
            repeated = view.samples.batch["repetition"]
        note(
            "repetition",
            _mean(repeated, sampled),
            MAX_REPETITION,
            f"{{:.0%}} of the runs of {NGRAM} tokens repeat an earlier one of their response",
            repeated,
        )
        formed = _column(view.samples, "format")
        right = _column(view.samples, "acc")
        if formed is not None and right is not None:
            format_only = ((formed > 0) & (right <= 0)).double()
            note(
                "format_only",
                _mean(format_only, sampled),
                MAX_FORMAT_ONLY,
                "{:.0%} of the responses have the right form and a wrong answer",
                format_only,
            )
        length = _mean(lengths, sampled)
        figures["reward_watch/length"] = length
        ratio = self._length_ratio(length)
        if ratio > MAX_LENGTH_RATIO:
            message = f"responses are {{:.1f}} times as long as in the first {FIRST_STEPS} steps"
            found["length"] = (ratio, message, lengths)
        self._scores[step] = values.get("critic/score/mean", 0.0)
        late = [self._divergence(metrics, earlier) for earlier, metrics in sorted(self._late.items())]
        self._late.clear()
        divergence = max([*late, self._divergence(values, step)])
        if divergence > MAX_DIVERGENCE * self._largest:
            message = (
                "the score in training has risen, and the held-out one has fallen, by {:.3g} and more since "
                "the best validation"
            )
            scores = (view.samples.batch["token_level_scores"] * mask).sum(-1).double()
            found["divergence"] = (divergence, message, scores)
        signs = []
        for name, (figure, message, shown_by) in found.items():
            if step - self._told.get(name, -QUIET_STEPS) >= QUIET_STEPS:
                self._told[name] = step
                clearest = shown_by.masked_fill(~sampled, -torch.inf).argsort(descending=True, stable=True)
                rows = first_rows[clearest[: int(sampled.sum())]].tolist()
                signs.append(Sign(name, message.format(figure), rows))
        return figures, signs

    def _length_ratio(self, length: float) -> float:
        if len(self._lengths) < FIRST_STEPS:
            self._lengths.append(length)
        return length / max(fmean(self._lengths), 1.0)

    def _divergence(self, values: Mapping[str, float], step: int) -> float:
        """Return how much the score in training has risen and the held-out one has fallen since the best
        validation, the lesser of the two; 0 without a validation of `step`.
        """
        looks = [values[name] for name in values if name.startswith("val-core/") and "/mean@" in name]
        if not looks:
            return 0.0
        scores = [self._scores.pop(each) for each in sorted(self._scores) if each <= step]
        if not scores:  # it is of the weights before the first step
            return 0.0
        held_out = fmean(looks)
        trained = fmean(scores)
        self._largest = max(self._largest, abs(held_out), abs(trained))
        if self._best is None or held_out >= self._best[0]:
            self._best = (held_out, trained)
        return max(0.0, min(trained - self._best[1], self._best[0] - held_out))


def repeated_share(ids: Tensor, mask: Tensor) -> Tensor:
    """Return [K] float64: of the runs of NGRAM sampled tokens of each row, the share that stood in it before.

    `ids` [K, L] int64 and `mask` [K, L] bool, true on sampled tokens.
    """
    if ids.shape[1] < NGRAM:
        return torch.zeros(len(ids), dtype=torch.float64)
    windows = ids.long().unfold(1, NGRAM, 1)
    whole = mask.unfold(1, NGRAM, 1).all(-1)
    keys = torch.zeros(windows.shape[:2], dtype=torch.int64)
    for place in range(NGRAM):  # wraps around, as a hash may
        keys = keys * 1_000_003 + windows[..., place]
    # runs over tokens that were not sampled equal no other: they are below 0, and all different
    keys = torch.where(whole, keys & (2**62 - 1), -1 - torch.arange(keys.shape[1]))
    ordered = keys.sort(-1).values
    repeats = (ordered[:, 1:] == ordered[:, :-1]).sum(-1)
    return repeats.double() / whole.sum(-1).clamp(min=1)


def _mean(values: Tensor, sampled: Tensor) -> float:
    return float(values[sampled].double().sum()) / max(int(sampled.sum()), 1)


def _column(samples: DataProto, name: str) -> Tensor | None:
    """Return [K] float64 of a column of numbers that the reward returned, or None where there is none."""
    values = samples.non_tensor_batch.get(name)
    if values is None or not all(isinstance(value, (bool, int, float)) for value in values):
        return None
    return torch.tensor([float(value) for value in values], dtype=torch.float64)
