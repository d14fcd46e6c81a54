"""A nested state in two files, without pickle: tensors in `state.safetensors`, the rest in `state.json`.

    {"w": tensor, "lr": 1e-3} ──save_tree──► {"w": {"$tensor": "w"}, "lr": 0.001} + tensors ──load_tree──►

The loaded state equals the saved one in every type and every bit. Tensors are loaded to the CPU. A tensor
that is in several places (tied weights) is stored once and loaded as one tensor. JSON's own types are stored
as they are; a dictionary whose first key begins with `$` encodes a type that JSON lacks.

Safetensors files are written tensor by tensor, with their digests, and without a second copy in memory.

    {name: tensor on any device} ──► header, then the bytes of each tensor ──► file on the disk, FileDigest

The library's own writer needs all tensors on the CPU, and a digest a second pass over its file. Tensors of a
device come to the CPU in groups, each of which is waited for once.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridflow.checkpoint.layout import STRUCTURE, TENSORS
from hybridflow.checkpoint.manifest import FileDigest
from hybridflow.distributed.shards import is_absent, local
from hybridflow.distributed.transfers import HostBuffers
from hybridflow.errors import CheckpointError

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's name for each dtype."""

GROUP_BYTES = 256 * 2**20
"""Size at which a group of tensors that are copied from a device together is complete."""
SMALL_BYTES = 16 * 2**20
"""Size from which a tensor is copied by itself."""

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
State = Any
"""A nesting of dict (keys are str or int), list, tuple, Tensor, numpy array or scalar, and JSON's scalars."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileDigest:
    """Write a new file, wait until it is on the disk, and return its size and digest.

    Equal tensors give equal bytes.
    """
    # wide dtypes first, so that each tensor begins at a multiple of its width
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    digest = hashlib.sha256()
    size = 0
    with path.open("wb", buffering=0) as file:
        for block in _blocks(names, tensors):
            digest.update(block)
            size += len(block)
            while len(block):  # an unbuffered write may take only a part
                block = block[file.write(block) :]
        os.fsync(file.fileno())
    return FileDigest(size, digest.hexdigest())


def write_text(path: Path, text: str) -> FileDigest:
    """Write a small new file, wait until it is on the disk, and return its size and digest."""
    data = text.encode()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(len(data), hashlib.sha256(data).hexdigest())


def _blocks(names: list[str], tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        start = end
        end += tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for tensor in _on_cpu(names, tensors):
        # as bytes through numpy, which knows no bfloat16
        data: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        yield memoryview(data)


def _is_small(tensor: Tensor) -> bool:
    """Return whether a separate wait for this tensor would matter; page-locked memory is kept for ever."""
    return tensor.numel() * tensor.element_size() < SMALL_BYTES


def _on_cpu(names: list[str], tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield the tensors in main memory, those of a device group by group."""
    group: list[str] = []
    size = 0
    for number, name in enumerate(names, start=1):
        group.append(name)
        size += tensors[name].numel() * tensors[name].element_size()
        if size >= GROUP_BYTES or number == len(names):
            buffers = HostBuffers()
            copies = {each: buffers.copy(each, tensors[each]) for each in group if _is_small(tensors[each])}
            buffers.wait()
            for each in group:
                copy = copies.pop(each, None)
                yield tensors[each].cpu() if copy is None else copy
            group = []
            size = 0


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
