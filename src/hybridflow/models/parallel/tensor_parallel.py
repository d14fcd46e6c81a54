"""Tensor parallelism: dense layers are cut among the ranks of a mesh, by transformers' published plan.

A `colwise` layer holds some of its outputs on each rank, the `rowwise` layer after it some of its inputs;
between the two, attention sees the rank's own heads and an MLP the rank's own columns, and the rowwise
layer's outputs are summed over ranks. Everything else (embeddings, norms, output head) is whole on every rank
and gets the whole gradient there.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from transformers import PretrainedConfig, PreTrainedModel

from hybridflow.errors import ModelError
from hybridflow.models.experts.layers import expert_modules
from hybridflow.models.policy import PolicyModel
from hybridflow.models.value import ValueModel
from hybridflow.models.vision import reads_media

Style = Literal["colwise", "rowwise", "colwise_gather", "rowwise_split", "partial_norm"]
"""The way a module is cut: its outputs; its inputs; outputs that are gathered at once; inputs that come
whole; or not at all, while its inputs are.
"""

KEY = "fsdp_config.tensor_parallel_size"

# transformers' names, older ones too
_STYLES: dict[str, Style] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "colwise_gather",
    "colwise_rep": "colwise_gather",
    "rowwise_split_input": "rowwise_split",
    "rowwise_rep": "rowwise_split",
    "replicated_with_grad_allreduce": "partial_norm",
}


def apply_tensor_parallel(
    model: PolicyModel | ValueModel, mesh: DeviceMesh, *, but_experts: bool = False
) -> None:
    """Cut the dense layers of `model` among the ranks of the one-dimensional `mesh`, into DTensors.

    `but_experts` leaves experts to `apply_expert_parallel`. Materialised weights must be the same on all
    ranks; those on the meta device are only given their placements. Raises ModelError for an architecture
    without a plan or with parts that cannot be cut, and for sizes that do not divide.
    """
    assert mesh.ndim == 1, f"tensor parallelism takes a mesh of one dimension, got {mesh}"
    backbone: Any = model.hf.base_model if isinstance(model, PolicyModel) else model.backbone
    styles = tensor_styles(backbone, but_experts=but_experts)
    check_sizes(backbone, styles, mesh.size())
    for name, style in styles.items():
        parallelize_module(backbone.get_submodule(name), mesh, _parallel_style(style), src_data_rank=None)
    for parent in _colwise_parents(styles):
        backbone.get_submodule(parent).register_forward_pre_hook(
            functools.partial(_shared_input, mesh), with_kwargs=True
        )


def tensor_styles(hf: PreTrainedModel, *, but_experts: bool = False) -> dict[str, Style]:
    """Return the style of each module that is cut, by its name in `hf`; `but_experts` passes experts over.

    Raises ModelError where the architecture cannot be cut.
    """
    backbone: Any = hf.base_model
    prefix = ""
    if backbone is not hf:
        prefix = next(name for name, module in hf.named_modules() if module is backbone) + "."
    if reads_media(hf.config):
        raise _cannot(backbone, "it reads pictures, and only models of text are cut so far")
    plan = _published_plan(backbone)
    experts = expert_modules(backbone)
    if experts and not but_experts:
        raise _cannot(
            backbone,
            "its experts are not cut. In training, ranks of tensor parallelism can share them: set "
            "fsdp_config.expert_parallel_size to 2 or more",
        )
    modules = {
        name: module
        for name, module in backbone.named_modules()
        if _generic(name) in plan and name not in experts
    }
    styles: dict[str, Style] = {}
    for name, module in modules.items():
        published = plan[_generic(name)]
        style = _STYLES.get(published)
        if style is None or (style != "partial_norm" and not isinstance(module, nn.Linear)):
            raise _cannot(
                backbone,
                f"its plan asks for {published!r} of {name} ({type(module).__name__}), which is not "
                "implemented",
            )
        styles[prefix + name] = style
    for name, _ in backbone.named_parameters():
        if _generic(name) in plan and name.rpartition(".")[0] not in experts:
            raise _cannot(
                backbone,
                f"its plan asks for {plan[_generic(name)]!r} of the parameter {name}, which is not "
                "implemented",
            )
    _check_covered(backbone, {name.removeprefix(prefix): style for name, style in styles.items()})
    return styles


def tensor_slices(hf: PreTrainedModel, *, but_experts: bool = False) -> dict[str, int]:
    """Return the dimension along which each parameter is cut, by its name in `hf`; whole ones are absent.

    Rank r of n holds the r-th of n equal slices. A rowwise layer's bias is whole: it follows the sum.
    """
    slices: dict[str, int] = {}
    for name, style in tensor_styles(hf, but_experts=but_experts).items():
        if style.startswith("colwise"):
            slices |= {f"{name}.{leaf}": 0 for leaf, _ in hf.get_submodule(name).named_parameters()}
        elif style.startswith("rowwise"):
            slices[f"{name}.weight"] = 1
    return slices


def check_sizes(hf: PreTrainedModel, styles: dict[str, Style], ranks: int, *, key: str = KEY) -> None:
    """Raise ModelError for sizes that `ranks` does not divide, naming them and the numbers that would do.

    `styles` are `tensor_styles(hf)`.
    """
    config: PretrainedConfig = hf.config.get_text_config()
    sizes: dict[str, int] = {}
    for name, style in styles.items():
        module = hf.get_submodule(name)
        if style == "colwise" and hasattr(hf.get_submodule(name.rpartition(".")[0]), "layer_idx"):
            sizes["num_attention_heads"] = config.num_attention_heads
            sizes["num_key_value_heads"] = (
                getattr(config, "num_key_value_heads", None) or config.num_attention_heads
            )
        elif isinstance(module, nn.Linear):
            size = module.in_features
            what = f"{_generic(name)} inputs"
            if style.startswith("colwise"):
                size = module.out_features
                what = f"{_generic(name)} outputs"
            if size == getattr(config, "intermediate_size", None):
                what = "intermediate_size"
            sizes[what] = size
    wrong = {name: size for name, size in sizes.items() if size % ranks}
    if wrong:
        largest = math.gcd(*sizes.values())
        fitting = [str(number) for number in range(1, min(largest, 2 * ranks) + 1) if largest % number == 0]
        raise ModelError(
            f"{key}={ranks} does not divide {', '.join(f'{name}={size}' for name, size in wrong.items())} "
            f"of this {config.model_type!r} model; set it to {' or '.join(fitting)}"
        )


def _published_plan(backbone: PreTrainedModel) -> dict[str, str]:
    """Return transformers' plan for modules and parameters inside blocks; `*` matches the number."""
    published = (
        getattr(backbone.config.get_text_config(), "base_model_tp_plan", None)
        or getattr(backbone, "_tp_plan", None)
        or {}
    )
    plan = {name: style for name, style in published.items() if "*" in name}
    if not plan:
        raise _cannot(backbone, "transformers publishes no plan for it")
    return plan


