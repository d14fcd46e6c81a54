"""A policy as an ordinary Hugging Face folder: config, safetensors, generation config, tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from hybridflow.models.policy import PolicyModel
from hybridflow.models.progress import without_progress_bars

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def save_hf(
    policy: PolicyModel,
    folder: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    state_dict: dict[str, Tensor] | None = None,
) -> Path:
    """Write the policy's weights, in their dtype, and its tokenizer to `folder`; `AutoModelForCausalLM` reads it anywhere.

    `state_dict` (names of `policy.state_dict()`) replaces the module's own tensors, for weights gathered from shards.
    """
    folder = Path(folder)
    weights = None if state_dict is None else {name.removeprefix("hf."): tensor for name, tensor in state_dict.items()}
    with without_progress_bars():
        policy.hf.save_pretrained(folder, state_dict=weights)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def save_config(policy: PolicyModel, folder: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> Path:
    """Write everything of the Hugging Face folder except the weights, which a checkpoint has already."""
    folder = Path(folder)
    policy.config.save_pretrained(folder)
    if policy.hf.generation_config is not None:
        policy.hf.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder
