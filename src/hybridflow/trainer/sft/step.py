"""One step of supervised fine-tuning or of learning from comparisons, its batches, and its validation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hybridflow.data.loader import MapDataset, StatefulLoader
from hybridflow.data.sft import SFTRow
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.progress import progress
from hybridflow.observability.timing import Timer
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows
from hybridflow.protocol.prompt import MEDIA
from hybridflow.stop_token import stop_token
from hybridflow.trainer.source import LoaderSource, TrainBatch
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
            stop_token.check()
            items = [self.dataset[index] for index in range(start, min(start + self.batch_size, count))]
            metrics.update(self.group.evaluate(self.make_rows(items)))
        values = metrics.to_floats()
        if "val/reward_chosen" in values and "val/reward_rejected" in values:
            values["val/margin"] = values["val/reward_chosen"] - values["val/reward_rejected"]
        return values


Item = TypeVar("Item")


def conversation_rows(examples: Sequence[SFTRow], pad_id: int) -> DataProto:
    """Conversations as rows: all before the first token to learn is the prompt, the rest the response [B, R].

    `response_mask` and `loss_mask` mark the tokens to learn. The first token of all is never among them:
    nothing predicts it.
    """
    starts = [example.loss_mask.index(1, 1) for example in examples]
    columns = make_rows(
        [example.input_ids[:start] for example, start in zip(examples, starts, strict=True)],
        [example.input_ids[start:] for example, start in zip(examples, starts, strict=True)],
        pad_id,
        response_masks=[example.loss_mask[start:] for example, start in zip(examples, starts, strict=True)],
    )
    others = {}
    if any(example.media for example in examples):
        others[MEDIA] = [example.media for example in examples]
    return DataProto.from_dict(columns | {"loss_mask": columns["response_mask"].clone()}, others)


class RowSource(LoaderSource[Item]):
    """Reads the batches of a run whose data is learned from as it is; `make_rows` makes rows of them."""

    def __init__(
        self, loader: StatefulLoader[Item], make_rows: Callable[[Sequence[Item]], DataProto]
    ) -> None:
        super().__init__(loader)
        self.make_rows = make_rows

    def next(self, step: int) -> TrainBatch:
        """Return the next items of the loader as rows."""
        epoch = self.loader.epoch  # read first: with an epoch's last batch the loader moves on
        return TrainBatch(self.make_rows(next(self.batches())), epoch)
