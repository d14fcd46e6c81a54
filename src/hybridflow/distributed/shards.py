"""The part of a parameter that a rank holds or wants, a box in the indices of the whole tensor; and the
way between a whole tensor and the part of it that a rank holds.

A rank has exactly one box of a parameter under FSDP (dim 0, uneven), under tensor parallelism (any one dim)
and under both (a strided shard).

`bit_sum` is a checksum of a tensor's bits. Checksums of disjoint boxes add up to the checksum of the whole.

    sum over elements of (its bits as an integer) · Π over dims d of odd(d, its index there)      mod 2^64

A flipped bit changes a term by ±2^k times an odd number, which is never 0. The factors depend on the place,
so a box that arrived in the wrong place is found too, which a plain sum of bits would miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from hybridflow.distributed.accelerators import is_accelerator

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 18
"""Elements that are widened to 64 bits at a time: few enough to stay in the CPU's cache."""
_ACCELERATOR_CHUNKS = 16
"""Chunks that are taken together on an accelerator, where each pass costs a few kernel launches."""


@dataclass(frozen=True)
class Box:
    """A box of the indices start[d] ≤ i < stop[d] in each dimension d; a 0-d tensor has one box."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that covers a whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of the box in each dimension."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop))

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def cut(self, dim: int, part: int, parts: int) -> Box:
        """Return part number `part` of `parts` along `dim`.

        Parts are sized as torch.chunk does it: the first ones are equal, the last may be empty.
        """
        size = -(-(self.stop[dim] - self.start[dim]) // parts)
        first = min(self.start[dim] + part * size, self.stop[dim])
        last = min(first + size, self.stop[dim])
        return Box(
            (*self.start[:dim], first, *self.start[dim + 1 :]),
            (*self.stop[:dim], last, *self.stop[dim + 1 :]),
        )

    def __and__(self, other: Box) -> Box | None:
        """Return the box that both cover, or None where they do not overlap."""
        start = tuple(max(pair) for pair in zip(self.start, other.start))
        stop = tuple(min(pair) for pair in zip(self.stop, other.stop))
        if all(a < b for a, b in zip(start, stop)):
            return Box(start, stop)
        return None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices at which this box lies in a tensor that holds exactly the box `outer`."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, outer.start))


def box_at(
    shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> Box:
    """Return the box that the rank at a mesh coordinate holds of a tensor of `shape`.

    A strided shard means that the dimension was cut by the mesh's later dimensions first (tensor
    parallelism), then by this one (FSDP).
    """
    box = Box.whole(shape)
    plain = [
        (i, p.dim)
        for i, p in enumerate(placements)
        if isinstance(p, Shard) and not isinstance(p, _StridedShard)
    ]
    strided = [(i, p.dim) for i, p in enumerate(placements) if isinstance(p, _StridedShard)]
    assert len(plain) + len(strided) == sum(not p.is_replicate() for p in placements), (
        f"no box for placements {tuple(placements)}"
    )
    for mesh_dim, dim in (*plain, *reversed(strided)):
        box = box.cut(dim % len(box.start), coordinate[mesh_dim], mesh[mesh_dim])
    return box


@torch.no_grad()
def bit_sum(part: Tensor, box: Box) -> Tensor:
    """Return the checksum, 0-d int64, of a tensor that holds `box` of a parameter."""
    assert tuple(part.shape) == box.shape, f"a tensor {tuple(part.shape)} is no box {box.shape}"
    bits = part.contiguous().view(BITS[part.element_size()])
    factors = [_odd(dim, box.start[dim], box.stop[dim], part.device) for dim in range(part.dim())]
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    if not part.numel():
        return total
    if part.dim() < 2:
        bits = bits.reshape(1, -1)
        factors = [torch.ones(1, dtype=torch.int64, device=part.device), *factors]
    chunk = _CHUNK
    if is_accelerator(part.device.type):
        chunk *= _ACCELERATOR_CHUNKS
    rows = max(1, chunk // max(1, bits[0].numel()))
    for first in range(0, bits.shape[0], rows):
        value = bits[first : first + rows].to(torch.int64, copy=True)
        for factor in reversed(factors[1:]):
            value = value.mul_(factor).sum(-1)
        total += (value * factors[0][first : first + rows]).sum()
    return total


def bit_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Return the checksums of whole tensors of one device, [len(tensors)] int64 on that device."""
    return torch.stack([bit_sum(tensor, Box.whole(tensor.shape)) for tensor in tensors])


def _odd(dim: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Return an odd factor for each index of a dimension, [stop - start] int64; products wrap around."""
    index = torch.arange(start + 1, stop + 1, dtype=torch.int64, device=device) * (2654435761 + 2 * dim)
    return ((index ^ (index >> 15)) * 0x2545F4914F6CDD1D) | 1


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds, detached, in the same memory."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a whole of which each rank holds a part."""
    return isinstance(tensor, DTensor)


def is_absent(tensor: Tensor) -> bool:
    """Return whether another stage of a pipeline holds a tensor, so that this rank has nothing of it.

    It has its shape and dtype, and is on the meta device.
    """
    return local(tensor).is_meta


def own_box(tensor: Tensor) -> Box:
    """Return the box of the whole that this rank holds; it may be empty, and covers all of a plain tensor."""
    if is_absent(tensor):
        nothing = (0,) * tensor.ndim
        return Box(nothing, nothing)
    if not isinstance(tensor, DTensor):
        return Box.whole(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank asks only for tensors of meshes that it is part of"
    box = box_at(tensor.shape, tuple(tensor.device_mesh.shape), tensor.placements, coordinate)
    held = tuple(local(tensor).shape)
    assert held == box.shape, (
        f"a tensor {tuple(tensor.shape)} placed {tensor.placements} is {held} here, not {box.shape}"
    )
    return box


def own_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Return the slices at which `local(tensor)` lies in the whole; they may be empty."""
    return own_box(tensor).within(Box.whole(tensor.shape))


def placed_like(part: Tensor, tensor: Tensor) -> Tensor:
    """Return `part` as a DTensor with the placements of `tensor`, or as it is if that is not sharded.

    The piece stays on its device; `DTensor.from_local` would move offloaded pieces to the mesh's.
    """
    if not isinstance(tensor, DTensor):
        return part
    meta = TensorMeta(tensor.shape, tensor.stride(), part.dtype)
    return DTensor(
        part.detach(),
        DTensorSpec(tensor.device_mesh, tensor.placements, tensor_meta=meta),
        requires_grad=False,
    )


def piece_for(tensor: Tensor, value: Tensor) -> Tensor:
    """Return the piece of `value` that belongs to this rank's part of `tensor`, which has the same shape.

    Where the two are sharded differently, all ranks call this together.
    """
    if isinstance(value, DTensor):
        if (
            isinstance(tensor, DTensor)
            and value.device_mesh == tensor.device_mesh
            and value.placements == tensor.placements
        ):
            return local(value)
        value = value.full_tensor()
    return value.detach()[own_slices(tensor)]


def replicas(tensor: Tensor, world_size: int) -> int:
    """Return how many of the `world_size` ranks of a stage hold the same piece of a tensor."""
    if not isinstance(tensor, DTensor):
        return world_size
    pieces = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if not placement.is_replicate():
            pieces *= size
    return world_size // pieces
