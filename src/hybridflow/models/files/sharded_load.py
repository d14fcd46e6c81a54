"""Loads a model that no rank holds whole: each reads its slices of parameters on the meta device.

    meta_model ─► placements (tensor parallel, adapters, shards) ─► materialise ─► load_weights

Buffers are real from the start: rotary frequencies are in no file. Where the files hold other names or shapes
than the model (experts that transformers fuses, renamed layers), every rank loads the model whole into CPU
memory and keeps its slices.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils.hub import cached_file

from hybridflow.distributed.shards import is_absent, local, own_slices
from hybridflow.errors import ModelError
from hybridflow.models.adapters.lora import base_name, quantized_layers
from hybridflow.models.files.build import (
    Kind,
    auto_class,
    checked_config,
    describe_model,
    enable_gradient_checkpointing,
    load_whole,
    refuse_odd_head,
    source_dtype,
    without_dropout,
    wrap,
)
from hybridflow.models.liger import patch_liger
from hybridflow.models.policy import PolicyModel
from hybridflow.models.value import HEAD_NAMES, ValueModel, is_head

logger = logging.getLogger(__name__)

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class MetaModel:
    """A model without memory for its parameters, and the places they come from."""

    module: PolicyModel | ValueModel
    config: PretrainedConfig
    sources: Mapping[str, tuple[str, ...]]
    """Names in the files by name in `module`; of tied weights there are several, and any will do."""
    where: str
    """Folder or hub name of the files."""
    dtype: torch.dtype
    """The compute dtype; weights are rounded to it as they are read, as they are on one rank."""
    direct: bool
    """Whether the architecture says that the files have the module's names and shapes."""
    load_whole: Callable[[], PreTrainedModel]


