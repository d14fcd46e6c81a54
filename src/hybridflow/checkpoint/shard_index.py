"""Which part of which tensor is in which file of an engine's saved state, as JSON; and reading whole tensors
from it, without ranks.

    state.json    {"model": {"w": {"$tensor": "model/w"}}, "scheduler": {"num_steps": 4}}     the structure,
    as in `state.py`
    shards.json   {"files": [F0, F1],
                   "tensors": {"model/w": {"dtype": "F32", "shape": [5, 3], "chunks": [[0, [0, 0], [3, 3]],
                   [1, [3, 0], [2, 3]]]}}}

A chunk is (number of the file, offsets, sizes); in its file it has the tensor's name without the part. A
folder is the same at every number of ranks, one included.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridflow.checkpoint.layout import SHARDS, STRUCTURE
from hybridflow.checkpoint.tensor_file import DTYPE_NAMES, DTYPES
from hybridflow.errors import CheckpointError

FORMAT = 1


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, in one file."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class SavedTensor:
    """What is known of a tensor without reading it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class ShardIndex:
    """The structure of a saved engine's state and where its tensors are."""

    folder: Path
    structure: Mapping[str, Any]
    """By part."""
    tensors: Mapping[str, SavedTensor]
    """By the name that the structure has for them, `PART/...`."""


def index_text(tensors: Mapping[str, SavedTensor]) -> str:
    """What stands in `shards.json`."""
    files = sorted({chunk.file for tensor in tensors.values() for chunk in tensor.chunks})
    number = {file: index for index, file in enumerate(files)}
    entries = {
        name: {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "chunks": [
                [number[chunk.file], list(chunk.offsets), list(chunk.sizes)] for chunk in tensor.chunks
            ],
        }
        for name, tensor in sorted(tensors.items())
    }
    return json.dumps({"format": FORMAT, "files": files, "tensors": entries}) + "\n"


def read_index(folder: Path) -> ShardIndex:
    """The index in a role's folder. CheckpointError where it is missing, does not cover a tensor or is of a
    newer version.
    """
    try:
        structure = json.loads((folder / STRUCTURE).read_text(encoding="utf-8"))
        content = json.loads((folder / SHARDS).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"{folder / SHARDS} has format {content['format']}, this version reads {FORMAT}: it is newer"
            )
        tensors = {name: _tensor(entry, content["files"]) for name, entry in content["tensors"].items()}
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"cannot read the engine's state in {folder}: {error!r}") from error
    for name, tensor in tensors.items():
        if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.shape):
            raise CheckpointError(
                f"{folder / SHARDS}: the parts of {name} do not make its shape {tensor.shape}: one is missing"
            )
    return ShardIndex(folder, structure, tensors)


def key_in_file(name: str) -> str:
    """What a tensor is called in a shard's file: its name without the part, which the file has in its own."""
    return name.partition("/")[2]


def saved_parts(folder: Path) -> frozenset[str]:
    """Which parts of an engine's state are in a folder (`model`, `optimizer`, `scheduler`)."""
    return frozenset(read_index(folder).structure)


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of one part by name; each is read whole, on the CPU, when it is asked for."""

    def __init__(self, index: ShardIndex, part: str) -> None:
        if part not in index.structure:
            raise CheckpointError(
                f"the state in {index.folder} has no {part}: it was saved without '{part}' in "
                "checkpoint.save_contents"
            )
        self._index = index
        self._stored = dict(stored_tensors(index.structure[part]))

    def __getitem__(self, name: str) -> Tensor:
        stored = self.stored_as(name)
        saved = self._index.tensors[stored]
        if len(saved.chunks) == 1:
            return self._read(saved.chunks[0], stored)
        whole = torch.empty(saved.shape, dtype=saved.dtype)
        for chunk in saved.chunks:
            box = tuple(
                slice(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
            whole[box] = self._read(chunk, stored)
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def stored_as(self, name: str) -> str:
        """What is stored under this name; tied tensors have the same."""
        return self._stored[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is not read for it."""
        return self._index.tensors[self.stored_as(name)].shape

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor that is not read for it."""
        return self._index.tensors[self.stored_as(name)].dtype

    def _read(self, chunk: Chunk, stored: str) -> Tensor:
        path = self._index.folder / chunk.file
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(key_in_file(stored))
                return tensor
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {stored} in {path}: {error}") from error


def read_tensors(folder: Path, part: str) -> SavedTensors:
    """The tensors of a part (`model`) of an engine's state, saved by any number of ranks; CheckpointError
    where there is no such part.
    """
    return SavedTensors(read_index(folder), part)


def _tensor(entry: dict[str, Any], files: list[str]) -> SavedTensor:
    chunks = tuple(
        Chunk(files[number], tuple(offsets), tuple(sizes)) for number, offsets, sizes in entry["chunks"]
    )
    return SavedTensor(DTYPES[entry["dtype"]], tuple(entry["shape"]), chunks)


def stored_tensors(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path below `node`, name of what is stored there) of every tensor in a structure."""
    stored = node.get("$tensor", node.get("$array")) if isinstance(node, dict) else None
    if isinstance(stored, str):
        yield path.removeprefix("/"), stored
    elif isinstance(node, dict | list):
        for key, entry in node.items() if isinstance(node, dict) else enumerate(node):
            yield from stored_tensors(entry, f"{path}/{key}")
