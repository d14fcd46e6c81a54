"""The model of an engine that holds its own weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hybridflow.models.files.build import load_config


@dataclass(frozen=True)
class ModelFacts:
    """The model whose weights will be pushed."""

    path: str
    """A Hugging Face folder or hub name; its weights are read with `load_format=auto` only."""
    device: torch.device
    dtype: str
    """Data type in which the actor computes."""
    trust_remote_code: bool = False
    override_config: dict[str, Any] | None = None
    tokenizer: str | None = None
    """Folder of the tokenizer; None where it is the model's."""
    lora_rank: int = 0
    """Rank of the actor's LoRA adapters, 0 without adapters."""

    def shape(self) -> Any:
        """Return the configuration of the text model."""
        config = load_config(
            self.path, trust_remote_code=self.trust_remote_code, override_config=self.override_config
        )
        return config.get_text_config()


def cache_bytes_per_token(shape: Any, dtype: str) -> int:
    """Return the bytes of one token's keys and values; `shape`: the configuration of the text model."""
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return int(shape.num_hidden_layers * 2 * heads * width * getattr(torch, dtype).itemsize)
