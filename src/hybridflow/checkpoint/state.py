"""A nested state in two files, without pickle: tensors in `state.safetensors`, the rest in `state.json`.

    {"w": tensor, "lr": 1e-3} ──save_tree──► {"w": {"$tensor": "w"}, "lr": 0.001} + tensors ──load_tree──►

The loaded state equals the saved one in every type and every bit. Tensors are loaded to the CPU. A tensor
that is in several places (tied weights) is stored once and loaded as one tensor. JSON's own types are stored
as they are; a dictionary whose first key begins with `$` encodes a type that JSON lacks.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridflow.checkpoint.layout import STRUCTURE, TENSORS
from hybridflow.checkpoint.tensor_file import DTYPE_NAMES, write_tensors
from hybridflow.distributed.shards import is_absent, local
from hybridflow.errors import CheckpointError

State = Any
"""A nesting of dict (keys are str or int), list, tuple, Tensor, numpy array or scalar, and JSON's scalars."""


def save_tree(folder: Path, tree: State) -> None:
    """Write a state into a folder; CheckpointError, which names the entry, where one cannot be stored."""
    structure, tensors = encode_tree(tree)
    write_tensors(folder / TENSORS, tensors)
    (folder / STRUCTURE).write_text(structure_text(structure), encoding="utf-8")


def load_tree(folder: Path) -> State:
    """Read a state; raise CheckpointError where a file is missing or was not written by `save_tree`."""
    try:
        structure = json.loads((folder / STRUCTURE).read_text(encoding="utf-8"))
        with safe_open(folder / TENSORS, framework="pt") as file:
            return decode_tree(structure, file.get_tensor)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"cannot read the state in {folder}: {error}") from error


def encode_tree(tree: State, *, partial: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """Return a state in JSON's types, and its tensors by the names that replace them there.

    With `partial` some tensors may be absent here because other ranks hold them (`distributed.shards`).
    Raises CheckpointError, which names the entry, where one cannot be stored.
    """
    encoder = _Encoder(partial)
    return encoder.encode(tree, ""), encoder.tensors


def structure_text(structure: Any) -> str:
    """Return the text of the file for the JSON half of `encode_tree`."""
    return json.dumps(structure, allow_nan=False) + "\n"


class _Encoder:
    def __init__(self, partial: bool) -> None:
        self._partial = partial
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: str) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            if math.isfinite(value):
                return value
            return {"$float": struct.pack(">d", value).hex()}
        if type(value) is bytes:
            return {"$bytes": self._keep(_array_as_tensor(np.frombuffer(value, np.uint8), path), path)}
        if isinstance(value, Tensor):
            return {"$tensor": self._keep(value, path)}
        if isinstance(value, np.ndarray):
            return {"$array": self._keep(_array_as_tensor(value, path), path), "dtype": value.dtype.str}
        if isinstance(value, np.generic):
            _array_as_tensor(np.asarray(value), path)
            return {"$scalar": value.tobytes().hex(), "dtype": value.dtype.str}
        if isinstance(value, dict):
            return self._encode_dict(value, path)
        if type(value) in (list, tuple):
            entries = [self.encode(entry, f"{path}/{index}") for index, entry in enumerate(value)]
            if type(value) is tuple:
                return {"$tuple": entries}
            return entries
        raise CheckpointError(
            f"cannot store {path or 'the state'} of type {type(value).__qualname__}: {_ACCEPTED}"
        )

    def _encode_dict(self, value: dict[Any, Any], path: str) -> Any:
        for key in value:
            if type(key) not in (str, int):
                raise CheckpointError(
                    f"cannot store {path or 'the state'}: its key {key!r} is a {type(key).__qualname__}, "
                    "not str or int"
                )
        pairs = [(key, self.encode(entry, f"{path}/{key}")) for key, entry in value.items()]
        if all(type(key) is str and not key.startswith("$") for key in value):
            return dict(pairs)
        return {"$dict": [list(pair) for pair in pairs]}

    def _keep(self, tensor: Tensor, path: str) -> str:
        absent = self._partial and is_absent(tensor)
        odd = tensor.is_meta and not absent
        if tensor.layout != torch.strided or odd or tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"cannot store {path}: a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}: "
                f"{_ACCEPTED}"
            )
        own = local(tensor)
        memory = (own.device, own.untyped_storage().data_ptr())
        same = (*memory, own.storage_offset(), own.shape, own.stride(), own.dtype)
        if own.numel() and not absent and same in self._names:
            return self._names[same]
        name = stem = path.removeprefix("/") or "state"
        number = 1
        # two paths may give the same name, and the format reserves `__metadata__`
        while name in self.tensors or name == "__metadata__":
            number += 1
            name = f"{stem}#{number}"
        self.tensors[name] = tensor
        self._names[same] = name
        return name


_ACCEPTED = (
    "a state holds dict, list, tuple, dense real tensors, real numpy arrays, int, float, bool, str, "
    "bytes and None (convert the rest, for example by .tolist())"
)


def _numpy_dtype(name: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(name)
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise ValueError(f"a numpy value has dtype {name!r:.80}, which no state of this format holds")
    return dtype


def _array_as_tensor(array: np.ndarray[Any, Any], path: str) -> Tensor:
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise CheckpointError(f"cannot store {path}: a numpy value of dtype {array.dtype}: {_ACCEPTED}")
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))


def decode_tree(node: Any, tensor_of: Callable[[str], Tensor]) -> Any:
    """Return the state that `encode_tree` made `node` from; `tensor_of` is called once for each name.

    Raises ValueError where `encode_tree` cannot have made it.
    """
    known: dict[str, Tensor] = {}

    def tensor(name: str) -> Tensor:
        if name not in known:
            known[name] = tensor_of(name)
        return known[name]

    def decode(node: Any) -> Any:
        if isinstance(node, list):
            return [decode(entry) for entry in node]
        if not isinstance(node, dict):
            return node
        kind = next(iter(node), "")
        if not kind.startswith("$"):
            return {key: decode(entry) for key, entry in node.items()}
        if kind == "$tensor":
            return tensor(node[kind])
        if kind == "$array":
            return tensor(node[kind]).numpy().astype(_numpy_dtype(node["dtype"]))
        if kind == "$bytes":
            return tensor(node[kind]).numpy().tobytes()
        if kind == "$scalar":
            return np.frombuffer(bytes.fromhex(node[kind]), dtype=_numpy_dtype(node["dtype"]))[0]
        if kind == "$float":
            return struct.unpack(">d", bytes.fromhex(node[kind]))[0]
        if kind == "$tuple":
            return tuple(decode(entry) for entry in node[kind])
        if kind == "$dict":
            return {key: decode(entry) for key, entry in node[kind]}
        raise ValueError(f"{kind} is not known to this version")

    try:
        return decode(node)
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{STRUCTURE} was not written by this format: {error!r}") from error
    except (struct.error, BufferError) as error:
        raise ValueError(f"{STRUCTURE} holds a number that cannot be read: {error}") from error
