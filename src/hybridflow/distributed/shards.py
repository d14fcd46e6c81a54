"""The way between a whole tensor and the part of it that a rank holds."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from hybridflow.distributed.boxes import Box, box_at


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
