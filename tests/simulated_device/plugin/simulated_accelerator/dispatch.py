"""Every operator on tensors of the device: the CPU's kernel on CPU tensors over the same memory.

Operators that make views are torch's own. Mixing tensors of the host and of the device is an error, as on
CUDA, where numbers (0-d tensors of the host) and an index on the host are allowed; the index is a wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from simulated_accelerator import counts, memory, timeline
from simulated_accelerator.memory import Block, alias, block_of, make, poison
from simulated_accelerator.module import CPU_KEYS

WAITING = {
    "aten::nonzero",
    "aten::nonzero.out",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::unique_dim_consecutive",
    "aten::equal",
    "aten::bincount",
}
"""Operators whose result has a shape, or is a number, that the device must tell the host first."""
BY_INDEX = {
    "aten::index.Tensor",
    "aten::index.Tensor_out",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
}
COUNTED_BEFORE = {"aten::index.Tensor_out"}
"""Of these, torch has copied indices to the device and looked for the places of masks before."""
_as_strided = torch.ops.aten.as_strided.default


class Kind(NamedTuple):
    """The part of an operator's schema that matters here."""

    name: str
    is_view: bool
    names: list[str]
    """Names of the arguments."""
    written: list[int]
    """Arguments that it writes to."""
    tensors: set[int]
    """Arguments that are a tensor, for which a number may stand."""


_kinds: dict[Any, Kind] = {}


def kind_of(operator: Any) -> Kind:
    """Return what matters of an operator."""
    found = _kinds.get(operator)
    if found is None:
        schema = operator._schema
        name = schema.name
        if schema.overload_name:
            name = f"{name}.{schema.overload_name}"
        arguments = schema.arguments
        found = _kinds[operator] = Kind(
            name,
            any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns),
            [each.name for each in arguments],
            [at for at, each in enumerate(arguments) if each.alias_info and each.alias_info.is_write],
            {at for at, each in enumerate(arguments) if str(each.type) in ("Tensor", "Optional[Tensor]")},
        )
    return found


def on_device(value: Any) -> bool:
    """Return whether a value is a tensor of the device."""
    return isinstance(value, Tensor) and value.device.type == "sim"


def blocks(values: Any) -> list[Block]:
    """Return the memory under the tensors of the device in a tree."""
    found = (block_of(each) for each in tree_leaves(values) if on_device(each))
    return [each for each in found if each is not None]


def run(name: str, function: Callable[..., Any], *arguments: Any, written: Sequence[Tensor] = ()) -> Any:
    """Run a function of CPU tensors on tensors of the device, as one kernel; return tensors of the device."""
    low = tree_map(lambda each: alias(each) if on_device(each) else each, list(arguments))
    counts.launched(name)
    timeline.work(name, blocks(arguments), blocks(written))
    out = function(*low)
    if timeline.tape() is not None:
        timeline.tape().note(function, low, {}, out, blocks(arguments))
    new = tree_map(lambda each: make(each) if isinstance(each, Tensor) else each, out)
    _made(name, new)
    return new


def _made(name: str, values: Any) -> None:
    """Note that new memory was written by the current stream."""
    if len(timeline._streams) > 1:
        stream = timeline.current()
        for block in blocks(values):
            block.writer = (stream.stream_id, stream.number, f"{name} at {counts.place(1)}")


def _dtype_of_number(number: Any, arguments: Any) -> torch.dtype:
    """Return the dtype of a number that stands for a tensor beside `arguments`."""
    like = next((each.dtype for each in tree_leaves(arguments) if isinstance(each, Tensor)), torch.float32)
    if isinstance(number, bool):
        return torch.bool
    if isinstance(number, int):
        return like if not like.is_floating_point and like != torch.bool else torch.int64
    return like if like.is_floating_point else torch.float32


