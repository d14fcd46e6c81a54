"""Joining batches of different widths and columns, one under the other.

    [B1, P1 + R1], [B2, P2 + R2] ──join_rows──► [B1 + B2, P + R], P and R those of the longest prompt and
    response among them

The axes of a field in the field table decide on which side it is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from hybridflow.protocol.data_proto import DataProto
from hybridflow.protocol.fields import FIELDS, fit_column
from hybridflow.protocol.remote import widths_of


def join_rows(parts: Sequence[DataProto], pad_id: int) -> DataProto:
    """The rows of all parts in order, as wide as the longest prompt and the longest response among them;
    parts without rows add none.

    A column of values that only some parts have is missing in the others: NaN where all its values are
    floats, else None. Raises BatchError where tensors of one part are missing in another.
    """
    filled = with_all_columns([part for part in parts if len(part)] or list(parts[:1]))
    lengths = [_longest(part) for part in filled]
    widths = max(length[0] for length in lengths), max(length[1] for length in lengths)
    return DataProto.concat([_fit(part, widths, pad_id) for part in filled])


def with_all_columns(parts: Sequence[DataProto]) -> list[DataProto]:
    """Return every part with the object columns of all parts.

    Rewards of different sources return different keys.
    """
    found: dict[str, list[Any]] = {}
    for part in parts:
        for name, column in part.non_tensor_batch.items():
            found.setdefault(name, []).extend(column)
    missing = {
        name: float("nan") if all(isinstance(value, float) for value in values) else None
        for name, values in found.items()
    }
    return [
        part
        | DataProto.from_dict({}, {name: [missing[name]] * len(part) for name in found if name not in part})
        for part in parts
    ]


def _longest(part: DataProto) -> tuple[int, int]:
    if not len(part):
        return 0, 0
    attended = part.batch["attention_mask"]
    width = widths_of(part)[0]
    return int(attended[:, :width].sum(-1).max()), int(attended[:, width:].sum(-1).max())


def _fit(part: DataProto, widths: tuple[int, int], pad_id: int) -> DataProto:
    tensors: dict[str, Tensor] = {}
    old = widths_of(part)
    for name in map(str, part.batch.keys()):
        tensor: Tensor = part.batch[name]
        assert tensor.dim() == 1 or name in FIELDS, (
            f"the field table does not say which side of {name} is padded"
        )
        tensors[name] = fit_column(name, tensor, old, widths, pad_id)
    fitted = DataProto.from_dict(tensors, part.non_tensor_batch, part.meta_info)
    fitted.remote = {name: replace(column, fit=(*widths, pad_id)) for name, column in part.remote.items()}
    return fitted
