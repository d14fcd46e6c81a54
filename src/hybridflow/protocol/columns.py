"""Operations on one column: to an array of objects, comparison, indexing, joining; scores of rows on tokens.
DataProto is built on these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridflow.errors import DataError

ObjectArray = np.ndarray[Any, Any]  # 1-d, dtype object: one Python value a row


class BatchError(DataError, ValueError):
    """Rows or fields of a DataProto do not fit together."""


def object_array(values: Any, name: str) -> ObjectArray:
    """Return an array with one Python object a row.

    A sequence of lists stays a column of lists and never becomes a matrix.
    """
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1:
        return values
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
        raise BatchError(
            f"column {name!r} must be a sequence with one value a row, got {type(values).__name__}"
        )
    rows = list(values)
    column = np.empty(len(rows), dtype=object)
    for index, row in enumerate(rows):  # `column[:] = rows` would take rows that are lists apart
        column[index] = row
    return column


def same(left: Any, right: Any) -> bool:
    """Deep equality in which NaN equals NaN and an array equals only an array of the same shape."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return first_difference(left, right) is None
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.shape == right.shape and all(map(same, left.ravel().tolist(), right.ravel().tolist()))
    if isinstance(left, Tensor | np.ndarray) or isinstance(right, Tensor | np.ndarray):
        return False
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    floats = isinstance(left, float | np.floating) and isinstance(right, float | np.floating)
    return bool(left == right) or (floats and left != left and right != right)


def first_difference(left: Tensor | ObjectArray, right: Tensor | ObjectArray) -> int | None:
    """Return the first row in which two columns differ (NaN equals NaN), or None where they agree.

    It is 0 where shapes or types differ.
    """
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.shape != right.shape or left.dtype != right.dtype:
            return 0
        if left is right or left.numel() == 0:
            return None
        other = right.to(left.device)
        differs = (left != other) & ~((left != left) & (other != other))
        rows = differs.reshape(differs.shape[0], -1).any(dim=1) if differs.dim() else differs.reshape(1)
        return int(rows.nonzero()[0, 0]) if bool(rows.any()) else None
    if isinstance(left, Tensor) or isinstance(right, Tensor) or len(left) != len(right):
        return 0
    return next(
        (row for row, (a, b) in enumerate(zip(left, right, strict=True)) if a is not b and not same(a, b)),
        None,
    )


def row_indices(idxs: Any, num_rows: int) -> Tensor:
    """Integer rows [K] int64 from integers or from a boolean mask over all rows; negative ones count from the
    end.

    Raises BatchError for a mask of another length and for a row that does not exist.
    """
    index = idxs.detach().cpu() if isinstance(idxs, Tensor) else torch.as_tensor(np.asarray(idxs))
    if index.numel() == 0 and index.dtype != torch.bool:
        return torch.zeros(0, dtype=torch.int64)
    if index.dim() != 1 or index.dtype.is_floating_point:
        raise BatchError(
            f"rows must be a flat list of integers or a boolean mask, got shape {tuple(index.shape)} of "
            f"{index.dtype}"
        )
    if index.dtype == torch.bool:
        if len(index) != num_rows:
            raise BatchError(f"a boolean mask needs one value a row: got {len(index)} for {num_rows} rows")
        return index.nonzero()[:, 0]
    index = index.to(torch.int64)
    outside = (index < -num_rows) | (index >= num_rows)
    if bool(outside.any()):
        raise BatchError(f"row {int(index[outside][0])} does not exist in a batch of {num_rows} rows")
    return index % num_rows if num_rows else index


def join(name: str, columns: Sequence[Tensor]) -> Tensor:
    """Tensors one under the other. Raises BatchError where row shapes or types differ."""
    first = columns[0]
    for column in columns[1:]:
        if column.shape[1:] != first.shape[1:] or column.dtype != first.dtype:
            raise BatchError(
                f"cannot concatenate field {name!r}: rows of shape {tuple(first.shape[1:])} {first.dtype} "
                f"and of shape {tuple(column.shape[1:])} {column.dtype}: pad them to one width first"
            )
    return torch.cat(list(columns))


def place_scores(scores: Tensor, response_mask: Tensor) -> Tensor:
    """Return scores [B] as [B, R], each on the last sampled token of its row.

    A row without sampled tokens gets none.
    """
    placed = torch.zeros(response_mask.shape, dtype=scores.dtype)
    rows = response_mask.any(-1).nonzero().flatten()
    if len(rows):  # else there may be no column at all
        positions = torch.arange(response_mask.shape[1]) * response_mask[rows]
        placed[rows, positions.max(-1).values] = scores[rows]
    return placed
