"""The model that an engine with weights of its own generates with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ModelFacts:
    """The model whose weights will be pushed."""

    path: str
    """A Hugging Face folder or hub name: its configuration and tokenizer are read, its weights only with `load_format=auto`."""
    device: torch.device
    dtype: str
    """That in which the actor computes."""
    trust_remote_code: bool = False
    override_config: dict[str, Any] | None = None
    tokenizer: str | None = None
    """None: the model's folder has it, if it is needed."""
    lora_rank: int = 0
    """Largest rank of the actor's adapters; 0: it has none."""
