"""A pretended device beside the host: its tensors say "meta" and have values; each wait for it is noted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from hybridflow.distributed import accelerators, cuda
from hybridflow.rollout.native import engine as engine_module

ATEN = torch.ops.aten


class Far(Tensor):
    """A tensor of the device; its values lie in `near`, which only the device touches."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> Far:
        far: Far = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            near.shape,
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device="meta",
        )
        far.near = near
        return far

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of the device")

    def data_ptr(self) -> int:
        return self.near.data_ptr()


class FarDevice(TorchDispatchMode):
    """The device. It counts operations, and waits: for the newest event, for an older one, or at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.waits: list[str] = []
        self.newest: Any = None
        device = self

        class Event:
            def record(self, stream: object = None) -> None:
                self.stream = stream
                device.newest = self

            def synchronize(self) -> None:
                device.waits.append("newest" if device.newest is self else "older")

        module = SimpleNamespace(Event=Event, current_stream=lambda device: ("stream of", device))
        row = replace(accelerators.features("cuda"), device="meta")
        monkeypatch.setitem(accelerators._BUILT_IN, "meta", row)
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        monkeypatch.setattr(engine_module, "free_memory", lambda device: 2**20)
        monkeypatch.setattr(engine_module, "kernel_problem", lambda *facts: None)
        monkeypatch.setattr(engine_module, "varlen_kernel", lambda: self.kernel)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = func.overloadpacket
        if kind in (ATEN.is_pinned, ATEN._pin_memory):
            return args[0] if kind is ATEN._pin_memory else False
        if kwargs.get("pin_memory"):  # torch locks no page where it sees no accelerator
            kwargs = {**kwargs, "pin_memory": False}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Far)]
        to_here = torch.device(kwargs.get("device") or "cpu").type == "meta"
        if not inputs and not to_here:
            return func(*args, **kwargs)
        if cuda._waits(func, args, kwargs):
            self.waits.append(str(func))
        if not func.is_view and kind is not ATEN._unsafe_view:  # those do nothing on the device
            self.operations[str(func)] += 1
        away = kind in (ATEN._to_copy,) and kwargs.get("device") is not None and not to_here
        away |= kind is ATEN.copy_ and not isinstance(args[0], Far)
        if to_here:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        near_args, near_kwargs = tree_map(_near, (args, kwargs))
        result = func(*near_args, **near_kwargs)
        if away:
            return result
        known = {id(far.near): far for far in inputs}  # what was changed in place stays the same tensor

        def far(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return known[id(leaf)] if id(leaf) in known else Far(leaf)

        return tree_map(far, result)

    def kernel(self, query: Tensor, keys: Tensor, values: Tensor, *bounds: Any, **how: Any) -> Tensor:
        """Attend over blocks, which is one operation."""
        self.operations["varlen"] += 1
        (query, keys, values), how = tree_map(_near, ((query, keys, values), how))
        with _disable_current_modes():
            return Far(attend_over_blocks(query, keys, values, **how))

    def move(self, module: nn.Module) -> None:
        """Move a module to the device."""
        for part in module.modules():
            for name, parameter in list(part._parameters.items()):
                if parameter is not None:
                    part._parameters[name] = nn.Parameter(Far(parameter.detach()), requires_grad=False)
            for name, buffer in list(part._buffers.items()):
                if buffer is not None:
                    part._buffers[name] = Far(buffer)


def attend_over_blocks(query: Tensor, keys: Tensor, values: Tensor, *bounds: Any, **how: Any) -> Tensor:
    """Attend as the kernel of CUDA does: lengths and blocks come in tensors, whatever the bounds say."""
    rows = []
    for row, length in enumerate(how["seqused_k"].tolist()):
        blocks = how["block_table"][row].long()
        key, value = (x[blocks].flatten(0, 1)[:length].transpose(0, 1) for x in (keys, values))
        attended = scaled_dot_product_attention(
            query[row][:, None], key, value, scale=how["scale"], enable_gqa=how["enable_gqa"]
        )
        rows.append(attended[:, 0])
    return torch.stack(rows)


def _near(leaf: Any) -> Any:
    return leaf.near if isinstance(leaf, Far) else leaf
