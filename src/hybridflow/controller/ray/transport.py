"""How values travel between processes: any Python value in, a `Packet` out, and back, without a copy of a
tensor's bytes.

    value ──encode──► Packet(pickled, buffers) ──Ray's object store: one copy──► Packet (mapped, not copied)
    ──decode──► value

A tensor pickled by default is written out byte by byte, with the whole storage it is a view of. Here every
tensor becomes a view of its own bytes, which pickle protocol 5 hands over beside the pickled structure (PEP
574); the structure is any nesting of DataProto, dictionaries, lists, dataclasses. Nothing is registered
anywhere: only what goes through `encode` travels this way.

What arrives is read-only: it may be memory that other processes read as well. PyTorch cannot enforce that;
`controller.read_only` notices.
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
from torch import Tensor

SMALL_BYTES = 4096
"""Buffers below this stay inside the pickled bytes: handing one over costs more than copying it."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Packet:
    """A value ready to travel."""

    pickled: bytes
    """The structure, with gaps where the buffers go."""
    buffers: tuple[Bytes, ...]
    """Flat uint8 views of the sender's memory until Ray has copied them; on arrival views of the object
    store's.
    """

    @property
    def nbytes(self) -> int:
        """Size of all of it."""
        return len(self.pickled) + sum(buffer.nbytes for buffer in self.buffers)


def encode(value: Any) -> Packet:
    """The value as a packet, which shares the memory of its tensors: do not write to them before it is on its
    way.

    Tensors arrive on the CPU, detached, as plain tensors. AssertionError for a DTensor: its parts belong to
    different ranks.
    """
    file, buffers = io.BytesIO(), []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = np.frombuffer(buffer.raw(), dtype=np.uint8)
        if raw.nbytes >= SMALL_BYTES:
            buffers.append(raw)
        return raw.nbytes < SMALL_BYTES  # true: into the pickled bytes

    _Pickler(file, protocol=5, buffer_callback=keep).dump(value)  # type: ignore[no-untyped-call]
    return Packet(file.getvalue(), tuple(buffers))


def decode(packet: Packet) -> Any:
    """The value of a packet; its tensors are views of the packet's memory, not to be written to."""
    return pickle.loads(packet.pickled, buffers=packet.buffers)


class _Pickler(CloudPickler):  # Ray's, so that classes and functions of a script travel as they do in Ray
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            assert not hasattr(obj, "to_local"), (
                "a DTensor cannot leave its ranks: send its to_local() or its full_tensor()"
            )
            if (
                type(obj) in (Tensor, torch.nn.Parameter)
                and obj.layout is torch.strided
                and not (obj.is_meta or obj.is_quantized)
            ):
                return _reduce(obj)
        return super().reducer_override(obj)  # type: ignore[no-untyped-call]


def _reduce(tensor: Tensor) -> tuple[Any, ...]:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    raw: Any = flat.view(torch.uint8).numpy()  # bytes, because numpy has no bfloat16 and no float8
    return _rebuild, (pickle.PickleBuffer(raw), tensor.dtype, tuple(tensor.shape))


def _rebuild(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).reshape(shape)


# PyTorch says once in a process that such memory must not be written to; we know
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(bytes(1), dtype=torch.uint8)
