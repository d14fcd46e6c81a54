"""A batch as a folder: tensors in `tensors.safetensors`, all else in `meta.json`.

Reading it cannot run code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridflow.errors import DataError
from hybridflow.protocol.columns import BatchError
from hybridflow.protocol.prompt import MEDIA, Medium

_TENSORS = "tensors.safetensors"
_META = "meta.json"
_FORMAT = 1
_FACTS = ("start", "length", "digest", "kind", "advance")
_POSITIONS = "positions"
_SHOWN = "shown"
_NOTHING = torch.zeros(0, dtype=torch.uint8)


def write(
    folder: Path,
    tensors: Mapping[str, Tensor],
    columns: Mapping[str, list[Any]],
    meta: Mapping[str, Any],
    num_rows: int,
) -> None:
    """Write both files, making the folder. Tuples and arrays become lists; BatchError names a field JSON
    cannot hold.
    """
    if MEDIA in columns:
        entries, values = plain_media(columns[MEDIA])
        columns = {**columns, MEDIA: entries}
        tensors = {**tensors, **values}
    text = json.dumps(
        {
            "format": _FORMAT,
            "num_rows": num_rows,
            "non_tensor_batch": {name: plain(column, f"field {name!r}") for name, column in columns.items()},
            "meta_info": {name: plain(value, f"meta_info[{name!r}]") for name, value in meta.items()},
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    # a separate copy for each tensor: safetensors refuses memory that two names share
    save_file(
        {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()},
        folder / _TENSORS,
    )
    (folder / _META).write_text(text, encoding="utf-8")


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, list[Any]], dict[str, Any], int]:
    """Return the tensors, columns, meta_info and the number of rows of a saved batch."""
    for name in (_TENSORS, _META):
        if not (folder / name).is_file():
            raise DataError(f"{folder} holds no saved DataProto: {name} is missing")
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf-8"))
        tensors = load_file(folder / _TENSORS)
    except (ValueError, SafetensorError) as error:
        raise DataError(f"the DataProto saved in {folder} is damaged: {error}") from error
    if not isinstance(meta, dict) or meta.get("format") != _FORMAT:
        raise DataError(f"{folder / _META} is not a DataProto of format {_FORMAT}")
    columns = meta["non_tensor_batch"]
    if MEDIA in columns:
        columns[MEDIA] = media_of(columns[MEDIA], tensors)
    return tensors, columns, meta["meta_info"], int(meta["num_rows"])


def plain_media(column: Sequence[tuple[Medium, ...] | None]) -> tuple[list[Any], dict[str, Tensor]]:
    """Return the media of rows in JSON's types, and their tensors by name, those of equal media once."""
    tensors: dict[str, Tensor] = {}
    for medium in {each.digest: each for media in column for each in media or ()}.values():
        parts = dict(medium.values)
        if medium.positions is not None:
            parts[_POSITIONS] = medium.positions
        if medium.shown:
            parts[_SHOWN] = torch.tensor(list(medium.shown), dtype=torch.uint8)
        tensors |= {f"{MEDIA}/{medium.digest}/{name}": tensor for name, tensor in parts.items()}
    entries = [[[getattr(each, name) for name in _FACTS] for each in media or ()] for media in column]
    return entries, tensors


def media_of(entries: Sequence[Any], tensors: dict[str, Tensor]) -> list[tuple[Medium, ...]]:
    """Return the media that `plain_media` took apart, and take their tensors out of `tensors`."""
    parts: dict[str, dict[str, Tensor]] = {}
    for key in [key for key in tensors if key.startswith(f"{MEDIA}/")]:
        _, digest, name = key.split("/")
        parts.setdefault(digest, {})[name] = tensors.pop(key)
    positions = {digest: values.pop(_POSITIONS, None) for digest, values in parts.items()}
    shown = {digest: bytes(values.pop(_SHOWN, _NOTHING).tolist()) for digest, values in parts.items()}
    known: dict[str, tuple[Medium, ...]] = {}  # rows of one prompt share their media again
    rows = []
    for media in entries:
        facts = [dict(zip(_FACTS, fact, strict=True)) for fact in media]
        made = tuple(
            Medium(
                **fact,
                values=parts[digest := fact["digest"]],
                positions=positions[digest],
                shown=shown[digest],
            )
            for fact in facts
        )
        rows.append(known.setdefault(json.dumps(media), made))
    return rows


def plain(value: Any, where: str) -> Any:
    """Return a value in JSON's types; BatchError, which begins with `cannot save WHERE`, for others."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist(), where)
    if isinstance(value, list | tuple):
        return [plain(item, where) for item in value]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise BatchError(
                    f"cannot save {where}: JSON has no keys of type {type(key).__name__} ({key!r})"
                )
        return {key: plain(item, where) for key, item in value.items()}
    raise BatchError(
        f"cannot save {where}: JSON cannot hold a {type(value).__name__}; drop the field (pop) or turn it "
        "into plain values"
    )
