"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft: y = W·x + s·B·A·x, W frozen, B zero at the start.

    settings ──add_lora──► adapters in place, base frozen ──(meta: to_empty, init_lora)──► train
    adapters_off(model): the base alone, for the reference         fold, plain_state: W + s·B·A, for export

Adapters are in the model's compute dtype, as every other parameter: the optimizer has their float32 masters,
all parameters of a sharded block have one dtype, and rollout and training multiply the same numbers.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers.pytorch_utils import Conv1D

from hybridflow.config.model import ModelConfig
from hybridflow.distributed.shards import is_absent, local, own_slices
from hybridflow.errors import ModelError, install_extra
from hybridflow.models.adapters.adapter_folder import (
    AdapterFile,
    base_quantization,
    read_adapter,
    read_adapter_config,
)
from hybridflow.models.adapters.dropout import DropoutLinear, TokenKeys
from hybridflow.models.experts.layers import num_experts
from hybridflow.models.nf4 import NF4Linear
from hybridflow.models.policy import PolicyModel
from hybridflow.models.value import ValueModel
from hybridflow.protocol.randomness import generator

logger = logging.getLogger(__name__)

ADAPTER = "default"
"""The name under which peft has the one adapter."""
ALL_LINEAR = "all-linear"
_PART = re.compile(rf"\.lora_[AB]\.{ADAPTER}(\.weight)?$")


@dataclass(frozen=True)
class LoraSettings:
    """The layers that get adapters, and the adapters' size."""

    rank: int
    alpha: int = 16
    """Numerator of the factor alpha / rank of the adapters' output."""
    target_modules: str | tuple[str, ...] = ALL_LINEAR
    """Whole names or last parts of linear layers, a regular expression, or `all-linear`."""
    exclude_modules: str | tuple[str, ...] | None = None
    """Layers that get no adapter, written in the same way."""
    adapter_path: str | None = None
    """Folder of an adapter in peft's format, whose rank, layers and weights are used instead."""
    seed: int = 0
    """Seed of A's first values and of dropout, which are the same on every rank and in every process."""
    dropout: float = 0.0
    """Share of the adapters' inputs that is dropped in updates (`adapters/dropout.py`)."""
    quantization: str | None = None
    """How the weights of the base's linear layers are held: nf4 (`models/nf4.py`), or None: as they are."""

    @property
    def largest_rank(self) -> int:
        """Largest rank of all layers; ModelError where `adapter_path` cannot be read."""
        if self.adapter_path is None:
            return self.rank
        config = read_adapter_config(self.adapter_path)
        ranks: list[int] = [config["r"], *(config.get("rank_pattern") or {}).values()]
        return max(ranks)

    @classmethod
    def from_config(cls, config: ModelConfig, *, seed: int = 0) -> LoraSettings | None:
        """Return the settings of a model's keys (`lora_rank` and others), or None to train all weights."""
        if config.lora_rank == 0 and config.lora_adapter_path is None:
            return None
        targets = _frozen(config.target_modules)
        assert targets is not None
        exclude = _frozen(config.exclude_modules)
        path = config.lora_adapter_path
        how = (config.lora_dropout, config.quantization)
        return cls(config.lora_rank, config.lora_alpha, targets, exclude, path, seed, *how)


def _frozen(names: str | list[str] | None) -> str | tuple[str, ...] | None:
    if isinstance(names, list):
        return tuple(names)
    return names


