"""SGLang as a `RolloutEngine`."""

from __future__ import annotations

from typing import Any

from hybridflow.rollout.base import GenerationRequest
from hybridflow.rollout.remote.engine import PushedEngine
from hybridflow.rollout.sglang.sampling import sglang_params, sglang_problem


class SGLangEngine(PushedEngine):
    """An SGLang server with weights that are pushed."""

    def cannot(self, request: GenerationRequest) -> str | None:
        """Return why SGLang cannot serve the request, or None."""
        return sglang_problem(request.sampling, vocabulary=self._facts["vocabulary"], texts=self.texts)

    def params(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the fields of /generate besides the prompt."""
        return sglang_params(request, self.eos_token_ids)