def _generic(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _cannot(backbone: PreTrainedModel, why: str) -> ModelError:
    return ModelError(
        f"{type(backbone).__name__} (model_type {backbone.config.model_type!r}) cannot be cut by tensor "
        f"parallelism: {why}. Set {KEY}=1; ulysses_sequence_parallel_size cuts sequences of any model"
    )


def _check_covered(backbone: PreTrainedModel, styles: dict[str, Style]) -> None:
    """Raise ModelError for a parameter between cut layers that the plan does not name."""
    for parent in _colwise_parents(styles):
        for name, _ in backbone.get_submodule(parent).named_parameters(prefix=parent):
            if name.rpartition(".")[0] not in styles:
                raise _cannot(backbone, f"its plan does not name {name}")


def _colwise_parents(styles: dict[str, Style]) -> list[str]:
    """Return the attentions and MLPs, whose forward feeds one input to several layers that are cut."""
    return list(
        dict.fromkeys(name.rpartition(".")[0] for name, style in styles.items() if style == "colwise")
    )


def _shared_input(
    mesh: DeviceMesh, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Hand all layers of `module` one DTensor, so that gradients are added up before they cross ranks."""
    whole = functools.partial(DTensor.from_local, placements=[Replicate()], run_check=False)
    if args and isinstance(args[0], Tensor):
        return (whole(args[0], mesh), *args[1:]), kwargs
    if isinstance(states := kwargs.get("hidden_states"), Tensor):
        return args, kwargs | {"hidden_states": whole(states, mesh)}
    return args, kwargs


def _parallel_style(style: Style) -> ParallelStyle:
    if style == "partial_norm":
        return _PartialNorm()
    if style == "colwise":
        return ColwiseParallel(output_layouts=Shard(-1))
    if style == "colwise_gather":
        return ColwiseParallel(output_layouts=Replicate())
    if style == "rowwise_split":
        return RowwiseParallel(input_layouts=Replicate())
    return RowwiseParallel(input_layouts=Shard(-1))


class _PartialNorm(ParallelStyle):
    """The style of a norm over a rank's own heads: equal weights, and the sum of their gradients."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        forward = module.forward

        @functools.wraps(forward)
        def with_summed_gradients(*args: Any, **kwargs: Any) -> Any:
            # looked up at each call, as sharding puts gathered parameters there for the time of a pass
            parameters: dict[str, Any] = dict(module._parameters)
            for name, parameter in parameters.items():
                if parameter is not None:
                    summed: Any = _SumGradient.apply(parameter, group)  # type: ignore[no-untyped-call]
                    module._parameters[name] = summed
            try:
                return forward(*args, **kwargs)
            finally:
                module._parameters.update(parameters)

        module.forward = with_summed_gradients
        return module


class _SumGradient(torch.autograd.Function):
    """Identity of a tensor that all ranks have, whose gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