def add_lora(model: PolicyModel | ValueModel, settings: LoraSettings) -> None:
    """Put adapters beside linear layers, in place, and freeze the base; a value head is still trained whole.

    Call this before the model is sharded. If the model is on the meta device, call `init_lora` once it has
    memory; otherwise that is done here. With `quantization` the weights of all linear layers but the head
    are quantized. Raises ModelError for targets that are no linear layers of the model (the message
    lists its own), for an adapter folder that does not fit, for a model that cannot be quantized, and if peft
    is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise ModelError(
            f"model.lora_rank and model.lora_adapter_path need peft: {install_extra('lora')}"
        ) from error
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ModelError(
            "LoRA does not go together with tensor parallelism: set fsdp_config.tensor_parallel_size=1 or "
            "model.lora_rank=0"
        )
    root, prefix = _root(model)
    # linear layers by name, without the output head, whose weight is used without calling it
    head = None
    if hasattr(root, "get_output_embeddings"):
        head = root.get_output_embeddings()
    found = (
        (name, module) for name, module in root.named_modules() if isinstance(module, (nn.Linear, Conv1D))
    )
    layers = {f"{prefix}{name}": module for name, module in found if module is not head}
    if model.vision is not None:  # the tower has none
        inside = set(model.text.modules())
        layers = {name: layer for name, layer in layers.items() if layer in inside}
    sizes: dict[str, Any] = {"r": settings.rank, "lora_alpha": settings.alpha}
    if settings.adapter_path is None:
        chosen = _targets(layers, settings)
    else:
        file = read_adapter(settings.adapter_path)
        held = base_quantization(settings.adapter_path)
        if held != settings.quantization:
            logger.warning(
                "the adapter %s was trained over a base with quantization=%s and is read over one with "
                "quantization=%s, which gives other log-probs: model.quantization=%s gives those of its run",
                settings.adapter_path,
                held or "null",
                settings.quantization or "null",
                held or "null",
            )
        sizes = file.settings
        chosen = _layers_of(file, layers)
    kinds = {isinstance(layers[name], Conv1D) for name in chosen}
    if len(kinds) > 1:
        raise ModelError(
            "LoRA cannot mix Conv1D and Linear layers in one adapter: name layers of one kind in "
            "model.target_modules"
        )
    config = peft.LoraConfig(
        **sizes,
        target_modules=[name.removeprefix(prefix) for name in chosen],
        fan_in_fan_out=kinds == {True},
        base_model_name_or_path=_whereabouts(model),
    )
    root.requires_grad_(False)
    # peft rewrites the targets of a model that it knows to store experts otherwise than its files do
    bare = nn.Module()
    for name, child in root.named_children():
        bare.add_module(name, child)
    with torch.device("meta"):  # its own first draw would move the global random stream
        peft.inject_adapter_in_model(config, bare)
    for name, child in bare.named_children():
        root.add_module(name, child)
    root.peft_config = {ADAPTER: config}
    if num_experts(model.config):
        logger.info(
            "LoRA: experts and routers get no adapters and stay as they are, because they are no linear "
            "layers; %d linear layers get one",
            len(chosen),
        )
    adapted = adapted_layers(model)
    assert set(adapted) == set(chosen), (
        f"peft adapted {sorted(set(adapted) ^ set(chosen))[:3]} otherwise than asked"
    )
    config.lora_dropout = settings.dropout  # after peft has put none into its layers
    keys = TokenKeys(settings.seed)
    for name, layer in adapted.items():
        if settings.dropout:
            layer.lora_A[ADAPTER] = DropoutLinear(layer.lora_A[ADAPTER], name, settings.dropout, keys)
        weight = layer.base_layer.weight
        for part in (layer.lora_A, layer.lora_B):
            part.to(weight.dtype)
            part.to_empty(device=weight.device)
    if settings.quantization is not None:  # after peft, which looks at weights
        quantize_base(model, layers)
    if model.device.type != "meta":
        init_lora(model, settings)


def quantize_base(model: PolicyModel | ValueModel, layers: Mapping[str, nn.Module]) -> None:
    """Hold the weights of linear layers, given by their names, in NF4, in place.

    Raises ModelError for a model with experts, pictures or linear layers of another class than torch's.
    """
    odd = sorted({type(layer).__name__ for layer in layers.values() if type(layer) is not nn.Linear})
    what = ""
    if num_experts(model.config):
        what = "experts, which are no linear layers"
    elif model.vision is not None:
        what = "a part that reads pictures"
    elif odd or not layers:
        what = f"linear layers of another class than torch's ({', '.join(odd) or 'none is'})"
    if what:
        raise ModelError(
            f"model.quantization=nf4: {type(_root(model)[0]).__name__} has {what}; leave quantization out"
        )
    for name, layer in layers.items():
        assert isinstance(layer, nn.Linear)
        NF4Linear.replace(layer, f"{name}.weight")


@torch.no_grad()
def init_lora(model: PolicyModel | ValueModel, settings: LoraSettings) -> None:
    """Give the adapters their first values: those of `adapter_path`, or A uniform within 1/√in and B zero.

    A is drawn by the seed and the layer's name. Each rank computes its own shard, without messages.
    """
    tensors: Mapping[str, Tensor] = {}
    if settings.adapter_path is not None:
        tensors = read_adapter(settings.adapter_path).tensors
    for name, layer in adapted_layers(model).items():
        a = layer.lora_A[ADAPTER].weight
        b = layer.lora_B[ADAPTER].weight
        if is_absent(a):
            continue
        if tensors:
            first = tensors[f"{name}.lora_A"]
            second = tensors[f"{name}.lora_B"]
        else:
            first = first_a(tuple(a.shape), settings.seed, name)
            second = torch.zeros(b.shape)
        for own, value in ((a, first), (b, second)):
            if own.shape != value.shape:
                raise ModelError(
                    f"adapter {settings.adapter_path}: {name} has a part of {tuple(value.shape)} there and "
                    f"of {tuple(own.shape)} here"
                )
            local(own).copy_(value[own_slices(own)])


def first_a(shape: tuple[int, ...], seed: int, layer: str) -> Tensor:
    """Return the first values of a layer's A [rank, in], float32: uniform within 1/√in, by seed and layer."""
    draw = torch.rand(shape, generator=generator(seed, f"first adapter of {layer}"))
    return (2 * draw - 1) / math.sqrt(shape[1])


