"""Between a whole tensor and what a rank holds of it."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from hybridflow.distributed.boxes import Box, box_at


def local(tensor: Tensor) -> Tensor:
    """What this rank holds, detached, in the same memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_box(tensor: Tensor) -> Box:
    """The box of the whole that this rank holds, empty where it holds nothing; a plain tensor is whole."""
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
    """Where `local(tensor)` lies in the whole: one slice for each dim, empty ones where this rank holds
    nothing.
    """
    return own_box(tensor).within(Box.whole(tensor.shape))


def placed_like(part: Tensor, tensor: Tensor) -> Tensor:
    """`part`, this rank's piece, as a tensor spread over ranks as `tensor` is; `part` itself where `tensor`
    is whole.

    It stays on its device: `DTensor.from_local` would send what rests in CPU memory to the mesh's.
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
    """The piece of `value` that belongs to this rank's part of `tensor`, of equal shape; all ranks ask
    together where layouts differ.
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
    """How many of the `world_size` ranks hold the same piece."""
    if not isinstance(tensor, DTensor):
        return world_size
    pieces = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        pieces *= 1 if placement.is_replicate() else size
    return world_size // pieces
