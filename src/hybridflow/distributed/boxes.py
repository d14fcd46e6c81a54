"""Which part of each parameter a rank holds or wants: an axis-aligned box of the whole tensor, in the whole
tensor's indices.

Sharding by FSDP (dim 0, uneven), by tensor parallelism (any one dim) and by both (a strided shard) all leave
a rank with one box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard


@dataclass(frozen=True)
class Box:
    """Indices start[d] ≤ i < stop[d] in each dim d; of a 0-d tensor, the whole."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop))

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def cut(self, dim: int, part: int, parts: int) -> Box:
        """Part number `part` of `parts` along `dim`, as torch.chunk sizes them: the first ones are equal, the
        last may be empty.
        """
        size = -(-(self.stop[dim] - self.start[dim]) // parts)
        first = min(self.start[dim] + part * size, self.stop[dim])
        last = min(first + size, self.stop[dim])
        return Box(
            (*self.start[:dim], first, *self.start[dim + 1 :]),
            (*self.stop[:dim], last, *self.stop[dim + 1 :]),
        )

    def __and__(self, other: Box) -> Box | None:
        """What both cover; None where that is nothing."""
        start = tuple(max(pair) for pair in zip(self.start, other.start))
        stop = tuple(min(pair) for pair in zip(self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop)) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where this box lies in a tensor that holds exactly `outer`."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, outer.start))


def box_at(
    shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> Box:
    """The box of a tensor of `shape` at a mesh coordinate.

    A strided shard says that the dim was cut by the mesh's later dims first (tensor parallelism), then by
    this one (FSDP).
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