def load_with_peft(policy: PolicyModel, folder: Path) -> None:
    """Put the adapter of a folder into a plain policy with peft's own loader, as other readers of it will."""
    import peft

    peft.PeftModel.from_pretrained(policy.hf, str(folder), autocast_adapter_dtype=False)


def has_adapters(model: nn.Module) -> bool:
    """Return whether the model has adapters."""
    return any(_PART.search(name) for name, _ in model.named_parameters())


def adapted_layers(model: PolicyModel | ValueModel) -> dict[str, Any]:
    """Return peft's layers by the name of the linear layer in the causal language model."""
    root, prefix = _root(model)
    return {f"{prefix}{name}": module for name, module in root.named_modules() if _adapted(module)}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Switch the adapters off inside the context, for passes without gradients: the base answers."""
    layers = [module for module in model.modules() if _adapted(module)]
    _switch(layers, enabled=False)
    try:
        yield
    finally:
        _switch(layers, enabled=True)


def _adapted(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


def _switch(layers: list[Any], *, enabled: bool) -> None:
    for layer in layers:
        # peft switches gradients as well, and on for all: what was frozen must stay so
        flags = [(parameter, parameter.requires_grad) for parameter in layer.parameters()]
        layer.enable_adapters(enabled)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def is_adapter(name: str) -> bool:
    """Return whether a parameter's name is that of a part of an adapter."""
    return _PART.search(name) is not None


def adapter_part(name: str) -> str:
    """Return `LAYER.lora_A` or `LAYER.lora_B` for an adapter parameter's name in a policy."""
    return name.removeprefix("hf.").removesuffix(f".{ADAPTER}.weight")


def base_name(name: str) -> str:
    """Return a base parameter's name in the model without adapters, which is also its name in the files."""
    return name.replace(".base_layer.", ".")


def saved_names(model: nn.Module) -> frozenset[str] | None:
    """Return the entries of a model's state that are saved: those that the base's folder lacks.

    None means all of them, for a model without adapters.
    """
    names = [name for name, _ in model.named_parameters()]
    if not any(is_adapter(name) for name in names):
        return None
    return frozenset(name for name in names if is_adapter(name) or not name.startswith(("hf.", "backbone.")))


