"""Liger's Triton kernels for norms, gated layers and rotary positions in a loaded model.

Norms and gated layers of the model get another `forward`. Rotary positions are a function of the
architecture's module, so on CUDA all models of that architecture in the process use Liger's. Liger's losses
are not used: `models/heads/log_probs.py` computes log-probs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hybridflow.distributed.accelerators import features
from hybridflow.errors import ConfigError, ModelError, install_extra
from hybridflow.models.files.probe import difference, probe_log_probs, probe_tolerance
from hybridflow.models.policy import PolicyModel

PACKAGE = "liger_kernel"


def check_liger(device: torch.device) -> None:
    """Raise ConfigError if Liger's kernels cannot run on `device`, or are not installed."""
    if not features(device.type).triton:
        raise ConfigError(
            f"use_liger=true of a model on {device.type}: Liger's kernels are Triton programs, which run on "
            "CUDA only: leave use_liger out"
        )
    if find_spec(PACKAGE) is None:
        raise ConfigError(
            f"use_liger=true needs liger-kernel, which is not installed: {install_extra('liger')}, or leave "
            "use_liger out"
        )


def use_liger_kernels(policy: PolicyModel) -> None:
    """Give a model on CUDA Liger's kernels.

    Raises ModelError where Liger has none for it, or where its log-probs change by more than rounding.
    """
    before = probe_log_probs(policy)
    patch_liger(policy.hf)
    apart = difference(probe_log_probs(policy), before, policy.dtype)
    limit = probe_tolerance(policy.dtype)
    if not apart <= limit:  # also where it is nan
        raise ModelError(
            f"{type(policy.hf).__name__}: with Liger's kernels its log-probs differ by {apart:.3g} nats "
            f"from those without, and at most {limit:.3g} is allowed: leave use_liger out"
        )


def patch_liger(hf: PreTrainedModel) -> None:
    """Put Liger's kernels into a model, on the meta device too; ModelError where it has none."""
    from liger_kernel.transformers.monkey_patch import (
        MODEL_TYPE_TO_APPLY_LIGER_FN,
        _apply_liger_kernel_to_instance,
    )

    if hf.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ModelError(
            f"use_liger=true, and Liger has no kernels for model_type {hf.config.model_type!r}: leave "
            "use_liger out"
        )
    architecture = sys.modules[type(hf).__module__]
    before = dict(vars(architecture))
    _apply_liger_kernel_to_instance(model=hf, cross_entropy=False, fused_linear_cross_entropy=False)
    for name, plain in before.items():
        now = getattr(architecture, name)
        # classes, which models without use_liger are made of, and functions, which may be called on a CPU too
        if now is plain:
            continue
        if isinstance(plain, FunctionType):
            plain = _where_it_runs(now, plain)
        setattr(architecture, name, plain)


def has_liger(module: nn.Module) -> bool:
    """Return whether a part of the model computes with Liger's kernels."""
    return any(
        str(getattr(vars(part).get("forward"), "__module__", "")).startswith(PACKAGE)
        for part in module.modules()
    )


def _where_it_runs(theirs: Callable[..., Any], plain: Any) -> Callable[..., Any]:
    """Return a function that calls `theirs` for tensors where Triton runs and `plain` for all others."""
    plain = getattr(plain, "without_liger", plain)

    @functools.wraps(plain)
    def chosen(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if features(first.device.type).triton:
            return theirs(first, *args, **kwargs)
        return plain(first, *args, **kwargs)

    chosen.without_liger = plain  # type: ignore[attr-defined]
    return chosen
