"""vLLM as a `RolloutEngine`."""

from __future__ import annotations

from typing import Any

from hybridflow.rollout.base import GenerationRequest
from hybridflow.rollout.remote.engine import PushedEngine
from hybridflow.rollout.vllm.sampling import vllm_params, vllm_problem


class VLLMEngine(PushedEngine):
    """A vLLM with weights that are pushed."""

    def cannot(self, request: GenerationRequest) -> str | None:
        """Why vLLM cannot serve it."""
        facts = self._facts
        return vllm_problem(
            request.sampling, max_log_probs=facts["max_log_probs"], temperature_only=facts["temperature_only"], texts=self.texts
        )

    def params(self, request: GenerationRequest) -> dict[str, Any]:
        """Keyword arguments of vllm's SamplingParams."""
        return vllm_params(request, self.eos_token_ids)
