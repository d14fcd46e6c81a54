"""One step of supervised fine-tuning or of learning from comparisons, and its validation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hybridflow.data.loader import MapDataset
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.progress import progress
from hybridflow.observability.timing import Timer
from hybridflow.protocol import DataProto
from hybridflow.workers.comparison import ComparisonGroup
from hybridflow.workers.sft import SFTGroup


class SFTStep:
    """An optimizer step on the rows of a batch."""

    def __init__(self, group: SFTGroup | ComparisonGroup, timer: Timer) -> None:
        self.group = group
        self.timer = timer

    def __call__(self, batch: DataProto, step: int) -> tuple[DataProto, Metrics]:
        """Learn from `batch` as step number `step` (from 1); return it as it is, and the metrics."""
        with self.timer("update"):
            metrics = self.group.update(batch)
        metrics.add_sum("perf/total_num_tokens", batch.batch["attention_mask"].sum())
        return batch, metrics


class SFTValidator:
    """Measures the validation data, `batch_size` items at a time; `make_rows` makes rows of them."""

    def __init__(
        self,
        dataset: MapDataset[Any],
        group: SFTGroup | ComparisonGroup,
        batch_size: int,
        make_rows: Callable[[Sequence[Any]], DataProto],
    ) -> None:
        self.dataset = dataset
        self.group = group
        self.batch_size = batch_size
        self.make_rows = make_rows

    def __call__(self, step: int) -> dict[str, float]:
        """Return what the group measures after `step` steps, as the mean over all items: `val/loss`, nats per
        token of conversations; of comparisons `val/margin` too, the mean reward of the chosen answers less
        that of the rejected ones.
        """
        metrics = Metrics()
        count = len(self.dataset)
        starts = range(0, count, self.batch_size)
        for start in progress.each(starts, "batch", len(starts)):
            items = [self.dataset[index] for index in range(start, min(start + self.batch_size, count))]
            metrics.update(self.group.evaluate(self.make_rows(items)))
        values = metrics.to_floats()
        if "val/reward_chosen" in values and "val/reward_rejected" in values:
            values["val/margin"] = values["val/reward_chosen"] - values["val/reward_rejected"]
        return values
