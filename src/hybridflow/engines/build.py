"""Build a training engine from a model's keys: with the whole model on one rank, with its shards on several.

one rank        files ─► whole model ─► adapters ─► engine
one, in 4 bits  meta device ─► adapters ─► memory ─► files, each weight quantized as it is read ─► engine
several ranks   meta device ─► stages ─► tensor parallel ─► adapters ─► expert parallel ─► shards ─► memory
                ─► own slices of the files, of weights in 4 bits the whole ─► engine
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hybridflow.config.model import FSDPConfig, OptimConfig
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.distributed.mesh import EngineMesh, engine_mesh
from hybridflow.distributed.process_group import max_over
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.engines.fsdp.offload import ActivationOffload
from hybridflow.engines.fsdp.sharding import shard, widen_trained
from hybridflow.engines.pipeline import PipelineEngine
from hybridflow.errors import HybridFlowError, ModelError
from hybridflow.models.adapters.lora import LoraSettings, add_lora, init_lora
from hybridflow.models.blocks import compile_blocks, decoder_blocks
from hybridflow.models.experts.layers import routers
from hybridflow.models.files.build import Kind, build_policy, resolve_dtype
from hybridflow.models.files.build_score import build_score
from hybridflow.models.files.probe_architecture import probe_architecture
from hybridflow.models.files.sharded_load import MetaModel, load_weights, materialise, meta_model
from hybridflow.models.parallel.expert_parallel import apply_expert_parallel
from hybridflow.models.parallel.stages import Stage
from hybridflow.models.parallel.tensor_parallel import apply_tensor_parallel
from hybridflow.models.policy import PolicyModel
from hybridflow.models.score import ScoreModel
from hybridflow.models.value import HEAD_NAMES, ValueModel
from hybridflow.models.vision import settle_tower

if TYPE_CHECKING:
    from hybridflow.engines.megatron.engine import MegatronEngine

_BUILDERS: dict[Kind, Callable[..., PolicyModel | ValueModel]] = {
    "policy": build_policy,
    "value": partial(build_score, "value"),
    "score": partial(build_score, "score"),
    "token_score": partial(build_score, "token_score"),
}


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
    fsdp: FSDPConfig = FSDPConfig(),  # noqa: B008  (frozen, as is the layout)
    layout: ParallelLayout = ParallelLayout(),  # noqa: B008
    activation_offload: bool = False,
    lora: LoraSettings | None = None,
    freeze_vision_tower: bool = False,
    strategy: str = "fsdp2",
) -> FSDPEngine | MegatronEngine:
    """Build the engine of a policy, a value model or a reward model.

    `model` holds the arguments of `build_policy`; without `optim` nothing is trained. With more than one
    rank, all ranks of the process group build it together. `strategy` megatron is for a policy or a value
    model over several ranks, with none of the settings that its keys exclude. Raises ModelError as
    `build_policy` does, for a reward model without a head that is not to be trained, and for what
    megatron-core does not serve.
    """
    device = torch.device(model["device"])
    settings = {key: value for key, value in model.items() if key not in ("device", "dtype")}
    dtype = str(model.get("dtype", "auto"))
    if fsdp.mixed_precision.param_dtype != "auto":
        dtype = fsdp.mixed_precision.param_dtype
    mesh: EngineMesh | None = None
    quantized = lora is not None and lora.quantization is not None
    if layout.world_size > 1:
        if quantized and layout.pp > 1:
            raise ModelError(
                f"{name}: model.quantization=nf4 with pipeline_parallel_size={layout.pp}: each rank holds "
                "all weights in 4 bits; set one of the two to its default"
            )
        mesh = engine_mesh(layout, device.type)
    updates = {
        "name": name,
        "optim": optim,
        "total_steps": total_steps,
        "grad_clip": grad_clip,
        "max_nonfinite_steps": max_nonfinite_steps,
        "dump_dir": dump_dir,
        "mesh": mesh,
        "device": device,
    }
    if strategy == "megatron":
        assert kind in ("policy", "value") and mesh is not None, "other models and single ranks are PyTorch's"
        updates["ring"] = fsdp.context_parallel == "ring"
        updates["parts"] = fsdp.virtual_pipeline_parallel_size
        return _megatron_engine(kind, resolve_dtype(dtype, device), mesh, settings, updates)
    compute_dtypes: dict[str, torch.dtype] = {}
    blocks: list[nn.Module] = []
    stage: Stage | None = None
    if mesh is None:
        if quantized:
            module = _quantized_module(kind, resolve_dtype(dtype, device), device, settings, lora)
        else:
            module = _BUILDERS[kind](device=device, dtype=dtype, **settings)
        settle_tower(module.vision, module.config, freeze=freeze_vision_tower)
        if lora is not None and not quantized:
            add_lora(module, lora)
        if optim is None:
            module.requires_grad_(False)
        if fsdp.use_torch_compile or activation_offload:
            blocks = decoder_blocks(module)
    else:
        meta = _probed_meta(kind, resolve_dtype(dtype, device), device, mesh, settings)
        module = meta.module
        settle_tower(module.vision, module.config, freeze=freeze_vision_tower, always_reads=True)
        stage = _stage_of(module, mesh, fsdp)
        blocks = decoder_blocks(module) if stage is None else stage.layers
        trained = optim is not None
        compute_dtypes = _parallelize(
            meta, blocks, mesh, fsdp, device, trained=trained, lora=lora, stage=stage
        )
    if isinstance(module, ScoreModel) and module.new_head and optim is None:
        raise ModelError(
            f"model {model['path']!r} has no head ({', '.join(HEAD_NAMES)}) in its files, so all scores "
            "would be 0: give a reward model, which `hybridflow reward-model` makes of this one"
        )
    # compile the blocks if asked; else let a policy in training report the load of its experts
    if fsdp.use_torch_compile:
        compile_blocks(module, blocks)
    elif isinstance(module, PolicyModel) and (optim is not None) and routers(module.hf):
        module.follow_routes()
    make: Callable[..., FSDPEngine] = partial(FSDPEngine, module)
    if stage is not None:
        make = partial(PipelineEngine, stage)
    return make(
        fsdp=fsdp,
        compute_dtypes=compute_dtypes,
        activations=ActivationOffload(stage or module, blocks) if activation_offload else None,
        **updates,
    )


def _quantized_module(
    kind: Kind, dtype: torch.dtype, device: torch.device, settings: dict[str, Any], lora: LoraSettings | None
) -> PolicyModel | ValueModel:
    """Return a module with adapters over a base in NF4, whose weights are quantized one after the other as
    they are read.
    """
    assert lora is not None, "the weights that train are not quantized"
    meta = _probed_meta(kind, dtype, device, None, settings)
    add_lora(meta.module, lora)
    _load(meta, device, device, lora)
    return meta.module


def _load(
    meta: MetaModel,
    home: torch.device,
    device: torch.device,
    lora: LoraSettings | None,
    absent: Collection[nn.Parameter] = (),
) -> None:
    """Give a model on the meta device memory at `home`, its buffers on `device`, and its numbers."""
    materialise(meta.module, home, device, absent)
    load_weights(meta)
    if lora is not None:
        init_lora(meta.module, lora)
    if isinstance(meta.module, ValueModel) and "head.weight" not in meta.sources:
        for parameter in meta.module.head.parameters():
            nn.init.zeros_(parameter)


def _megatron_engine(
    kind: Kind, dtype: torch.dtype, mesh: EngineMesh, settings: dict[str, Any], updates: dict[str, Any]
) -> MegatronEngine:
    """Build a model's engine in megatron-core, which is imported here, for those who ask for it."""
    from hybridflow.engines.megatron.engine import MegatronEngine

    described = {
        key: value for key, value in settings.items() if key not in ("probe", "gradient_checkpointing")
    }
    meta = meta_model(kind, dtype=dtype, **described)
    recompute = updates["optim"] is not None and bool(settings.get("gradient_checkpointing", False))
    return MegatronEngine(meta, recompute=recompute, **updates)


