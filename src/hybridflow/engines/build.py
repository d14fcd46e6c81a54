"""From a model's keys to an engine: on one rank the model as it is, on several its shards.

one rank        files ─► whole model ─► adapters ─► engine several ranks   meta device ─► tensor parallel ─►
adapters ─► shards ─► memory ─► own slices of the files ─► engine
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from hybridflow.config.fsdp import FSDPConfig
from hybridflow.config.model import OptimConfig
from hybridflow.distributed.mesh import EngineMesh, ParallelSizes, engine_mesh
from hybridflow.distributed.process_group import max_over
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.engines.fsdp.offload import ActivationOffload
from hybridflow.engines.fsdp.sharding import shard, widen_trained
from hybridflow.errors import HybridFlowError, ModelError
from hybridflow.models.blocks import compile_blocks, decoder_blocks
from hybridflow.models.build import build_policy, build_value, resolve_dtype
from hybridflow.models.lora import LoraSettings, add_lora, init_lora
from hybridflow.models.probe_twin import probe_twin
from hybridflow.models.sharded_load import MetaModel, load_weights, materialise, meta_model
from hybridflow.models.tensor_parallel import apply_tensor_parallel
from hybridflow.models.value import ValueModel

Kind = Literal["policy", "value"]


def build_engine(
    kind: Kind,
    model: dict[str, Any],
    *,
    name: str,
    optim: OptimConfig | None,
    total_steps: int = 0,
    grad_clip: float | None = None,
    max_nonfinite_steps: int = 3,
    dump_dir: Path | None = None,
    fsdp: FSDPConfig = FSDPConfig(),  # noqa: B008  (frozen, as are the sizes)
    sizes: ParallelSizes = ParallelSizes(),  # noqa: B008
    activation_offload: bool = False,
    lora: LoraSettings | None = None,
) -> FSDPEngine:
    """The engine of a policy or a value model; `model` holds the arguments of `build_policy`, and without
    `optim` nothing is trained.

    With more than one rank, all ranks of the process group build it together. Raises ModelError as
    `build_policy` does.
    """
    device = torch.device(model["device"])
    settings = {key: value for key, value in model.items() if key not in ("device", "dtype")}
    dtype = (
        model.get("dtype", "auto")
        if fsdp.mixed_precision.param_dtype == "auto"
        else fsdp.mixed_precision.param_dtype
    )
    mesh = None if sizes.world_size == 1 else engine_mesh(sizes, device.type)
    narrow: dict[str, torch.dtype] = {}
    if mesh is None:
        module = (build_policy if kind == "policy" else build_value)(device=device, dtype=dtype, **settings)
        if lora is not None:
            add_lora(module, lora)
        if optim is None:
            module.requires_grad_(False)
        blocks = decoder_blocks(module) if fsdp.use_torch_compile or activation_offload else []
    else:
        probe = settings.pop("probe", True)
        meta = meta_model(kind, dtype=resolve_dtype(dtype, device), **settings)
        if probe:
            asked = {name: bool(settings.get(name, False)) for name in ("trust_remote_code", "use_liger")}
            _probe_together(meta, device, mesh, **asked)
        module, blocks = meta.module, decoder_blocks(meta.module)
        narrow = _shard(meta, blocks, mesh, fsdp, device, trained=optim is not None, lora=lora)
    if fsdp.use_torch_compile:
        compile_blocks(module, blocks)
    return FSDPEngine(
        module,
        name=name,
        optim=optim,
        total_steps=total_steps,
        grad_clip=grad_clip,
        max_nonfinite_steps=max_nonfinite_steps,
        dump_dir=dump_dir,
        fsdp=fsdp,
        mesh=mesh,
        device=device,
        narrow=narrow,
        activations=ActivationOffload(module, blocks) if activation_offload else None,
    )


def _shard(
    meta: MetaModel,
    blocks: list[nn.Module],
    mesh: EngineMesh,
    fsdp: FSDPConfig,
    device: torch.device,
    *,
    trained: bool,
    lora: LoraSettings | None,
) -> dict[str, torch.dtype]:
    """Cut a model on the meta device and read this rank's part of it; returns the dtypes of parameters with
    wider shards.
    """
    module = meta.module
    if mesh.tensor is not None:
        apply_tensor_parallel(module, mesh.tensor)
    if lora is not None:
        add_lora(module, lora)
    if not trained:
        module.requires_grad_(False)
    module.sequence_group = mesh.sequence_group
    narrow = widen_trained(module)
    shard(module, blocks, mesh, fsdp, meta.dtype)
    materialise(module, torch.device("cpu") if fsdp.offload_policy else device, device)
    load_weights(meta)
    if lora is not None:
        init_lora(module, lora)
    if isinstance(module, ValueModel):
        nn.init.zeros_(module.head.weight)
        nn.init.zeros_(module.head.bias)
    return narrow


def _probe_together(
    meta: MetaModel, device: torch.device, mesh: EngineMesh, *, trust_remote_code: bool, use_liger: bool
) -> None:
    """Rank 0 probes the architecture; ModelError on all ranks where it cannot be trained."""
    failure: HybridFlowError | None = None
    if mesh.rank == 0:
        try:
            probe_twin(meta.config, device, trust_remote_code=trust_remote_code, use_liger=use_liger)
        except HybridFlowError as error:
            failure = error
    if max_over([int(failure is not None)])[0]:
        raise failure or ModelError(
            f"{type(meta.module).__name__}: rank 0 found that this architecture cannot be trained here"
        )
