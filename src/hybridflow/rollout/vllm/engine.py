"""vLLM as a `RolloutEngine`, and the translation of sampling parameters for it, or why it cannot serve
them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from hybridflow.errors import RolloutError
from hybridflow.rollout.base import GenerationRequest, SamplingParams
from hybridflow.rollout.remote.engine import PushedEngine
from hybridflow.rollout.remote.runner import EngineRunner, ResponsePiece
from hybridflow.weight_sync.wire.receiver import NOTHING, Part, Weights

LOWEST_TEMPERATURE = 0.01
"""vLLM replaces lower temperatures by others."""
LARGEST_BIAS = 100.0
_SEEDS = 1 << 63


class AdapterRunner(EngineRunner, Protocol):
    """An `EngineRunner` of vLLM, which also takes LoRA adapters alone, over base weights pushed before."""

    def has_base(self) -> bool:
        """Return whether adapters may be pushed: all workers have base weights."""

    def push(
        self, weights: Weights, version: int, part: Part = "whole", adapter: dict[str, Any] | None = None
    ) -> None:
        """Push weights as `EngineRunner.push` does. `adapter`: the content of adapter_config.json."""


class ExtendedRunner(AdapterRunner, Protocol):
    """The runner of a vLLM whose workers have `Extension`."""

    def version(self) -> int:
        """Return the lowest version of the weights in the workers."""
        return min(int(answer["version"]) for answer in self._call("hybridflow_version"))

    def has_base(self) -> bool:
        """Return whether adapters may be pushed: all workers have base weights."""
        return all(answer["has_base"] for answer in self._call("hybridflow_version"))

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


def vllm_problem(
    sampling: SamplingParams, *, vocabulary: int, max_log_probs: int, temperature_only: bool, texts: bool
) -> str | None:
    """Return why a vLLM engine cannot serve these parameters, or None.

    `vocabulary`: number of the model's tokens. `max_log_probs`: how many log-probs it gives for a token.
    `temperature_only`: its log-probs are those of the whole distribution, whatever limits or shifts it.
    `texts`: it has a tokenizer.
    """
    if not sampling.takes_argmax and sampling.temperature < LOWEST_TEMPERATURE:
        return (
            f"temperature={sampling.temperature}: vllm has none between 0 and {LOWEST_TEMPERATURE}; use "
            "greedy, or a higher one"
        )
    if sampling.top_log_probs > max_log_probs:
        return (
            f"top_log_probs={sampling.top_log_probs}: this vllm gives at most {max_log_probs}; set "
            f"actor_rollout_ref.rollout.engine_kwargs.vllm.max_logprobs={sampling.top_log_probs}"
        )
    for token, bias in sampling.logit_bias:
        if not 0 <= token < vocabulary:
            return f"logit_bias holds token id {token}, and the model's vocabulary is 0..{vocabulary - 1}"
        if not abs(bias) <= LARGEST_BIAS:
            return f"logit_bias of {bias}: vllm takes biases from -{LARGEST_BIAS:.0f} to {LARGEST_BIAS:.0f}"
    if sampling.stop and not texts:
        return "stop has texts, and this vllm has no tokenizer (skip_tokenizer_init): use stop_token_ids"
    shifted = (
        sampling.limits_tokens
        or sampling.repetition_penalty != 1
        or bool(sampling.logit_bias)
        or sampling.min_tokens > 0
    )
    if shifted and not temperature_only:
        return (
            "top_k, top_p, min_p, repetition_penalty, logit_bias or min_tokens: this vllm's log-probs would "
            "be those of what they leave, and training computes those of the whole distribution; start it "
            "with VLLM_USE_V2_MODEL_RUNNER=0 and without speculation, or leave them out"
        )
    return None


def vllm_params(request: GenerationRequest, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's SamplingParams; end tokens are the run's, not the folder's."""
    sampling = request.sampling
    ends = () if sampling.ignore_eos else tuple(eos_token_ids)
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "temperature": 0.0 if sampling.takes_argmax else sampling.temperature,
        "seed": request.seed % _SEEDS,
        "ignore_eos": True,
        "stop_token_ids": sorted({*ends, *sampling.stop_token_ids}),
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": sampling.top_log_probs,
    }
    if not sampling.takes_argmax:
        params |= {"top_k": max(sampling.top_k, 0), "top_p": sampling.top_p, "min_p": sampling.min_p}
    if sampling.logit_bias:
        params["logit_bias"] = dict(sampling.logit_bias)
    if sampling.stop:
        params |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
    return params


def with_our_end(piece: ResponsePiece) -> ResponsePiece:
    """Return the piece, as a failure where vLLM ended the response for another reason than we have."""
    if piece.finish in (None, "stop", "length"):
        return piece
    return replace(piece, finish="error", stop_reason=None, error=f"vllm ended it with {piece.finish!r}")
