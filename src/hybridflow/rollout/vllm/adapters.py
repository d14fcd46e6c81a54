"""What a vLLM runner can beside others: take LoRA adapters by themselves, over a base that was pushed before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor

from hybridflow.rollout.push.receiver import Part
from hybridflow.rollout.remote.runner import Runner


class AdapterRunner(Runner, Protocol):
    """A `Runner` of vLLM."""

    def has_base(self) -> bool:
        """Whether all workers have a base that waits for adapters, or has them."""
        ...

    def push(
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        part: Part = "whole",
        adapter: dict[str, Any] | None = None,
    ) -> None:
        """Weights to all workers, and the prefix cache emptied; RolloutError where they did not arrive.

        `adapter`: the content of adapter_config.json, of adapters.
        """
        ...
