"""megatron-core on a CPU: its functions speak of CUDA, and here are made to speak of the CPU.

What a function says is in its code: the attribute `torch.cuda` (PyTorch has `torch.cpu` with the same current
device, streams and events), `device="cuda"`, and names of tensor types such as `torch.cuda.FloatTensor`. Code
objects with the other word take the place of those. Random states of the device are those of the CPU already.
"""

from __future__ import annotations

import inspect
import sys
from types import CodeType, FunctionType
from typing import Any

import torch

PACKAGE = "megatron.core"
_NAMES = {"cuda": "cpu", "is_cuda": "is_cpu"}
_seen: set[int] = set()


def speak_of_the_cpu() -> None:
    """Change all modules of megatron-core that are imported; a function is changed once."""
    for name, module in list(sys.modules.items()):
        if module is not None and name.split(".")[:2] == PACKAGE.split("."):
            _change(vars(module).values(), name)
    random = sys.modules[f"{PACKAGE}.tensor_parallel.random"]
    # recomputed layers draw nothing: models are trained without dropout
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()  # type: ignore[attr-defined]
    random._set_cuda_rng_state = lambda *args, **kwargs: None  # type: ignore[attr-defined]
    # counts of tokens for experts are in main memory already: no stream copies them, nothing waits for one
    dispatcher = sys.modules[f"{PACKAGE}.transformer.moe.token_dispatcher"].MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = torch.cpu.current_stream()
    dispatcher._maybe_update_cuda_sync_point = lambda self, point: None
    # a name that is imported from Transformer Engine, and is read without it too
    vars(sys.modules[f"{PACKAGE}.transformer.moe.moe_utils"]).setdefault("te_general_gemm", None)


def _change(values: Any, module: str) -> None:
    for value in list(values):
        value = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else value
        if id(value) in _seen or getattr(value, "__module__", None) != module:
            continue
        _seen.add(id(value))
        if isinstance(value, FunctionType):
            value.__code__ = _spoken(value.__code__)
        elif isinstance(value, type):
            _change((_function(each) for each in vars(value).values()), module)


def _function(member: Any) -> Any:
    """Return the function of a method, class method, static method or property."""
    return getattr(member, "__func__", None) or getattr(member, "fget", None) or member


def _spoken(code: CodeType) -> CodeType:
    """Return code that says `cpu` wherever this one says `cuda`."""
    return code.replace(
        co_names=tuple(_NAMES.get(name, name) for name in code.co_names),
        co_consts=tuple(map(_constant, code.co_consts)),
    )


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _spoken(value)
    if isinstance(value, tuple):
        return tuple(map(_constant, value))
    if isinstance(value, str):
        return "cpu" if value == "cuda" else value.replace("torch.cuda.", "torch.")
    return value