class _Call:
    """One call of an operator: its arguments as CPU tensors, and the way back."""

    def __init__(self, kind: Kind, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.kind = kind
        self.back: dict[int, tuple[Tensor, Tensor]] = {}
        """By id of the CPU tensor: the device's and the CPU's."""
        self.on_host: list[Tensor] = []
        self.args = [
            torch.tensor(each, dtype=_dtype_of_number(each, (args, kwargs)))
            if at in kind.tensors and isinstance(each, (int, float))
            else each
            for at, each in enumerate(args)
        ]
        self.kwargs = kwargs

    def down(self, value: Any) -> Any:
        """Return an argument as the CPU's kernel takes it."""
        if isinstance(value, Tensor):
            if value.device.type == "sim":
                low = alias(value)
                self.back[id(low)] = (value, low)
                return low
            if value.dim() or self.kind.name in BY_INDEX:
                self.on_host.append(value)
        elif type(value) in (list, tuple):
            return type(value)(self.down(each) for each in value)
        elif isinstance(value, torch.device) and value.type == "sim":
            return torch.device("cpu")
        return value

    def up(self, value: Any) -> Any:
        """Return a result as a tensor of the device: an argument, a part of one, or a new one."""
        if not isinstance(value, Tensor):
            return value
        if id(value) in self.back:
            return self.back[id(value)][0]
        for tensor, low in self.back.values():
            if low.untyped_storage()._cdata == value.untyped_storage()._cdata:
                shape, stride = list(value.shape), list(value.stride())
                return _as_strided.redispatch(CPU_KEYS, tensor, shape, stride, value.storage_offset())
        return make(value)

    def written(self) -> list[Tensor]:
        """Return the arguments that the operator writes to."""
        found = []
        for at in self.kind.written:
            name = self.kind.names[at]
            value = (
                self.kwargs[name] if name in self.kwargs else (self.args[at] if at < len(self.args) else None)
            )
            found += [each for each in tree_leaves(value) if on_device(each)]
        return found

    def take_resized(self) -> None:
        """Give arguments for results the memory that the CPU's kernel has resized."""
        for tensor in self.written():
            low = next(low for own, low in self.back.values() if own is tensor)
            moved = low.numel() and low.data_ptr() != tensor.data_ptr()
            if low.shape != tensor.shape or low.stride() != tensor.stride() or moved:
                make(low, into=tensor)


def _fallback(operator: Any, *args: Any, **kwargs: Any) -> Any:
    kind = kind_of(operator)
    if kind.is_view:
        return operator.redispatch(CPU_KEYS, *args, **kwargs)
    call = _Call(kind, args, kwargs)
    low_args = [call.down(each) for each in call.args]
    low_kwargs = {name: call.down(each) for name, each in kwargs.items()}
    if call.on_host:
        if kind.name not in BY_INDEX:
            message = (
                f"{kind.name}: Expected all tensors to be on the same device, but found at least two "
                f"devices, sim:0 and cpu! (at {counts.place()})"
            )
            raise RuntimeError(message)
        if kind.name not in COUNTED_BEFORE:
            timeline.wait("index on the host")
    _wait_for_shape(kind, args, kwargs)
    counts.launched(kind.name)
    written = call.written()
    timeline.work(kind.name, blocks((call.args, kwargs)), blocks(written))
    out = operator(*low_args, **low_kwargs)
    if timeline.tape() is not None:
        timeline.tape().note(operator, low_args, low_kwargs, out, blocks((call.args, kwargs)))
    if written:
        call.take_resized()
    if isinstance(out, (list, tuple)):
        new = type(out)(
            [call.up(each) for each in part] if isinstance(part, (list, tuple)) else call.up(part)
            for part in out
        )
    else:
        new = call.up(out)
    _made(kind.name, new)
    return new


def _wait_for_shape(kind: Kind, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Count a wait where the host must know values of the device to go on."""
    if kind.name in WAITING:
        timeline.wait(kind.name)
    elif kind.name in BY_INDEX and kind.name not in COUNTED_BEFORE:
        indices = [each for each in tree_leaves(args[1]) if isinstance(each, Tensor)]
        are_masks = [each.dtype in (torch.bool, torch.uint8) for each in indices]
        # one number at the places of masks is a masked_fill
        fills = all(are_masks) and len(args) > 2 and args[2].numel() == 1
        if any(are_masks) and not fills:
            timeline.wait("index by a mask")
    elif kind.name == "aten::repeat_interleave.Tensor" and kwargs.get("output_size") is None:
        timeline.wait(kind.name)


_any = torch.library.Library("_", "IMPL")
_any.fallback(_fallback, "PrivateUse1")
_aten = torch.library.Library("aten", "IMPL")


def kernel(name: str, key: str = "PrivateUse1") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the device's kernel of an operator of torch."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _aten.impl(name, function, key)
        return function

    return register


# ---- memory


@kernel("empty.memory_format")
def _empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    form = memory_format
    if form is None or form == torch.preserve_format:
        form = torch.contiguous_format
    memory.check_room(math.prod(size) * (dtype or torch.get_default_dtype()).itemsize)
    cpu = torch.empty(size, dtype=dtype, device="cpu", memory_format=form)
    poison(cpu)
    return make(cpu)


@kernel("empty_strided")
def _empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    cpu = torch.empty_strided(size, stride, dtype=dtype, device="cpu")
    poison(cpu)
    return make(cpu)


@kernel("resize_")
def _resize(tensor: Tensor, size: Any, memory_format: Any = None) -> Tensor:
    cpu = alias(tensor)
    cpu.resize_(size)
    return make(cpu, into=tensor)


_set = memory._set


@kernel("set_.source_Storage_storage_offset")
def _set_storage(tensor: Tensor, storage: Any, offset: int, size: Any, stride: Any = ()) -> Tensor:
    return _set.redispatch(CPU_KEYS, tensor, storage, offset, size, stride)


@kernel("set_.source_Tensor")
def _set_tensor(tensor: Tensor, source: Tensor) -> Tensor:
    size, stride = list(source.shape), list(source.stride())
    storage = source.untyped_storage()
    return _set.redispatch(CPU_KEYS, tensor, storage, source.storage_offset(), size, stride)


@kernel("set_.source_Storage")
def _set_whole_storage(tensor: Tensor, storage: Any) -> Tensor:
    count = storage.nbytes() // tensor.element_size()
    return _set.redispatch(CPU_KEYS, tensor, storage, 0, [count], [1])


@kernel("set_")
def _set_nothing(tensor: Tensor) -> Tensor:
    return make(torch.empty(0, dtype=tensor.dtype), into=tensor)


@kernel("record_stream")
def _record_stream(tensor: Tensor, stream: Any) -> None:
    block = block_of(tensor)
    if block is not None:
        block.noted.add(getattr(stream, "stream_id", 0))


# tensors of CUDA, of torch_npu and of the CPU may take each other's places in `.data =`
for _key in ("PrivateUse1", "CPU"):
    _aten.impl("_has_compatible_shallow_copy_type", lambda left, right: True, _key)


# ---- copies


@kernel("_copy_from")
def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if target.device.type == "cpu":
        _to_host(source, target, non_blocking)
    elif source.device.type == "cpu":
        _from_host(source, target, non_blocking)
    else:
        counts.launched("copy")
        timeline.work("copy", blocks(source), blocks(target))
        low = [alias(target), alias(source)]
        if timeline.tape() is not None:
            copy = torch.ops.aten.copy_.default
            timeline.tape().note(copy, low, {}, low[0], blocks((source, target)))
        low[0].copy_(low[1])
    return target


_to_copy = torch.ops.aten._to_copy.default
_COMPOSITE = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)


@kernel("_to_copy")
def _moved(tensor: Tensor, *, device: Any = None, non_blocking: bool = False, **how: Any) -> Tensor:
    if not (non_blocking and device is not None and torch.device(device).type == "cpu"):
        return _to_copy.redispatch(_COMPOSITE, tensor, device=device, non_blocking=non_blocking, **how)
    # torch makes pinned memory for it; the copy arrives when the host has waited
    out = torch.empty(tensor.shape, dtype=how.get("dtype") or tensor.dtype, pin_memory=True)
    return out.copy_(tensor, non_blocking=True)


def _to_host(source: Tensor, target: Tensor, non_blocking: bool) -> None:
    timeline.refuse_in_recording("copy to the host")
    counts.launched("copy to host")
    counts.copied(source.numel() * source.element_size(), to_host=True)
    timeline.work("copy to host", blocks(source), [])
    value = alias(source)
    if non_blocking and target.is_pinned():
        timeline.send(target, value.to(target.dtype).expand(target.shape).clone(), to_host=True)
        poison(target)
        return
    timeline.wait("copy to pageable memory" if non_blocking else "copy to host")
    target.copy_(value)


def _from_host(source: Tensor, target: Tensor, non_blocking: bool) -> None:
    if timeline.tape() is not None:
        raise counts.fault("a copy from the host in a recording: a replay would copy what is there then")
    value = timeline.as_copied_now(source)
    counts.launched("copy from host")
    counts.copied(target.numel() * target.element_size(), to_host=False)
    timeline.work("copy from host", [], blocks(target))
    if non_blocking and source.is_pinned():
        timeline.send(source, value.clone(), to_host=False)
    else:
        timeline.wait("copy from pageable memory" if non_blocking else "copy from host")
    alias(target).copy_(value)


@kernel("_local_scalar_dense")
def _item(tensor: Tensor) -> Any:
    timeline.wait("item")
    counts.launched("item")
    counts.copied(tensor.element_size(), to_host=True)
    timeline.work("item", blocks(tensor), [])
    return alias(tensor).item()
