"""The device meshes and process groups of one model in training, as one rank of its pool sees them.

rank = (copy, shard, tp)         parameters: copies of the model × shards of a copy × tensor-parallel slices
rank = (dp, sp) or (dp, tp)      rows: parts of the batch × ranks that compute the same part
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hybridflow.distributed.sizes import ParallelSizes

__all__ = ["EngineMesh", "ParallelSizes"]


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

    def __init__(self, sizes: ParallelSizes, device_type: str) -> None:
        assert dist.is_initialized(), "a mesh needs a process group"
        assert dist.get_world_size() == sizes.world_size, (
            f"the sizes are for {sizes.world_size} ranks and the process group has {dist.get_world_size()}"
        )
        self.sizes = sizes
        self.rank = dist.get_rank()
        named = [("copy", sizes.copies), ("shard", sizes.shards), ("tp", sizes.tensor)]
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
        if sizes.sequence > 1:
            rows = init_device_mesh(device_type, (sizes.data, sizes.sequence), mesh_dim_names=("dp", "sp"))
            self.sequence_group = rows["sp"].get_group()

    @property
    def data_rank(self) -> int:
        """Number of the part of the rows that this rank computes."""
        return self.sizes.data_rank(self.rank)

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the first of those with the same rows, whose outputs and loss count."""
        return self.sizes.is_leader(self.rank)


_known: dict[tuple[ParallelSizes, str], tuple[object, EngineMesh]] = {}


def engine_mesh(sizes: ParallelSizes, device_type: str) -> EngineMesh:
    """Return the mesh for `sizes`, which models of equal sizes in one process group share.

    Each further group would cost memory on a GPU.
    """
    world = dist.group.WORLD
    key = (sizes, device_type)
    # this process may have left a group and joined another
    if key not in _known or _known[key][0] is not world:
        _known[key] = (world, EngineMesh(sizes, device_type))
    return _known[key][1]