def meta_model(
    kind: Kind,
    path: str | Path,
    *,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    override_config: dict[str, Any] | None = None,
    gradient_checkpointing: bool = False,
    use_liger: bool = False,
) -> MetaModel:
    """Make the model of `path` with parameters of `dtype` on the meta device and buffers on the CPU.

    Raises ModelError as `build_policy` does.
    """
    config, where = checked_config(
        path, trust_remote_code=trust_remote_code, override_config=override_config, kind=kind
    )
    before = source_dtype(config, where)
    with parameters_on_meta():
        hf = auto_class(kind, config).from_config(
            config, dtype=dtype, attn_implementation="eager", trust_remote_code=trust_remote_code
        )
    hf.eval()
    logger.info("%s: %s", type(hf).__name__, describe_model(hf.config, dtype))
    hf.source_dtype = before
    if kind in ("policy", "value"):
        # read generation_config.json, where chat models have their end tokens, as `from_pretrained` does
        try:
            hf.generation_config = GenerationConfig.from_pretrained(where)
        except OSError:
            logger.debug("%s has no generation_config.json", where)
    without_dropout(hf)
    if use_liger:
        patch_liger(hf)
    direct = not get_model_conversion_mapping(hf, add_legacy=False) and not hasattr(
        config, "quantization_config"
    )
    if gradient_checkpointing:
        enable_gradient_checkpointing(hf)
    names: dict[int, list[str]] = {}
    for name, tensor in hf.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    module = wrap(kind, hf)
    in_files: Mapping[str, str] = {}
    head_name = getattr(module, "head_name", None)  # of a classifier
    if isinstance(module, ValueModel) and head_name is not None:
        in_files = _weight_files(where)
        module.new_head = not any(is_head(name) for name in in_files)
    sources: dict[str, tuple[str, ...]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if head_name is not None and name.startswith("head."):
            part = name.removeprefix("head.")
            if not module.new_head:
                sources[name] = tuple(f"{head}.{part}" for head in (head_name, *HEAD_NAMES))
        elif id(tensor) in names:
            sources[name] = tuple(names[id(tensor)])
    if head_name is not None:
        refuse_odd_head(hf, set(in_files).difference(*sources.values()), where)

    def whole() -> PreTrainedModel:
        return load_whole(path, "cpu", dtype, trust_remote_code, override_config, kind)

    return MetaModel(module, config, sources, where, dtype, direct, whole)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put every parameter that a module gets inside the context on the meta device.

    Ties stay, and buffers are made as usual.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def materialise(
    module: nn.Module, device: torch.device, buffers: torch.device, absent: Collection[nn.Parameter] = ()
) -> None:
    """Give the parameters unwritten memory on `device`, and move the buffers to `buffers`, where codes of NF4
    get unwritten memory; ties stay.

    `absent` parameters, which other stages of a pipeline hold, stay without memory.
    """
    kept = {owner: (dict(owner._parameters), dict(owner._buffers)) for owner in module.modules()}
    without = {id(parameter) for parameter in absent}
    module._apply(lambda each: each if id(each) in without else torch.empty_like(each, device=device))
    first: dict[int, nn.Parameter | None] = {}
    for owner, (parameters, own_buffers) in kept.items():
        for name, before in parameters.items():
            owner._parameters[name] = first.setdefault(id(before), owner._parameters[name])
        for name, buffer in own_buffers.items():
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = torch.empty_like(buffer, device=buffers)
            elif buffer is not None:
                owner._buffers[name] = buffer.to(buffers)


@torch.no_grad()
def load_weights(model: MetaModel) -> None:
    """Write this rank's slices of all weights; parameters in no file (adapters, a value head) stay unwritten.
    A weight in NF4 is quantized as it is read, so that no other is in memory beside it.

    Raises ModelError for weights that are missing, of another shape or not finite, and unreadable files.
    """
    wanted: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.module.state_dict(keep_vars=True).items():
        if base_name(name) in model.sources and not is_absent(tensor):
            wanted.setdefault(id(tensor), (base_name(name), tensor))
    quantized = quantized_layers(model.module)
    for name, each in quantized.items():
        wanted[id(each)] = (name, torch.empty(each.out_features, each.in_features, device="meta"))
    with ExitStack() as stack:
        read: Read | None = None
        if model.direct:
            read = _file_reader(model, list(wanted.values()), stack)
        if read is None:
            logger.info(
                "the files of %s hold other names than the model: it is loaded whole, then cut", model.where
            )
            read = _whole_reader(model.load_whole())
        for name, tensor in wanted.values():
            piece = local(tensor)
            if piece.numel() == 0:
                continue
            layer = quantized.get(name)
            where = own_slices(tensor) if layer is None else (slice(None), slice(None))
            value = read(model.sources[name], where).to(model.dtype)
            if value.is_floating_point() and not bool(value.isfinite().all()):
                raise ModelError(
                    f"model {model.where!r}: {model.sources[name][0]} holds NaN or infinity (read as "
                    f"{model.dtype})"
                )
            if layer is None:
                piece.copy_(value)
            else:
                layer.fill(value, name)


Read = Callable[[tuple[str, ...], tuple[slice, ...]], Tensor]
"""(names in the files, wanted slices) -> that part of the tensor, on the CPU."""


def _whole_reader(hf: PreTrainedModel) -> Read:
    state = hf.state_dict()
    return lambda names, where: state[names[0]][where]


def _file_reader(model: MetaModel, wanted: list[tuple[str, Tensor]], stack: ExitStack) -> Read | None:
    """Return a reader of slices of the files; None where a weight has another name or shape in them."""
    files = _weight_files(model.where)
    try:
        handles = {
            file: stack.enter_context(safe_open(file, framework="pt")) for file in sorted(set(files.values()))
        }
        for name, tensor in wanted:
            found = next((source for source in model.sources[name] if source in files), None)
            if found is None or tuple(handles[files[found]].get_slice(found).get_shape()) != tuple(
                tensor.shape
            ):
                return None
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"cannot load model {model.where!r}: {' '.join(str(error).split())[:400]}"
        ) from error

    def read(names: tuple[str, ...], where: tuple[slice, ...]) -> Tensor:
        name = next(source for source in names if source in files)
        value: Tensor
        if where:
            value = handles[files[name]].get_slice(name)[where]
        else:
            value = handles[files[name]].get_tensor(name)
        return value

    return read


def _weight_files(where: str) -> dict[str, str]:
    """Return the file of each tensor by its name; empty where there are no safetensors by the usual names."""
    index = _file(where, _INDEX)
    single = _file(where, _SINGLE)
    try:
        if single is not None:
            with safe_open(single, framework="pt") as opened:
                return dict.fromkeys(opened.keys(), single)
        if index is None:
            return {}
        weights: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"cannot load model {where!r}: {' '.join(str(error).split())[:400]}") from error
    paths = {name: _file(where, name) for name in set(weights.values())}
    missing = sorted(name for name, path in paths.items() if path is None)
    if missing:
        raise ModelError(
            f"cannot load model {where!r}: {_INDEX} names {len(missing)} files that are not there, the "
            f"first {missing[0]}"
        )
    return {tensor: str(paths[name]) for tensor, name in weights.items()}


def _file(where: str, name: str) -> str | None:
    """Return the local path of one of the model's files, downloaded for a hub name; None if there is none."""
    return cached_file(where, name, _raise_exceptions_for_missing_entries=False)
