"""Interface of a vLLM runner, which also takes LoRA adapters alone, over base weights pushed before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor

from hybridflow.rollout.push.receiver import Part
from hybridflow.rollout.remote.runner import Runner


class AdapterRunner(Runner, Protocol):
    """A `Runner` of vLLM."""

    def has_base(self) -> bool:
        """Return whether all workers have base weights, with or without adapters."""
        ...

    def push(
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        part: Part = "whole",
        adapter: dict[str, Any] | None = None,
    ) -> None:
        """Push weights to all workers and empty the prefix cache; RolloutError where they did not arrive.

        `adapter`: the content of adapter_config.json, for adapters.
        """
        ...