def _stage_of(module: PolicyModel | ValueModel, mesh: EngineMesh, fsdp: FSDPConfig) -> Stage | None:
    """Return this rank's stage of a model on the meta device, or None where no model is cut into stages."""
    if mesh.column is None:
        return None
    stages = mesh.layout.pp
    parts = stages * fsdp.virtual_pipeline_parallel_size
    return Stage(module, stage=mesh.column.stage, stages=stages, parts=parts)


def _parallelize(
    meta: MetaModel,
    blocks: list[nn.Module],
    mesh: EngineMesh,
    fsdp: FSDPConfig,
    device: torch.device,
    *,
    trained: bool,
    lora: LoraSettings | None,
    stage: Stage | None,
) -> dict[str, torch.dtype]:
    """Cut a model on the meta device, or one stage of it, among the ranks, and read this rank's part.

    The order matters:

        tensor parallelism   cuts dense layers, whose slices adapters, experts and FSDP then see
        LoRA                 on the cut layers, so that its matrices are cut alike
        expert parallelism   takes experts out of what FSDP gathers
        stage                says which parameters are absent here
        FSDP                 shards what is left, block by block
        weights              memory comes last: no rank ever holds the whole model

    Returns the compute dtypes of the parameters whose shards are wider, by name.
    """
    module = meta.module
    if mesh.tensor is not None:
        apply_tensor_parallel(module, mesh.tensor, but_experts=mesh.experts is not None)
    if lora is not None:
        add_lora(module, lora)
    experts: list[nn.Module] = []
    if mesh.experts is not None:
        same_tokens = None if mesh.tensor is None else mesh.tensor.get_group()
        experts = apply_expert_parallel(module, mesh.experts, same_tokens)
    if not trained:
        module.requires_grad_(False)
    module.sequence_group = mesh.sequence_group
    module.column = mesh.column
    module.sequence_ring = fsdp.context_parallel == "ring"
    if isinstance(module, PolicyModel):
        module.is_sharded = True
    if stage is not None and trained:
        stage.check_trained()
    compute_dtypes = widen_trained(module)
    absent: set[nn.Parameter] = set()
    if stage is not None:
        absent = stage.absent
    shard(module, blocks, mesh, fsdp, meta.dtype, experts=experts, root=stage, absent=absent)
    home = device
    if fsdp.offload_policy:
        home = torch.device("cpu")
    _load(meta, home, device, lora, absent)
    return compute_dtypes


