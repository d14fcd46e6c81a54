"""The decoder blocks of a model, which are sharded, gathered and compiled one at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from hybridflow.errors import ModelError
from hybridflow.models.attention.layouts import ATTENTION_NAME, attention
from hybridflow.models.policy import PolicyModel, choose_attention
from hybridflow.models.value import ValueModel

_UNCOMPILED = f"{ATTENTION_NAME}_uncompiled"


def decoder_blocks(model: PolicyModel | ValueModel) -> list[nn.Module]:
    """Return the blocks in the order of the forward pass; ModelError for an architecture without a list."""
    backbone: Any = model.text  # a tower has blocks too, perhaps as many
    whole = {str(name) for name in getattr(backbone, "_no_split_modules", None) or ()}
    lists = list(_lists(backbone, backbone.config.get_text_config().num_hidden_layers))
    for blocks in lists:
        if all(
            type(block).__name__ in whole or isinstance(block, GradientCheckpointingLayer) for block in blocks
        ):
            return blocks
    if lists:
        return lists[0]
    raise ModelError(
        f"{type(backbone).__name__} (model_type {backbone.config.model_type!r}) keeps its layers in no "
        "list, so it cannot be sharded or compiled by layer: train it on one rank "
        "(trainer.n_gpus_per_node=1) with use_torch_compile=false"
    )


def tables_and_heads(model: nn.Module) -> set[str]:
    """Return the names of the parameters of embeddings and of the output head, tied ones under each name."""
    parts: list[nn.Module] = [part for part in model.modules() if isinstance(part, nn.Embedding)]
    head = getattr(model, "head", None)
    if isinstance(head, nn.Module):
        parts.append(head)
    weights = {id(parameter) for part in parts for parameter in part.parameters(recurse=False)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in weights}


def _lists(backbone: nn.Module, count: int) -> Iterator[list[nn.Module]]:
    for module in backbone.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            yield list(module)


def compile_blocks(model: PolicyModel | ValueModel, blocks: Sequence[nn.Module]) -> None:
    """Compile each block's forward in place; names of parameters, hooks and checkpointing stay as they are.

    Attention stays outside of the graphs: how rows are packed differs between micro-batches.
    """
    AttentionInterface.register(_UNCOMPILED, _uncompiled_attention())
    hf: Any
    if isinstance(model, PolicyModel):
        hf = model.hf
    else:
        hf = model.backbone
    choose_attention(hf, _UNCOMPILED)
    for block in blocks:
        block.forward = torch.compile(block.forward, dynamic=True)


@functools.cache
def _uncompiled_attention() -> Callable[..., Any]:
    """Return one function for all models: a new one would cause recompilation."""
    wrapped: Callable[..., Any] = torch.compiler.disable(attention)
    return wrapped
