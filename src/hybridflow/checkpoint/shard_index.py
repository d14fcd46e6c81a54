"""The index of an engine's saved state: the file of each part of each tensor; and whole tensors read by it.

    state.json    the structure, as in `state.py`
                  {"model": {"w": {"$tensor": "model/w"}}, "scheduler": {"num_steps": 4}}
    shards.json   {"format": 1, "files": [F0, F1], "tensors": {"model/w": {"dtype": "F32", "shape": [5, 3],
                   "chunks": [[0, [0, 0], [3, 3]], [1, [3, 0], [2, 3]]]}}}

A chunk is (number of the file, offsets, sizes). In its file it has the tensor's name without the part. The
format is the same for every number of ranks, including one. Reading whole tensors needs no ranks.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridflow.checkpoint.layout import SHARDS, STRUCTURE
from hybridflow.checkpoint.manifest import as_count, as_counts, as_dict, as_list
from hybridflow.checkpoint.state import DTYPE_NAMES, DTYPES, decode_tree
from hybridflow.errors import CheckpointError

T = TypeVar("T")

FORMAT = 1

MAX_ELEMENTS = 2**60

MAX_CUT_DIMS = 8
"""Dimensions along which the parts of one tensor may be cut; a mesh of ranks has fewer."""


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, which is stored in one file."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class SavedTensor:
    """The dtype, shape and chunks of a saved tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class ShardIndex:
    """The structure of an engine's saved state, and the places of its tensors."""

    folder: Path
    structure: Mapping[str, Any]
    """The JSON half of each part (`model`, `optimizer`, `scheduler`)."""
    tensors: Mapping[str, SavedTensor]
    """The tensors by their names in the structure, `PART/...`."""

    @property
    def files(self) -> frozenset[str]:
        """The names of the files that hold the chunks."""
        return frozenset(chunk.file for tensor in self.tensors.values() for chunk in tensor.chunks)


def index_text(tensors: Mapping[str, SavedTensor]) -> str:
    """Return the text of `shards.json`."""
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
    """Read and check the index in a role's folder, in time linear in its size.

    Afterwards every tensor that the structure names is in the index, its chunks tile its shape exactly, and
    the files are large enough to hold them. Raises CheckpointError, which names the file and the reason,
    where a file is missing, has another format, or says something else.
    """
    structure_path = folder / STRUCTURE
    structure = _checked(structure_path, _parts)
    index = _checked(folder / SHARDS, lambda content: ShardIndex(folder, structure, _tensors(content)))
    _checked(structure_path, lambda _: _check_structure(index))
    _check_sizes(index)
    return index


def check_shards(index: ShardIndex) -> None:
    """Raise CheckpointError unless every file holds the chunks that the index says; only headers are read."""
    wanted: dict[str, list[tuple[str, SavedTensor, Chunk]]] = {}
    for name, tensor in index.tensors.items():
        for chunk in tensor.chunks:
            wanted.setdefault(chunk.file, []).append((name, tensor, chunk))
    for file, chunks in wanted.items():
        with opened(index.folder / file) as content:
            for name, tensor, chunk in chunks:
                stored_slice(content, name, tensor, chunk)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a shard's file; what cannot be read of it becomes a CheckpointError that names it."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def stored_slice(file: Any, name: str, tensor: SavedTensor, chunk: Chunk) -> Any:
    """Return safetensors' slice of a chunk; ValueError where its dtype or shape differs."""
    found = file.get_slice(key_in_file(name))
    got = f"{found.get_dtype()} {found.get_shape()}"
    wanted = f"{DTYPE_NAMES[tensor.dtype]} {list(chunk.sizes)}"
    if got != wanted:
        raise ValueError(f"{name} is {got} in this file, and {SHARDS} says {wanted}")
    return found


def key_in_file(name: str) -> str:
    """Return a tensor's name in a shard's file, which lacks the part because the file's own name has it."""
    return name.partition("/")[2]


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of one part by name. A tensor is read as a whole, to the CPU, when it is looked up."""

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
        """Return the name under which a tensor is stored; tied tensors share it."""
        return self._stored[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        return self._index.tensors[self.stored_as(name)].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's dtype without reading it."""
        return self._index.tensors[self.stored_as(name)].dtype

    def _read(self, chunk: Chunk, stored: str) -> Tensor:
        with opened(self._index.folder / chunk.file) as file:
            stored_slice(file, stored, self._index.tensors[stored], chunk)
            tensor: Tensor = file.get_tensor(key_in_file(stored))
            return tensor


def read_tensors(folder: Path, part: str) -> SavedTensors:
    """Return the tensors of a part (`model`) of an engine's state, which any number of ranks may have saved.

    Raises CheckpointError where the part is missing.
    """
    return SavedTensors(read_index(folder), part)


