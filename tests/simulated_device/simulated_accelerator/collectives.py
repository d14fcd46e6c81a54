"""Collectives on tensors of the device: gloo on the same memory, with what NCCL wants.

All ranks of a group make the same calls in the same order, with tensors of the device that are contiguous.
Before a call, each rank writes what it is about to do into the group's store and reads what the others do: a
difference is told by rank and call, where NCCL would hang or mix bytes.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from simulated_accelerator import counts, timeline
from simulated_accelerator.dispatch import blocks
from simulated_accelerator.memory import alias

NAMES = (
    "allreduce_",
    "broadcast_",
    "allgather_",
    "_allgather_base_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "alltoall_base_",
    "alltoall_",
    "gather_",
    "scatter_",
    "reduce_",
    "send",
    "recv_",
    "barrier",
    "allreduce_coalesced_",
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_tensor_coalesced_",
)
OF_TWO = ("send", "recv_")
"""Calls of two ranks, which need no order among the others."""

_numbers: dict[str, int] = {}
_lock = threading.Lock()


def _group_of(values: Any) -> Any:
    """Return the process group among the arguments of a call."""
    for each in tree_leaves(values):
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            return dist.ProcessGroup.unbox(each)
    return None


def _compare(name: str, group: Any, tensors: list[Tensor]) -> None:
    """Raise DeviceFault where another rank of the group is about to make another call."""
    known = dist.distributed_c10d._world.pg_map.get(group)
    if known is None:
        return
    store = known[1]
    with _lock:
        number = _numbers[group.group_name] = _numbers.get(group.group_name, 0) + 1
    shapes = [tuple(each.shape) for each in tensors]
    if name not in ("allreduce_", "broadcast_", "reduce_", "barrier"):
        shapes = []  # parts of a rank may be of another size
    dtypes = sorted({str(each.dtype) for each in tensors})
    own = f"{name}{shapes} of {', '.join(dtypes) or 'nothing'}"
    store.set(f"simulated/{number}/{group.rank()}", own)
    for rank in range(group.size()):
        if rank == group.rank():
            continue
        other = store.get(f"simulated/{number}/{rank}").decode()
        if other != own:
            raise counts.fault(
                f"call {number} of the group {group.group_name}: rank {group.rank()} makes {own}, "
                f"rank {rank} makes {other}"
            )


def _collective(name: str, operator: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        flat, tree = tree_flatten((args, kwargs))
        tensors = [each for each in flat if isinstance(each, Tensor)]
        for each in tensors:
            if not each.is_contiguous():
                raise counts.fault(f"{name} of a tensor that is not contiguous, {tuple(each.shape)}")
            if each.device.type != "sim" and each.numel():
                raise counts.fault(f"{name} of a tensor on {each.device} beside tensors of the device")
        timeline.refuse_in_recording(name)
        group = _group_of(flat)
        if group is not None and name not in OF_TWO:
            _compare(name, group, tensors)
        back: dict[int, Tensor] = {}
        low: list[Any] = []
        for each in flat:
            if isinstance(each, Tensor) and each.device.type == "sim":
                own = alias(each)
                back[own.data_ptr()] = each
                each = own
            low.append(each)
        counts.launched(operator._schema.name)
        timeline.work(name, blocks(flat), blocks(flat))
        low_args, low_kwargs = tree_unflatten(low, tree)
        result = operator(*low_args, **low_kwargs)
        return tree_map(lambda out: back.get(out.data_ptr(), out) if isinstance(out, Tensor) else out, result)

    return run


if dist.is_available():
    _c10d = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _name in NAMES:
            _operator = getattr(torch.ops.c10d, _name, None)
            if _operator is not None:
                _c10d.impl(_name, _collective(_name, _operator.default), "PrivateUse1", allow_override=True)
