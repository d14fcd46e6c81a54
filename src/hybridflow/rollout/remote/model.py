"""The model of an engine that holds its own weights, and the ranks that it generates for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hybridflow.distributed.device import shown_as
from hybridflow.distributed.process_group import ReplicaRanks, gather_objects, rank_and_size
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


@dataclass(frozen=True)
class ReplicaPlace:
    """The replica that a rank belongs to: its ranks have one engine, which the first of them starts."""

    number: int = 0
    """Number of the replica."""
    replicas: int = 1
    leads: bool = True
    """Whether this rank has the engine."""
    visible: Mapping[str, str] = field(default_factory=dict)
    """Environment variables by which a process sees the devices of the replica's ranks, and no others."""

    @classmethod
    def of_this_rank(cls, size: int, device: torch.device) -> ReplicaPlace:
        """Return the place of this rank, which computes on `device`, among replicas of `size` ranks.

        All ranks call it together; ConfigError where they cannot be divided so.
        """
        ranks = ReplicaRanks.of_this_rank(size)
        rank, world = rank_and_size()
        shown = gather_objects(shown_as(device), ranks.group) if size > 1 else [shown_as(device)]
        visible: dict[str, str] = {}
        for each in shown:
            if each is not None:
                variable, name = each
                visible[variable] = f"{visible[variable]},{name}" if variable in visible else name
        return cls(rank // size, world // size, ranks.rank == 0, visible)


def cache_bytes_per_token(shape: Any, dtype: str) -> int:
    """Return the bytes of one token's keys and values; `shape`: the configuration of the text model."""
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return int(shape.num_hidden_layers * 2 * heads * width * getattr(torch, dtype).itemsize)