def _checked(path: Path, parse: Callable[[Any], T]) -> T:
    """Parse a JSON file; whatever is wrong with it becomes a CheckpointError that names the file."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"cannot read {path}: it has no field {error}") from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _parts(content: Any) -> dict[str, Any]:
    parts = as_dict(content, "the state")
    for name, part in parts.items():
        as_dict(part, f"the part {name!r:.80}")
    return parts


def _tensors(content: Any) -> dict[str, SavedTensor]:
    content = as_dict(content, "the index")
    if content.get("format") != FORMAT:
        raise ValueError(f"it has format {content.get('format')!r:.80}, and this version reads {FORMAT}")
    files = as_list(content["files"], "files")
    for file in files:
        if not isinstance(file, str) or not file.isprintable() or "/" in file or file in ("", ".", ".."):
            raise ValueError(f"{file!r:.80} is not the name of a file in this folder")
    if len(set(files)) < len(files):
        raise ValueError("it names a file twice")
    entries = as_dict(content["tensors"], "tensors")
    return {name: _tensor(repr(name)[:80], as_dict(entry, name), files) for name, entry in entries.items()}


def _tensor(name: str, entry: dict[str, Any], files: list[str]) -> SavedTensor:
    shape = as_counts(entry["shape"], f"the shape of {name}")
    if math.prod(max(size, 1) for size in shape) >= MAX_ELEMENTS:
        raise ValueError(f"{name} has shape {shape}, which is larger than any tensor")
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"the dtype of {name} is {entry['dtype']!r:.80}, which is unknown")
    chunks = [
        _chunk(name, chunk, files, shape) for chunk in as_list(entry["chunks"], f"the chunks of {name}")
    ]
    if len({chunk.file for chunk in chunks}) < len(chunks):
        raise ValueError(f"two chunks of {name} are in one file, which can hold only one of them")
    # a rank that holds nothing of a tensor may have written an empty chunk
    filled = tuple(chunk for chunk in chunks if math.prod(chunk.sizes)) or tuple(chunks[:1])
    if not tiles(shape, [(chunk.offsets, chunk.sizes) for chunk in filled]):
        raise ValueError(
            f"the chunks of {name} do not make its shape {shape}: one is missing, or two of them overlap"
        )
    return SavedTensor(dtype, shape, filled)


def _chunk(name: str, entry: Any, files: list[str], shape: tuple[int, ...]) -> Chunk:
    fields = as_list(entry, f"a chunk of {name}")
    if len(fields) != 3:
        raise ValueError(
            f"a chunk of {name} has {len(fields)} fields, and file, offsets and sizes are wanted"
        )
    number = as_count(fields[0], f"the file of a chunk of {name}")
    if number >= len(files):
        raise ValueError(f"a chunk of {name} is in file {number}, and there are {len(files)} files")
    offsets = as_counts(fields[1], f"the offsets of a chunk of {name}")
    sizes = as_counts(fields[2], f"the sizes of a chunk of {name}")
    if not len(offsets) == len(sizes) == len(shape):
        raise ValueError(f"a chunk of {name} has not as many dimensions as its shape {shape}")
    if any(offset + size > end for offset, size, end in zip(offsets, sizes, shape)):
        raise ValueError(f"a chunk of {name} at {offsets} with sizes {sizes} ends beyond its shape {shape}")
    return Chunk(files[number], offsets, sizes)


def tiles(shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Return whether boxes of (offsets, sizes) cover every element of a shape exactly once.

    The sum of the boxes' indicator functions is that of the whole exactly where the signed counts of their
    corners agree: a corner counts +1 or -1 by the parity of the upper ends in it. One pass over the boxes,
    with 2^d corners each for the d dimensions along which the tensor is cut.
    """
    cut = [
        dim
        for dim in range(len(shape))
        if any(box[0][dim] != 0 or box[1][dim] != shape[dim] for box in boxes)
    ]
    if len(cut) > MAX_CUT_DIMS:
        raise ValueError(f"a tensor is cut along {len(cut)} dimensions, and at most {MAX_CUT_DIMS} are read")
    if not math.prod(shape):
        return True
    corners: Counter[tuple[int, ...]] = Counter()
    whole = ((0,) * len(shape), shape)
    for sign, (offsets, sizes) in [(-1, whole), *((1, box) for box in boxes)]:
        ends = [((offsets[dim], 1), (offsets[dim] + sizes[dim], -1)) for dim in cut]
        for corner in itertools.product(*ends):
            place = tuple(at for at, _ in corner)
            corners[place] += sign * math.prod(parity for _, parity in corner)
    return not any(corners.values())


def _check_structure(index: ShardIndex) -> None:
    """Decode the structure with an empty tensor in each place, and look up every name that it has."""

    def placeholder(name: Any) -> Tensor:
        if name not in index.tensors:
            raise ValueError(f"the tensor {name!r:.80} is not in {SHARDS}")
        return torch.empty(0)

    decode_tree(dict(index.structure), placeholder)
    for _, name in stored_tensors(dict(index.structure)):
        placeholder(name)


def _check_sizes(index: ShardIndex) -> None:
    """Raise CheckpointError where a file is missing, or smaller than the chunks that the index puts there."""
    wanted: Counter[str] = Counter()
    for tensor in index.tensors.values():
        for chunk in tensor.chunks:
            wanted[chunk.file] += math.prod(chunk.sizes) * tensor.dtype.itemsize
    for file, size in wanted.items():
        path = index.folder / file
        try:
            found = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        if found < size:
            raise CheckpointError(
                f"{path} has {found} bytes, and {index.folder / SHARDS} puts {size} bytes of tensors there"
            )


def stored_tensors(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Give, for every tensor in a structure, its path below `node` and the name under which it is stored."""
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(node, dict):
        stored = node.get("$tensor", node.get("$array"))
        if isinstance(stored, str):
            yield path.removeprefix("/"), stored
            return
        entries = node.items()
    elif isinstance(node, list):
        entries = enumerate(node)
    for key, entry in entries:
        yield from stored_tensors(entry, f"{path}/{key}")
