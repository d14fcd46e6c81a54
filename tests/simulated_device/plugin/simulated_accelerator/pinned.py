"""What the host does to tensors that no operator of the device shows.

Pinned host memory, whose hooks torch has in C++ only: it is marked on the storage.

A read of pinned memory by Python, while a copy to it is on its way, is a fault. (Operators of the CPU that
read it get poison.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from simulated_accelerator import counts, timeline

_empty = torch.empty
_Generator = torch.Generator


def _pin(tensor: Tensor, device: Any = None) -> Tensor:
    if tensor.device.type != "cpu":
        raise RuntimeError("cannot pin a tensor of the device: only dense CPU tensors can be pinned")
    if tensor.is_pinned():
        return tensor
    copy = tensor.clone(memory_format=torch.contiguous_format)
    copy.untyped_storage()._pinned = True  # type: ignore[attr-defined]
    return copy


def _is_pinned(tensor: Tensor, device: Any = None) -> bool:
    return tensor.device.type == "cpu" and bool(getattr(tensor.untyped_storage(), "_pinned", False))


def _new_empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
    tensor = _empty(*args, **kwargs)
    if pin_memory:
        tensor.untyped_storage()._pinned = True  # type: ignore[attr-defined]
    return tensor


class Generator(_Generator):
    """A generator of the device is one of the host, whose kernels draw."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        if torch.device(device).type == "sim":
            device = "cpu"
        return _Generator.__new__(cls, device)


def _checked(read: Callable[..., Any]) -> Callable[..., Any]:
    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if timeline._copies and tensor.device.type == "cpu":
            where = timeline.on_the_way(tensor)
            if where is not None:
                raise counts.fault(
                    f"host memory is read before the copy to it has arrived, asked for at {where}"
                )
        return read(tensor, *args, **kwargs)

    return call


_set_item = torch.Tensor.__setitem__


def _put(tensor: Tensor, index: Any, value: Any) -> None:
    """Put a value into places of a tensor.

    For a number that comes to one place, CUDA makes a tensor of the host, which is not pinned: it waits for
    the copy of it. (A first run on a real GPU showed this. A slice is filled by a kernel, which does not
    wait.)
    """
    if tensor.device.type == "sim" and isinstance(value, (int, float)):
        index = index if isinstance(index, tuple) else (index,)
        if len(index) == tensor.dim() and all(isinstance(each, int) for each in index):
            timeline.wait("a number put into one place")
    _set_item(tensor, index, value)


torch.Tensor.__setitem__ = _put  # type: ignore[method-assign,assignment]
torch.Tensor.pin_memory = _pin  # type: ignore[method-assign]
torch.Tensor.is_pinned = _is_pinned  # type: ignore[method-assign]
torch.empty = _new_empty  # type: ignore[assignment]
torch.Generator = Generator  # type: ignore[misc]
for _name in ("numpy", "tolist", "item", "__bool__", "__int__", "__float__", "__array__"):
    setattr(torch.Tensor, _name, _checked(getattr(torch.Tensor, _name)))
torch.accelerator.synchronize = timeline.wait_for_all