def _probed_meta(
    kind: Kind, dtype: torch.dtype, device: torch.device, mesh: EngineMesh | None, settings: dict[str, Any]
) -> MetaModel:
    """Make the model on the meta device; with `probe` in its settings, the default, it is probed."""
    described = {key: value for key, value in settings.items() if key != "probe"}
    meta = meta_model(kind, dtype=dtype, **described)
    if settings.get("probe", True):
        asked = {name: bool(settings.get(name, False)) for name in ("trust_remote_code", "use_liger")}
        _probe_together(meta, device, mesh, **asked)
    return meta


def _probe_together(
    meta: MetaModel,
    device: torch.device,
    mesh: EngineMesh | None,
    *,
    trust_remote_code: bool,
    use_liger: bool,
) -> None:
    """Probe the architecture on rank 0; raise ModelError on all ranks if it cannot be trained."""
    failure: HybridFlowError | None = None
    if mesh is None or mesh.rank == 0:
        try:
            probe_architecture(
                meta.config,
                device,
                trust_remote_code=trust_remote_code,
                use_liger=use_liger,
                in_stages=mesh is not None and mesh.column is not None,
            )
        except HybridFlowError as error:
            failure = error
    if max_over([int(failure is not None)])[0]:
        raise failure or ModelError(
            f"{type(meta.module).__name__}: rank 0 found that this architecture cannot be trained here"
        )
