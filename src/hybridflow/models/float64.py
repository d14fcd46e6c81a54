"""Float64 models for tests of invariance: Hugging Face code that asks for float32 gets float64.

Norms, rotary embeddings, routers and softmaxes are written with `.float()` or `dtype=torch.float32`, which
would leave a float64 model with float32's rounding. Each layer's forward runs in a mode that widens them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


class _Float64Mode(TorchFunctionMode):
    """A mode in which every request for float32 becomes one for float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        wide = {key: _wider(value) for key, value in (kwargs or {}).items()}
        return func(*(_wider(value) for value in args), **wide)


def _wider(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    return value


def compute_in_float64(hf: PreTrainedModel) -> None:
    """Make a float64 model compute in float64 throughout; a second call changes nothing.

    Its layers are wrapped one by one, so that recomputation by gradient checkpointing, which calls a layer
    alone, does the same.
    """
    if hf._can_set_experts_implementation():
        hf.set_experts_implementation("eager")  # the grouped matrix product of experts has no float64 kernel
    for module in hf.modules():
        if isinstance(module, (PreTrainedModel, GradientCheckpointingLayer)) and module is not hf:
            _wrap(module)


def recompute_in_float64() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts in which a checkpointed layer is computed first, and again in the backward pass.

    Where transformers checkpoints inside of a layer's forward, the mode around it has ended by then.
    """
    return nullcontext(), _Float64Mode()


def _wrap(module: nn.Module) -> None:
    forward = module.forward
    if getattr(forward, "in_float64", False):
        return

    @functools.wraps(forward)
    def widened(*args: Any, **kwargs: Any) -> Any:
        with _Float64Mode():
            return forward(*args, **kwargs)

    widened.in_float64 = True  # type: ignore[attr-defined]
    module.forward = widened