def fold(weight: Tensor, a: Tensor, b: Tensor, scaling: float, *, transposed: bool = False) -> Tensor:
    """Return W + s·B·A in float32 or better.

    weight [out, in] ([in, out] if `transposed`), a [rank, in], b [out, rank]. Tensors that are sharded alike
    give a result that is sharded like the weight, and of a whole weight (NF4) a whole one.
    """
    kind = torch.promote_types(weight.dtype, torch.float32)
    if isinstance(a, DTensor):
        a = a.redistribute(placements=[Replicate()] * a.device_mesh.ndim)
    if transposed and isinstance(b, DTensor):
        b = b.redistribute(placements=[Replicate()] * b.device_mesh.ndim)
    change = scaling * (b.to(kind) @ a.to(kind))
    if transposed:
        change = change.T
    if isinstance(change, DTensor) and not isinstance(weight, DTensor):
        change = change.full_tensor()
    return weight.to(kind) + change


@dataclass(frozen=True)
class PlainEntry:
    """An entry of the state of the plain model that computes what the model with adapters does."""

    tensor: Tensor
    """The base's tensor, whose shape and dtype the folded one has; of a quantized weight without memory."""
    layer: Any = None
    """peft's layer around it, or None where nothing is folded into the tensor."""
    quantized: NF4Linear | None = None
    """The layer that holds the base's tensor in NF4, or None where `tensor` has it."""

    @torch.no_grad()
    def value(self, *, folded: bool = True) -> Tensor:
        """Return the tensor with its adapter folded in, if `folded`; it is sharded where the base is."""
        tensor = self.tensor
        if self.quantized is not None:
            tensor = self.quantized.weight
        if self.layer is None or not folded:
            return tensor
        a, b = _parts(self.layer)
        whole = fold(tensor, a, b, self.layer.scaling[ADAPTER], transposed=self.layer.fan_in_fan_out)
        return whole.to(tensor.dtype)


def plain_state(model: PolicyModel | ValueModel) -> dict[str, PlainEntry]:
    """Return the state of the model without adapters, by the names it had before `add_lora`."""
    path = "backbone"
    if isinstance(model, PolicyModel):
        path = "hf"
    layers = {
        f"{path}.{name}.weight": layer for name, layer in _root(model)[0].named_modules() if _adapted(layer)
    }
    named = ((base_name(name), tensor) for name, tensor in model.state_dict().items() if not is_adapter(name))
    found = {name: PlainEntry(tensor, layers.get(name)) for name, tensor in named}
    for name, layer in quantized_layers(model).items():
        shape = torch.empty(layer.out_features, layer.in_features, dtype=layer.dtype, device="meta")
        found[name] = PlainEntry(shape, layers.get(name), layer)
    return found


def quantized_layers(model: nn.Module) -> dict[str, NF4Linear]:
    """Return the layers in NF4 by the name of their weight in the model without adapters."""
    return {
        base_name(f"{name}.weight"): layer
        for name, layer in model.named_modules()
        if isinstance(layer, NF4Linear)
    }


@torch.no_grad()
def fold_adapters(model: PolicyModel | ValueModel) -> None:
    """Fold the adapters into the base in place, which makes it a plain model."""
    root, _ = _root(model)
    for name, layer in [(name, module) for name, module in root.named_modules() if _adapted(module)]:
        value = PlainEntry(layer.base_layer.weight, layer).value()
        if isinstance(layer.base_layer, NF4Linear):
            layer.base_layer.restore(value)
        else:
            layer.base_layer.weight.copy_(value)
        root.set_submodule(name, layer.base_layer)
    for alone in quantized_layers(root).values():
        alone.restore(alone.weight)
    del root.peft_config


