"""Collectives on tensors of the device: gloo on the same memory, with what NCCL wants.

All ranks of a group make the same calls in the same order, with contiguous tensors that are all on the device
or all on the host. Before a call, each rank writes what it is about to do into the group's store and reads
what the others do: a difference is told by rank and call, where NCCL would hang or mix bytes.

A call that is not waited for runs on a stream of the group, so that a kernel which uses its tensors before
`work.wait()` is a fault. Its memory is kept until then, as NCCL's groups keep it.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from simulated_accelerator import counts, timeline
from simulated_accelerator.dispatch import blocks
from simulated_accelerator.memory import alias, block_of
from simulated_accelerator.module import CPU_KEYS

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
SAME_SHAPE = ("allreduce_", "broadcast_", "reduce_", "_allgather_base_", "_reduce_scatter_base_")
"""Calls whose tensors have one shape on all ranks. (A rank's part of a list may have a shape of its own.)"""
MOST_KEPT = 1024
"""Calls whose work may still be waited for. What waits in C++ takes none of them off the list."""


_recent: deque[Any] = deque(maxlen=MOST_KEPT)
"""Tensors of the newest calls. A thread of gloo drops its own with a lock held that the next call wants, with
Python's held: it must not be the last to hold one, which wants Python's too.
"""


class _Pending(NamedTuple):
    """A call that runs on its group's stream, until the work is waited for."""

    work: Any
    stream: timeline.Stream
    number: int
    """Its place in the work of the stream."""
    tensors: list[Tensor]


_pending: OrderedDict[int, _Pending] = OrderedDict()
"""By id of the work."""
_numbers: dict[str, int] = {}
"""Calls of each group so far."""
_streams: dict[str, timeline.Stream] = {}
_lock = threading.RLock()


def _group_of(values: Any) -> Any:
    """Return the process group among the arguments of a call."""
    for each in values:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            return dist.ProcessGroup.unbox(each)
    return None


def _compare(name: str, group: Any, tensors: list[Tensor], where: str) -> None:
    """Raise DeviceFault where another rank of the group is about to make another call."""
    known = dist.distributed_c10d._world.pg_map.get(group)
    if known is None or group.size() == 1:
        return
    store = known[1]
    with _lock:
        number = _numbers[group.group_name] = _numbers.get(group.group_name, 0) + 1
    parts = [name.strip("_")]
    if name != "barrier":
        shapes = ""
        if name in SAME_SHAPE:
            shapes = ", ".join(str(tuple(each.shape)) for each in tensors)
        parts.append(
            f"({shapes}) of {', '.join(sorted({str(each.dtype) for each in tensors}))} on the {where}"
        )
    own = " ".join(parts)
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


def _may_wait_later(operator: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a call gives back work that the caller waits for when it likes."""
    for at, argument in enumerate(operator._schema.arguments):
        if argument.name in ("async_op", "asyncOp"):
            return bool(args[at] if at < len(args) else argument.default_value)
    return True  # messages between two ranks


def _stream_of(group: Any, name: str) -> timeline.Stream:
    """Return the stream on which a group's calls run beside the others; messages have one of their own."""
    key = f"{group.group_name}/{name if name in OF_TWO else ''}"
    with _lock:
        if key not in _streams:
            _streams[key] = timeline.Stream()
        return _streams[key]


def _work_of(result: Any) -> Any:
    """Return the work that a call gave back."""
    for each in tree_leaves(result):
        if isinstance(each, torch.ScriptObject):
            return dist.Work.unbox(each)
    return None


def _read_and_written(name: str, args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """Return the memory that a call reads, and that it writes: results come first."""
    if name == "barrier":
        return [], []
    first = blocks(args[0])
    if name == "send":
        return first, []
    if name == "recv_":
        return [], first
    return blocks(args[1:2]) or first, first


def _on_device(name: str, operator: Any, below: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        for each in tensors:
            if each.device.type != "sim" and each.numel():
                raise counts.fault(f"{name} of a tensor on {each.device} beside tensors of the device")
            if not each.is_contiguous():
                raise counts.fault(f"{name} of a tensor that is not contiguous, {tuple(each.shape)}")
        timeline.refuse_in_recording(name)
        group = _group_of(args)
        if name not in OF_TWO:
            _compare(name, group, tensors, "device")
        back: dict[int, Tensor] = {}

        def down(value: Any) -> Any:
            if isinstance(value, Tensor) and value.device.type == "sim":
                own = alias(value)
                back[id(own)] = value
                return own
            return value

        low = tree_map(down, args)
        counts.launched(operator._schema.name)
        current = timeline.current()
        later = _may_wait_later(operator, args)
        stream = current
        if later:
            stream = _stream_of(group, name)
            stream.wait_stream(current)
        with stream:
            timeline.work(name, *_read_and_written(name, args))
        result = below(*low)
        _recent.append((low, result))
        work = _work_of(result)
        if name not in OF_TWO:
            _real_wait(work)  # the bytes are there; whoever uses them has to wait all the same
        if later:
            with _lock:
                _pending[id(work)] = _Pending(work, stream, stream.number, tensors)
                while len(_pending) > MOST_KEPT:
                    _pending.popitem(last=False)
        return tree_map(lambda out: back.get(id(out), out), result)

    return run


def _on_host(name: str, below: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        group = _group_of(args)
        if name not in OF_TWO:
            _compare(name, group, [each for each in tree_leaves(args) if isinstance(each, Tensor)], "host")
        result = below(*args)
        _recent.append((args, result))
        if name not in OF_TWO:
            work = _work_of(result)
            if work is not None:
                _real_wait(work)
        return result

    return run


_real_wait = dist.Work.wait


def _wait(work: Any, *args: Any, **kwargs: Any) -> Any:
    """Let the current stream wait for a call, as work of NCCL does; the host does not."""
    done = _real_wait(work, *args, **kwargs)
    with _lock:
        pending = _pending.pop(id(work), None)
    if pending is not None:
        timeline.merge(timeline.current().clock, {pending.stream.stream_id: pending.number})
    return done


def _wait_tensor(tensor: Tensor) -> Tensor:
    """Let the current stream wait for the functional collective that fills a tensor."""
    block = block_of(tensor)
    if block is not None and block.writer is not None:
        timeline.merge(timeline.current().clock, {block.writer[0]: block.writer[1]})
    return torch.ops._c10d_functional.wait_tensor.default.redispatch(CPU_KEYS, tensor)


if dist.is_available():
    _c10d = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _name in NAMES:
            _packet = getattr(torch.ops.c10d, _name, None)
            if _packet is None:
                continue
            _kernel = torch.library.get_kernel(f"c10d::{_name}", "CPU")

            def _below(*args: Any, _kernel: Any = _kernel) -> Any:
                return _kernel.call_boxed(CPU_KEYS, *args)

            _operator = _packet.default
            _c10d.impl(_name, _on_device(_name, _operator, _below), "PrivateUse1", allow_override=True)
            _c10d.impl(_name, _on_host(_name, _below), "CPU", allow_override=True)
    dist.Work.wait = _wait
    _functional = torch.library.Library("_c10d_functional", "IMPL")
    _functional.impl("wait_tensor", _wait_tensor, "PrivateUse1")
