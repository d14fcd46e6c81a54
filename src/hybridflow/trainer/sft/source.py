"""Conversations as rows to learn from.

loader ──conversations──► rows, with the assistant's tokens marked ──► TrainBatch
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hybridflow.data.loader import StatefulLoader
from hybridflow.data.sft import SFTRow
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows
from hybridflow.protocol.prompt import MEDIA
from hybridflow.trainer.source import LoaderSource, TrainBatch

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