def adapter_tensors(model: PolicyModel | ValueModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters by `LAYER.lora_A` and `LAYER.lora_B`, in the compute dtype, sharded or whole."""
    for name, layer in adapted_layers(model).items():
        a, b = _parts(layer)
        yield from ((f"{name}.lora_A", a), (f"{name}.lora_B", b))


def _parts(layer: Any) -> tuple[Tensor, Tensor]:
    """Return A and B in the compute dtype, which is the base's; their shards in training may be wider."""
    base = layer.base_layer
    dtype = base.dtype if isinstance(base, NF4Linear) else base.weight.dtype
    return layer.lora_A[ADAPTER].weight.to(dtype), layer.lora_B[ADAPTER].weight.to(dtype)


def adapter_config(model: PolicyModel | ValueModel) -> Any:
    """Return the adapters as a peft LoraConfig; its targets are last parts of names where these suffice."""
    root, _ = _root(model)
    config = copy(root.peft_config[ADAPTER])
    chosen = set(adapted_layers(model))
    short = {name.rsplit(".", 1)[-1] for name in chosen}
    meant = {name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] in short}
    config.target_modules = sorted(chosen)
    if len(meant) == len(chosen):
        config.target_modules = sorted(short)
    config.exclude_modules = None
    config.inference_mode = True
    config.task_type = "CAUSAL_LM"
    return config


def _whereabouts(model: PolicyModel | ValueModel) -> str | None:
    """Return where the base came from: a hub name, or the absolute path of a folder."""
    name = str(model.config.name_or_path or "")
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return str(folder.resolve())
    return name or None


def _root(model: PolicyModel | ValueModel) -> tuple[Any, str]:
    """Return the module that gets adapters, and the prefix of its layers' names in the language model."""
    if isinstance(model, PolicyModel):
        return model.hf, ""
    return model.backbone, f"{model.backbone.base_model_prefix}."


def _targets(layers: Mapping[str, nn.Module], settings: LoraSettings) -> list[str]:
    """Return the names of the layers that get an adapter, sorted."""
    wanted = settings.target_modules
    exclude = settings.exclude_modules
    chosen: set[str] = set()
    if wanted == ALL_LINEAR:
        chosen = set(layers)
    else:
        for each in _listed(wanted):
            found = _matching(each, layers)
            if not found:
                raise ModelError(
                    f"model.target_modules: {each!r} is no linear layer that can have an adapter. "
                    f"{_offer(layers)}"
                )
            chosen |= found
    for each in _listed(exclude):
        chosen -= _matching(each, layers)
    if not chosen:
        raise ModelError(
            f"model.exclude_modules={exclude!r} leaves no layer of model.target_modules={wanted!r}. "
            f"{_offer(layers)}"
        )
    return sorted(chosen)


def _listed(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if isinstance(names, str):
        return (names,)
    return names or ()


def _matching(wanted: str, layers: Iterable[str]) -> set[str]:
    """Return the layers with this name or last parts of a name, else those that the expression matches."""
    named = {name for name in layers if name == wanted or name.endswith(f".{wanted}")}
    if named:
        return named
    try:
        return {name for name in layers if re.fullmatch(wanted, name)}
    except re.error as error:
        raise ModelError(
            f"model.target_modules or exclude_modules: {wanted!r} is no layer and no regular expression: "
            f"{error}"
        ) from error


def _offer(layers: Iterable[str]) -> str:
    kinds = dict.fromkeys(name.rsplit(".", 1)[-1] for name in layers)
    return (
        f"Linear layers of this model: {', '.join(kinds)} (whole names look like "
        f"{next(iter(layers), 'none')!r}), or {ALL_LINEAR!r}"
    )


def _layers_of(file: AdapterFile, layers: Mapping[str, nn.Module]) -> list[str]:
    """Return the layers that an adapter folder has adapters for; ModelError for one that the model lacks."""
    names = sorted({name.rsplit(".", 1)[0] for name in file.tensors})
    odd = [name for name in names if name not in layers]
    if odd:
        raise ModelError(
            f"adapter {file.path} is for {len(odd)} layers that this model has not, such as {odd[0]!r}. "
            f"{_offer(layers)}"
        )
    return names
