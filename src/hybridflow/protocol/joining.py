"""Joining batches of different widths and columns, one under the other.

    [B1, P1 + R1], [B2, P2 + R2] ──join_rows──► [B1 + B2, P + R], P and R those of the longest prompt and
    response that are there

The axes of a field in the field table decide on which side it is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from hybridflow.protocol.data_proto import DataProto
from hybridflow.protocol.fields import FIELDS

_TOKEN_IDS = ("prompts", "responses", "input_ids")
_FILL = {"policy_version": -1}


def join_rows(parts: Sequence[DataProto], pad_id: int) -> DataProto:
    """The rows of all parts in order, as wide as the longest prompt and the longest response among them;
    parts without rows add none.

    A column of values that only some parts have is missing in the others: NaN where all its values are
    floats, else None. Raises BatchError where tensors of one part are missing in another.
    """
    filled = with_all_columns([part for part in parts if len(part)] or list(parts[:1]))
    widths = [_longest(part) for part in filled]
    prompt = max(width[0] for width in widths)
    response = max(width[1] for width in widths)
    return DataProto.concat([_fit(part, prompt, response, pad_id) for part in filled])


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
    attended = part.batch["attention_mask"]
    width = part.batch["prompts"].shape[1]
    lengths = [attended[:, :width].sum(-1), attended[:, width:].sum(-1)]
    if not len(part):
        return 0, 0
    return int(lengths[0].max()), int(lengths[1].max())


def _fit(part: DataProto, prompt: int, response: int, pad_id: int) -> DataProto:
    old = part.batch["prompts"].shape[1]
    tensors: dict[str, Tensor] = {}
    for name in map(str, part.batch.keys()):
        tensor: Tensor = part.batch[name]
        assert tensor.dim() == 1 or name in FIELDS, (
            f"the field table does not say which side of {name} is padded"
        )
        axes = FIELDS[name].axes if name in FIELDS else "B"
        fill = pad_id if name in _TOKEN_IDS else _FILL.get(name, 0)
        if axes == "B,P":
            tensor = pad(tensor, (prompt - tensor.shape[1], 0), value=fill)
        elif axes == "B,R":
            tensor = pad(tensor, (0, response - tensor.shape[1]), value=fill)
        elif axes == "B,T":
            more = response - tensor.shape[1] + old
            tensor = pad(tensor, (prompt - old, more), value=fill)
        tensors[name] = tensor
    return DataProto.from_dict(tensors, part.non_tensor_batch, part.meta_info)
