"""One step of supervised fine-tuning, and its validation loss."""

from __future__ import annotations

from hybridflow.data.sft import SFTDataset
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.progress import progress
from hybridflow.observability.timing import Timer
from hybridflow.protocol import DataProto
from hybridflow.trainer.sft.source import conversation_rows
from hybridflow.workers.sft import SFTGroup


class SFTStep:
    """An optimizer step on the rows of a batch."""

    def __init__(self, group: SFTGroup, timer: Timer) -> None:
        self.group = group
        self.timer = timer

    def __call__(self, batch: DataProto, step: int) -> tuple[DataProto, Metrics]:
        """Learn from `batch` as step number `step` (from 1); return it as it is, and the metrics."""
        with self.timer("update"):
            metrics = self.group.update(batch)
        metrics.add_sum("perf/total_num_tokens", batch.batch["attention_mask"].sum())
        return batch, metrics


class SFTValidator:
    """Measures the loss on the validation conversations, `batch_size` of them at a time."""

    def __init__(self, dataset: SFTDataset, group: SFTGroup, batch_size: int, pad_id: int) -> None:
        self.dataset = dataset
        self.group = group
        self.batch_size = batch_size
        self.pad_id = pad_id

    def __call__(self, step: int) -> dict[str, float]:
        """Return `val/loss`, nats per token to learn, after `step` steps."""
        metrics = Metrics()
        count = len(self.dataset)
        starts = range(0, count, self.batch_size)
        for start in progress.each(starts, "batch", len(starts)):
            examples = [self.dataset[index] for index in range(start, min(start + self.batch_size, count))]
            metrics.update(self.group.evaluate(conversation_rows(examples, self.pad_id)))
        return metrics.to_floats()
