"""The device meshes and process groups of one model in training, as one rank of its pool sees them.

rank = (copy, shard, tp)         parameters: copies of the model × shards of a copy × tensor-parallel slices
rank = (dp, sp) or (dp, tp)      rows: parts of the batch × ranks that compute the same part
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hybridflow.distributed.layout import ParallelLayout


class EngineMesh:
    """Meshes over all ranks of the default process group, which all build it together.

    Every rank must make its meshes in the same order.
    """

    fsdp: DeviceMesh
    """The mesh that parameters are sharded over: ("shard",), or ("copy", "shard") with HSDP."""
    tensor: DeviceMesh | None
    """The mesh ("tp",) of tensor parallelism, or None without it."""
    sequence_group: dist.ProcessGroup | None
    """The ranks that share the tokens of this rank's rows, or None where it has its rows alone."""

    def __init__(self, layout: ParallelLayout, device_type: str) -> None:
        assert dist.is_initialized(), "a mesh needs a process group"
        assert dist.get_world_size() == layout.world_size, (
            f"the layout is for {layout.world_size} ranks and the process group has {dist.get_world_size()}"
        )
        assert layout.pp == layout.ep == 1, f"{layout}: these meshes have no axes for stages and experts"
        self.layout = layout
        self.rank = dist.get_rank()
        named = [("copy", layout.dp_replicate), ("shard", layout.dp_shard), ("tp", layout.tp)]
        named = [axis for axis in named if axis[0] == "shard" or axis[1] > 1]
        names = tuple(name for name, _ in named)
        whole = init_device_mesh(device_type, tuple(size for _, size in named), mesh_dim_names=names)
        inner = tuple(name for name in names if name != "tp")
        self.fsdp = whole
        self.tensor = None
        if "tp" in names:
            self.fsdp = whole[inner]
            self.tensor = whole["tp"]
        self.sequence_group = None
        if layout.cp > 1:
            rows = init_device_mesh(device_type, (layout.data, layout.cp), mesh_dim_names=("dp", "sp"))
            self.sequence_group = rows["sp"].get_group()

    @property
    def returns(self) -> bool:
        """Whether this rank is the one of those with the same rows whose answers and loss count."""
        return self.layout.returns(self.rank)


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
