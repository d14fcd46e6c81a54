"""A batch as a folder: tensors in `tensors.safetensors`, all else in `meta.json`.

Reading it cannot run code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridflow.errors import DataError
from hybridflow.protocol.columns import BatchError

_TENSORS = "tensors.safetensors"
_META = "meta.json"
_FORMAT = 1


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
    text = json.dumps(
        {
            "format": _FORMAT,
            "num_rows": num_rows,
            "non_tensor_batch": {name: plain(column, f"field {name!r}") for name, column in columns.items()},
            "meta_info": {name: plain(value, f"meta_info[{name!r}]") for name, value in meta.items()},
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    # a copy of its own for each tensor: safetensors refuses memory that two names share
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
    return tensors, meta["non_tensor_batch"], meta["meta_info"], int(meta["num_rows"])


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
