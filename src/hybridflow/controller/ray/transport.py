"""Serialisation of Python values between processes, without copies of the tensors' bytes.

    value ──encode──► Packet(pickled, buffers) ──Ray's object store copies it once──► Packet ──decode──► value

By default a tensor is pickled byte by byte, with the whole storage that it is a view of. Here every tensor
becomes a view of its own bytes, which pickle protocol 5 passes beside the pickled structure (PEP 574). The
structure may nest DataProto, dictionaries, lists and dataclasses in any way. No class is registered with Ray:
only values that go through `encode` travel this way.

A column of a DataProto travels in a shorter form where it has one, and then it is copied: runs of equal
values once with their lengths, integers in a narrower type. Masks, versions and scores of outcomes have a few
runs in a row, and token ids fit into fewer bytes than the 8 of int64. Bit patterns are compared, so NaN and
-0.0 stay what they are. All other tensors, weights among them, travel as they are.

What arrives is read-only, because other processes may read the same memory. PyTorch cannot enforce that;
`controller.local.TensorVersions` notices writes.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from ray.cloudpickle import CloudPickler
from tensordict import TensorDict
from torch import Tensor

Short = tuple[Callable[..., Tensor], tuple[Any, ...]]
"""A function of this module and arguments that make the column again."""

SMALLER = 4
"""Runs are taken where they need this many times fewer bytes than the column."""
LENGTH = torch.int32
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers whose bits carry the values of a dtype, by the dtype's size."""
NARROW = (torch.uint8, torch.int16, torch.int32)
PROBES = 128
"""Neighbours that are compared before all are: a column of unlike values costs microseconds."""


def compact(flat: Tensor, shape: tuple[int, ...]) -> Short | None:
    """Return a shorter form of a column [B, ...], or None where there is none that is much shorter.

    `flat` are all of its values in order, on the CPU.
    """
    size = flat.element_size()
    if size not in BITS or not 2 <= flat.numel() <= torch.iinfo(LENGTH).max:
        return None
    bits = flat.view(BITS[size])
    most = flat.numel() * size // (SMALLER * (size + LENGTH.itemsize))
    # an odd step comes upon all places of a row where rows are as long as a power of 2
    step = len(bits) // PROBES | 1
    probes = bits.numpy()
    probed = probes[:-1:step] != probes[1::step]
    if np.count_nonzero(probed) * len(bits) <= 2 * most * len(probed):  # twice, because a sample may lie
        last = torch.cat([(bits[1:] != bits[:-1]).nonzero()[:, 0], torch.tensor([len(bits) - 1])])
        if len(last) <= most:
            lengths = last.diff(prepend=torch.tensor([-1])).to(LENGTH)
            return repeated, (bits[last], lengths, flat.dtype, shape)
    if flat.dtype == torch.int64:
        lowest, highest = (int(end) for end in flat.aminmax())
        for narrow in NARROW:
            if torch.iinfo(narrow).min <= lowest and highest <= torch.iinfo(narrow).max:
                return widened, (flat.to(narrow), flat.dtype, shape)
    return None


def repeated(values: Tensor, lengths: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return each value as often as its length says."""
    return values.repeat_interleave(lengths).view(dtype).reshape(shape)


def widened(values: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the values in their own type."""
    return values.to(dtype).reshape(shape)


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
class StoredPacket:
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

    _PacketPickler(file, protocol=5, buffer_callback=keep).dump(value)  # type: ignore[no-untyped-call]
    return Packet(file.getvalue(), tuple(buffers))


def decode(packet: Packet) -> Any:
    """Return the value of a packet; its tensors are views of the packet's memory and must not be written."""
    return pickle.loads(packet.pickled, buffers=packet.buffers)


class _PacketPickler(
    CloudPickler
):  # Ray's pickler, so that classes and functions of a script travel by value
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
