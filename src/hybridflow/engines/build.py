"""From a model's keys to an engine: on one rank the model as it is, on several its shard of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from hybridflow.config.fsdp import FSDPConfig
from hybridflow.config.model import OptimConfig
from hybridflow.distributed.sizes import ParallelSizes
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.models.build import build_policy, build_value
from hybridflow.models.lora import LoraSettings, add_lora
from hybridflow.models.policy import PolicyModel
from hybridflow.models.value import ValueModel


def build_engine(
    kind: Literal["policy", "value"],
    model: dict[str, Any],
    *,
    name: str,
    optim: OptimConfig | None,
    total_steps: int = 0,
    grad_clip: float | None = None,
    max_nonfinite_steps: int = 3,
    dump_dir: Path | None = None,
    fsdp: FSDPConfig = FSDPConfig(),
    sizes: ParallelSizes = ParallelSizes(),
    activation_offload: bool = False,
    lora: LoraSettings | None = None,
) -> FSDPEngine:
    """The engine of a policy or a value model; `model` holds the arguments of `build_policy`, and without `optim` nothing is trained.

    With more than one rank, all ranks of the process group build it together. Raises ModelError as `build_policy` does.
    """
    module = _whole(kind, model, fsdp, lora)
    if optim is None:
        module.requires_grad_(False)
    return FSDPEngine(
        module,
        name=name,
        optim=optim,
        total_steps=total_steps,
        grad_clip=grad_clip,
        max_nonfinite_steps=max_nonfinite_steps,
        dump_dir=dump_dir,
    )


def _whole(kind: str, model: dict[str, Any], fsdp: FSDPConfig, lora: LoraSettings | None) -> PolicyModel | ValueModel:
    """The unsharded model, in the dtype that `mixed_precision.param_dtype` names, or else in its own."""
    param_dtype = fsdp.mixed_precision.param_dtype
    arguments = model if param_dtype == "auto" else {**model, "dtype": param_dtype}
    module = build_policy(**arguments) if kind == "policy" else build_value(**arguments)
    if lora is not None:
        add_lora(module, lora)
    return module
