"""The device meshes and groups of one model in training, in a process that is a rank of its pool.

rank = (copy, shard, tp)       the parameters: copies of the model × shards of a copy × tensor-parallel slices
of a shard rank = (dp, sp) or (dp, tp)    the rows: parts × ranks that compute the same part
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hybridflow.distributed.sizes import ParallelSizes

__all__ = ["EngineMesh", "ParallelSizes"]


class EngineMesh:
    """Meshes over all ranks of this process's group; all of them build it together, in the same order as any
    other.
    """

    fsdp: DeviceMesh
    """("shard",), or ("copy", "shard") with HSDP."""
    tensor: DeviceMesh | None
    """("tp",), where there is tensor parallelism."""
    sequence_group: dist.ProcessGroup | None
    """The ranks that share the tokens of this rank's rows, where there are others."""

    def __init__(self, sizes: ParallelSizes, device_type: str) -> None:
        assert dist.is_initialized() and dist.get_world_size() == sizes.world_size, (
            f"sizes are for {sizes.world_size} ranks and the group has "
            f"{dist.get_world_size() if dist.is_initialized() else 'not begun'}"
        )
        self.sizes, self.rank = sizes, dist.get_rank()
        named = [("copy", sizes.copies), ("shard", sizes.shards), ("tp", sizes.tensor)]
        named = [axis for axis in named if axis[0] == "shard" or axis[1] > 1]
        names = tuple(name for name, _ in named)
        whole = init_device_mesh(device_type, tuple(size for _, size in named), mesh_dim_names=names)
        inner = tuple(name for name in names if name != "tp")
        self.fsdp = whole if inner == names else whole[inner]
        self.tensor = whole["tp"] if "tp" in names else None
        self.sequence_group = None
        if sizes.sequence > 1:
            rows = init_device_mesh(device_type, (sizes.data, sizes.sequence), mesh_dim_names=("dp", "sp"))
            self.sequence_group = rows["sp"].get_group()

    @property
    def data_rank(self) -> int:
        """Which part of the rows this rank computes."""
        return self.sizes.data_rank(self.rank)

    @property
    def is_leader(self) -> bool:
        """Whether this rank's outputs and loss count: the first of those with the same rows."""
        return self.sizes.is_leader(self.rank)


_known: dict[tuple[ParallelSizes, str], tuple[object, EngineMesh]] = {}


def engine_mesh(sizes: ParallelSizes, device_type: str) -> EngineMesh:
    """The mesh for `sizes`, made once in a process group: models of equal sizes share it, since each group
    costs memory on a GPU.
    """
    world, key = dist.group.WORLD, (sizes, device_type)
    # this process may have left a group and joined another
    if key not in _known or _known[key][0] is not world:
        _known[key] = (world, EngineMesh(sizes, device_type))
    return _known[key][1]
