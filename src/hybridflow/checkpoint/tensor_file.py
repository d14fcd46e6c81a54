"""Safetensors files written tensor by tensor, with their digests, and without a second copy in memory.

    {name: tensor on any device} ──► header, then the bytes of each tensor ──► file on the disk, FileDigest

The library's own writer needs all tensors on the CPU, and a digest a second pass over its file. Tensors of a
device come to the CPU in groups, each of which is waited for once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.checkpoint.manifest import FileDigest
from hybridflow.distributed.transfers import HostBuffers

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
"""Size at which a group of tensors is large enough, which are copied from a device together."""
SMALL_BYTES = 16 * 2**20
"""Size from which a tensor is copied by itself."""

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


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
    """Return whether a wait for a tensor of its own would count; page-locked memory is kept for ever."""
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
