"""The part of a parameter that a rank holds or wants: a box, in the indices of the whole tensor.

A rank has exactly one box of a parameter under FSDP (dim 0, uneven), under tensor parallelism (any one dim)
and under both (a strided shard).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard


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
