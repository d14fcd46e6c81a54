"""Pieces of tensors that are spread over ranks."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from hybridflow.distributed.shards import local, own_slices, placed_like


def test_a_piece_that_rests_on_the_cpu_stays_there() -> None:
    mesh = DeviceMesh("cuda", torch.arange(1), _init_backend=False, _rank=0)
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta(torch.Size([4, 2]), (2, 1), torch.float32))
    parameter = DTensor(torch.zeros(4, 2), spec, requires_grad=False)
    part = torch.arange(8.0, dtype=torch.bfloat16).view(4, 2)
    placed = placed_like(part, parameter)
    assert isinstance(placed, DTensor)
    assert placed.placements == parameter.placements
    assert placed.dtype == torch.bfloat16
    assert local(placed).device.type == "cpu" and local(placed).data_ptr() == part.data_ptr()
    assert own_slices(placed) == (slice(0, 4), slice(0, 2))
