"""The device meshes and process groups of one model in training, as one rank of its pool sees them.

rank = (pp, copy, shard, tp)           parameters: stages × copies of each × shards × tensor-parallel slices
rank = (pp, copy, rest, ep)            experts: stages × copies of each × shards × parts
rank = (pp, dp, sp, tp)                rows: parts of the batch × ranks that compute the same part
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hybridflow.distributed.layout import ParallelLayout
from hybridflow.distributed.process_group import subgroup


@dataclass(frozen=True)
class Column:
    """The ranks that compute the same rows with the same part of each stage, one for each stage."""

    ranks: tuple[int, ...]
    """Ranks in the default process group, by stage."""
    stage: int
    """The stage of this rank."""
    forward: dist.ProcessGroup
    """The group in which hidden states travel; collectives of the column use it too."""
    backward: dist.ProcessGroup
    """The group in which gradients travel: a separate one, since NCCL serves a pair of ranks in order."""
    ends: dist.ProcessGroup
    """The group of the first and the last stage; only its ranks may use it."""

    @classmethod
    def of_this_rank(cls, layout: ParallelLayout) -> Column:
        """Return this rank's column; all ranks of the default process group call this together."""
        rank = dist.get_rank()
        found: Column | None = None
        for first in range(layout.stage_size):
            ranks = tuple(range(first, layout.world_size, layout.stage_size))
            forward, backward = (subgroup(ranks) for _ in range(2))
            ends = subgroup([ranks[0], ranks[-1]])
            if rank in ranks:
                found = cls(ranks, ranks.index(rank), forward, backward, ends)
        assert found is not None, "every rank is in a column"
        return found


class EngineMesh:
    """Meshes over all ranks of the default process group, which all build it together.

    Every rank must make its meshes in the same order.
    """

    fsdp: DeviceMesh
    """The mesh that parameters are sharded over: ("shard",), or ("copy", "shard") with HSDP."""
    tensor: DeviceMesh | None
    """The mesh ("tp",) of tensor parallelism, or None without it."""
    experts: DeviceMesh | None
    """The mesh ("ep",) of the ranks that share the experts of a layer, or None without expert parallelism."""
    expert_fsdp: DeviceMesh | None
    """The mesh that a rank's experts are sharded over: ("rest",), or ("copy", "rest") with HSDP."""
    sequence_group: dist.ProcessGroup | None
    """The ranks that share the tokens of this rank's rows, or None where it has its rows alone."""
    column: Column | None
    """The ranks that hold the other stages of this rank's part of the model, or None without stages."""

    def __init__(self, layout: ParallelLayout, device_type: str) -> None:
        assert dist.is_initialized(), "a mesh needs a process group"
        assert dist.get_world_size() == layout.world_size, (
            f"the layout is for {layout.world_size} ranks and the process group has {dist.get_world_size()}"
        )
        self.layout = layout
        self.rank = dist.get_rank()
        sizes = {"pp": layout.pp, "copy": layout.dp_replicate, "shard": layout.dp_shard, "tp": layout.tp}
        whole = _mesh(device_type, sizes, kept=("shard",))
        names = whole.mesh_dim_names or ()
        inner = tuple(name for name in names if name not in ("pp", "tp"))
        self.fsdp = whole
        if inner != names:
            self.fsdp = whole[inner]
        self.tensor = None
        if "tp" in names:
            self.tensor = whole["tp"]
        self.experts, self.expert_fsdp = _expert_meshes(layout, device_type)
        self.sequence_group = None
        if layout.cp > 1:
            self.sequence_group = _group_along(1, (layout.pp * layout.data, layout.cp, layout.tp))
        self.column = None
        if layout.pp > 1:
            self.column = Column.of_this_rank(layout)

    @property
    def returns(self) -> bool:
        """Whether this rank is the one of those with the same rows whose answers and loss count."""
        return self.layout.returns(self.rank)

    @property
    def reports(self) -> bool:
        """Whether this rank is the one that reports what all ranks know, such as the norm of the gradient."""
        return self.returns and self.layout.data_rank(self.rank) == 0


def _expert_meshes(layout: ParallelLayout, device_type: str) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Return the meshes of a layer's experts and of the shards of each of their parts; None without them."""
    if layout.ep == 1:
        return None, None
    rest = layout.dp_shard * layout.tp // layout.ep
    sizes = {"pp": layout.pp, "copy": layout.dp_replicate, "rest": rest, "ep": layout.ep}
    whole = _mesh(device_type, sizes, kept=("rest", "ep"))
    names = whole.mesh_dim_names or ()
    return whole["ep"], whole[tuple(name for name in names if name not in ("pp", "ep"))]


def _mesh(device_type: str, sizes: dict[str, int], *, kept: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of all ranks with axes of these sizes; those of size 1 are left out, but for `kept`."""
    sizes = {name: size for name, size in sizes.items() if size > 1 or name in kept}
    shape = tuple(sizes.values())
    groups = [_group_along(axis, shape) for axis in range(len(shape))]
    ranks = torch.arange(dist.get_world_size()).view(shape)
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=tuple(sizes))


def _group_along(axis: int, shape: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the group of the ranks that differ from this one along an axis of a mesh of all ranks.

    torch's own way to make the groups of a mesh knows no timeout.
    """
    world = dist.group.WORLD
    assert world is not None, "a mesh needs a process group"
    if shape[axis] == world.size():
        return world
    ranks = torch.arange(world.size()).view(shape)
    own = world
    for line in ranks.movedim(axis, -1).reshape(-1, shape[axis]).tolist():
        group = subgroup(line)
        if world.rank() in line:
            own = group
    return own


_known: dict[tuple[ParallelLayout, str], tuple[object, EngineMesh]] = {}


def engine_mesh(layout: ParallelLayout, device_type: str) -> EngineMesh:
    """Return the mesh for `layout`, which models of one layout in one process group share.

    Each further group would cost memory on a GPU.
    """
    world = dist.group.WORLD
    key = (layout, device_type)
    # this process may have left a group and joined another
    if key not in _known or _known[key][0] is not world:
        _known[key] = (world, EngineMesh(layout, device_type))
    return _known[key][1]
