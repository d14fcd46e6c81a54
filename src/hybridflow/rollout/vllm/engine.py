"""vLLM as a `RolloutEngine`."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Protocol

from hybridflow.errors import RolloutError
from hybridflow.rollout.base import GenerationRequest
from hybridflow.rollout.push.receiver import NOTHING, Part, Weights
from hybridflow.rollout.remote.engine import PushedEngine
from hybridflow.rollout.remote.runner import Runner
from hybridflow.rollout.vllm.sampling import vllm_params, vllm_problem


class AdapterRunner(Runner, Protocol):
    """A `Runner` of vLLM, which also takes LoRA adapters alone, over base weights that were pushed before."""

    def version(self) -> int:
        """Return the lowest version of the weights in the workers."""
        return min(int(answer["version"]) for answer in self._call("hybridflow_version"))

    def has_base(self) -> bool:
        """Return whether adapters may be pushed: all workers have base weights."""
        return all(answer["has_base"] for answer in self._call("hybridflow_version"))

    def push(
        self, weights: Weights, version: int, part: Part = "whole", adapter: dict[str, Any] | None = None
    ) -> None:
        """Push weights as `Runner.push` does. `adapter`: the content of adapter_config.json, for adapters."""

    @abstractmethod
    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `Extension` in each worker and return their answers."""


class VLLMEngine(PushedEngine):
    """A vLLM with weights that are pushed."""

    runner: AdapterRunner

    def must_be_quantized(self, method: str) -> None:
        """Close the engine and raise RolloutError where no layer computes with quantised weights."""
        if not self._facts["quantized"]:
            self.close()
            raise RolloutError(
                f"actor_rollout_ref.rollout.quantization={method}: {self.runner.name} quantises no layer of "
                f"this model by it on {self._facts['device']}; try fp8_per_channel with dtype=bfloat16, or "
                "leave it out"
            )

    @property
    def has_base(self) -> bool:
        """Whether adapters may be pushed: the base came by `update_base` and is still there."""
        return self.runner.has_base()

    def update_weights(self, weights: Weights, version: int) -> None:
        """Push all weights as `PushedEngine` does; RolloutError where the engine takes adapters."""
        if self._facts["adapters"]:
            raise RolloutError(
                f"{self.runner.name} was started for adapters (rollout.lora_as_adapters): update_base, then "
                "update_adapters"
            )
        super().update_weights(weights, version)

    def update_base(self, weights: Weights) -> None:
        """Push the base weights, without which no adapters come; RolloutError as `update_weights`."""
        self._ready_for_weights()
        self.runner.push(weights, NOTHING, "base")

    def update_adapters(self, weights: Weights, version: int, adapter: dict[str, Any]) -> None:
        """Push LoRA adapters (`LAYER.lora_A`, `LAYER.lora_B`), by which the base becomes `version`.

        `adapter`: the content of adapter_config.json. RolloutError as `update_weights`, and without a base.
        """
        self._ready_for_weights()
        self.runner.push(weights, version, "adapters", adapter)
        self._confirm(version)

    def cannot(self, request: GenerationRequest) -> str | None:
        """Return why vLLM cannot serve the request, or None."""
        facts = self._facts
        return vllm_problem(
            request.sampling,
            vocabulary=facts["vocabulary"],
            max_log_probs=facts["max_log_probs"],
            temperature_only=facts["temperature_only"],
            texts=self.texts,
        )

    def params(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the keyword arguments of vLLM's SamplingParams."""
        return vllm_params(request, self.eos_token_ids)
