"""Tensors that go to the device together, and back."""

from __future__ import annotations

import pytest
import torch
from simulated_accelerator import counts
from simulated_accelerator.row import KIND

from hybridflow.distributed.transfers import ALIGNMENT, HostCopy, all_to_device

SIM = torch.device("sim", 0)
TENSORS = {
    "ids": torch.arange(12).view(3, 4),
    "mask": torch.tensor([[True, False, True]]),
    "none": torch.zeros(0, 5),
    "values": torch.randn(3, 4),
    "one": torch.tensor(7),
    "turned": torch.arange(6.0).view(2, 3).t(),
}


def test_tensors_go_together_and_come_back() -> None:
    with counts.phase("there") as there:
        moved = all_to_device(TENSORS, SIM)
    assert list(moved) == list(TENSORS)
    assert there.launches["copy from host"] == 3  # int64, bool, float32
    for name, tensor in TENSORS.items():
        assert (moved[name].device == SIM and moved[name].data_ptr() % ALIGNMENT == 0) or not tensor.numel()
    copy = HostCopy()
    with counts.phase("back") as back:
        for tensor in moved.values():
            copy.add([tensor])
        found = copy.tensors()
    for tensor, wanted in zip(found, TENSORS.values(), strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=0)
    if KIND == "gpu":
        assert there.num_waits == 0 and back.num_waits == 1


def test_a_change_of_one_is_no_change_of_another_for_autograd() -> None:
    moved = all_to_device({"a": torch.ones(3), "b": torch.ones(3)}, SIM)
    parameter = torch.full((3,), 2.0, device=SIM, requires_grad=True)
    product = (parameter * moved["a"]).sum()
    moved["b"].add_(1)
    product.backward()
    assert parameter.grad is not None and parameter.grad.sum().item() == 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product = (parameter * moved["a"]).sum()
        moved["a"].add_(1)
        product.backward()


def test_a_block_of_memory_has_one_dtype_as_saving_wants() -> None:
    dtypes: dict[int, set[torch.dtype]] = {}
    for tensor in all_to_device(TENSORS, SIM).values():
        dtypes.setdefault(tensor.untyped_storage().data_ptr(), set()).add(tensor.dtype)
    assert all(len(found) == 1 for found in dtypes.values())
