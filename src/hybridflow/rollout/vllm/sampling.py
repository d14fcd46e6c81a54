"""Translation of sampling parameters for vLLM, or why it cannot serve them, and of what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hybridflow.rollout.base import GenerationRequest, SamplingParams
from hybridflow.rollout.remote.runner import Piece

LOWEST_TEMPERATURE = 0.01
"""vLLM replaces lower temperatures by others."""
LARGEST_BIAS = 100.0
_SEEDS = 1 << 63


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


def with_our_end(piece: Piece) -> Piece:
    """Return the piece, as a failure where vLLM ended the response for another reason than we have."""
    if piece.finish in (None, "stop", "length"):
        return piece
    return replace(piece, finish="error", stop_reason=None, error=f"vllm ended it with {piece.finish!r}")
