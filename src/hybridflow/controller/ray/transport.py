"""Python values on their way between processes, without copies of the tensors' bytes.

    value ──encode──► Packet(pickled, buffers) ──Ray's object store copies it once──► Packet ──decode──► value

By default a tensor is pickled byte by byte, with the whole storage that it is a view of. Here every tensor
becomes a view of its own bytes, which pickle protocol 5 passes beside the pickled structure (PEP 574). The
structure may nest DataProto, dictionaries, lists and dataclasses in any way. No class is registered with Ray:
only values that go through `encode` travel this way.

A column of a DataProto travels in a shorter form where it has one (`compact.py`), and then it is copied. All
other tensors, weights among them, travel as they are.

What arrives is read-only, because other processes may read the same memory. PyTorch cannot enforce that;
`controller.read_only` notices writes.
"""

from __future__ import annotations

import io
import pickle
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from ray.cloudpickle import CloudPickler
from tensordict import TensorDict
from torch import Tensor

from hybridflow.controller.ray.compact import compact

SMALL_BYTES = 4096
"""Smaller buffers stay inside the pickled bytes, where copying costs less than passing them separately."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Packet:
    """A value in the form in which it travels."""

    pickled: bytes
    """The pickled structure without the buffers."""
    buffers: tuple[Bytes, ...]
    """Flat uint8 views: of the sender's memory until Ray has copied them, of the object store after it."""

    @property
    def nbytes(self) -> int:
        """The size of the whole packet in bytes."""
        return len(self.pickled) + sum(buffer.nbytes for buffer in self.buffers)


@dataclass(frozen=True)
class Held:
    """What travels in place of a packet that is in TransferQueue."""

    key: str
    sizes: tuple[int, ...]
    """Bytes of the pickled structure, and of each buffer."""


def encode(value: Any) -> Packet:
    """Return the value as a packet that shares the memory of its tensors.

    Do not write to the tensors before Ray has the packet. They arrive detached, as plain tensors on the CPU.
    Raises AssertionError for a DTensor, whose parts belong to different ranks.
    """
    file = io.BytesIO()
    buffers: list[Bytes] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = np.frombuffer(buffer.raw(), dtype=np.uint8)
        if raw.nbytes >= SMALL_BYTES:
            buffers.append(raw)
        return raw.nbytes < SMALL_BYTES  # True puts it into the pickled bytes

    _Pickler(file, protocol=5, buffer_callback=keep).dump(value)  # type: ignore[no-untyped-call]
    return Packet(file.getvalue(), tuple(buffers))


def decode(packet: Packet) -> Any:
    """Return the value of a packet; its tensors are views of the packet's memory and must not be written."""
    return pickle.loads(packet.pickled, buffers=packet.buffers)


class _Pickler(CloudPickler):  # Ray's pickler, so that classes and functions of a script travel by value
    _columns: frozenset[int] = frozenset()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, TensorDict):
            self._columns |= {id(column) for column in obj.values()}
        if isinstance(obj, Tensor):
            assert not hasattr(obj, "to_local"), (
                "a DTensor cannot leave its ranks: send its to_local() or its full_tensor()"
            )
            if (
                type(obj) in (Tensor, torch.nn.Parameter)
                and obj.layout is torch.strided
                and not (obj.is_meta or obj.is_quantized)
            ):
                return _reduce(obj, may_be_short=id(obj) in self._columns)
        return super().reducer_override(obj)  # type: ignore[no-untyped-call]


def _reduce(tensor: Tensor, *, may_be_short: bool) -> tuple[Any, ...]:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if may_be_short and flat.nbytes >= SMALL_BYTES:
        short = compact(flat, tuple(tensor.shape))
        if short is not None:
            return short
    raw: Any = flat.view(torch.uint8).numpy()  # bytes, because numpy has no bfloat16 and no float8
    return _rebuild, (pickle.PickleBuffer(raw), tensor.dtype, tuple(tensor.shape))


def _rebuild(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).reshape(shape)


# PyTorch warns once in each process that such memory must not be written to; this is the place where it does
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(bytes(1), dtype=torch.uint8)
