"""Requests to an OpenAI-compatible endpoint and its answers, as plain data.

The fields beyond OpenAI's own (`top_k`, `min_p`, `stop_token_ids`, `return_token_ids`, …) are vLLM's, which
`hybridflow serve` has too.
"""

from __future__ import annotations

import math
from typing import Any, cast

from hybridflow.errors import RolloutError
from hybridflow.rollout.base import FinishReason, GenerationOutput, GenerationRequest, SamplingParams

TOKEN_ID = "token_id:"
"""How vLLM writes a token as its id where its text would stand (`return_tokens_as_token_ids`)."""
SEED_BITS = (1 << 63) - 1
_FINISH = ("stop", "length", "abort")


def sampling_fields(sampling: SamplingParams, *, extended: bool) -> dict[str, Any]:
    """Return the sampling fields of a body; RolloutError for one that OpenAI lacks, unless `extended`."""
    fields: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": 0.0 if sampling.takes_argmax else sampling.temperature,
    }
    beyond: dict[str, Any] = {}
    if sampling.limits_tokens:
        if sampling.top_p < 1:
            fields["top_p"] = sampling.top_p
        if sampling.top_k > 0:
            beyond["top_k"] = sampling.top_k
        if sampling.min_p > 0:
            beyond["min_p"] = sampling.min_p
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.stop_token_ids:
        beyond["stop_token_ids"] = list(sampling.stop_token_ids)
    for name, default in (("repetition_penalty", 1.0), ("min_tokens", 0), ("ignore_eos", False)):
        if (value := getattr(sampling, name)) != default:
            beyond[name] = value
    if beyond and not extended:
        raise RolloutError(
            f"{', '.join(sorted(beyond))}: OpenAI's API has no such field; leave out, or set extended=True "
            "for vLLM's fields"
        )
    return {**fields, **beyond}


def completion_body(request: GenerationRequest, model: str, *, extended: bool) -> dict[str, Any]:
    """Return the body of POST /completions for one response to a prompt of token ids."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(request.prompt_token_ids),
        "seed": request.seed & SEED_BITS,
        "logprobs": sampling.top_log_probs,
        **sampling_fields(sampling, extended=extended),
    }
    if extended:
        body["return_token_ids"] = True
        if sampling.top_log_probs:
            body["return_tokens_as_token_ids"] = True
    return body


def read_completion(payload: dict[str, Any], request: GenerationRequest, version: int) -> GenerationOutput:
    """Return the output of the one choice in an answer.

    Log-probs are the server's own, nan where it gives none. Raises RolloutError where the answer has no token
    ids, or lists of different lengths.
    """
    choice = payload["choices"][0]
    log_probs = choice.get("logprobs") or {}
    names: list[str] = log_probs.get("tokens") or []
    ids = choice.get("token_ids")
    if ids is None and names and all(name.startswith(TOKEN_ID) for name in names):
        ids = [int(name.removeprefix(TOKEN_ID)) for name in names]
    if ids is None:
        raise RolloutError(
            "the server's answer has no token ids (`token_ids`), and text is never tokenised again: use a "
            "server that knows return_token_ids (hybridflow serve, vLLM), or ask for text alone with chat()"
        )
    values = log_probs.get("token_logprobs") or [None] * len(ids)
    if len(values) != len(ids):
        raise RolloutError(f"the server's answer has {len(ids)} tokens and {len(values)} log-probs")
    top = None
    if request.sampling.top_log_probs:
        top = [_top(entry, request.sampling.top_log_probs) for entry in log_probs.get("top_logprobs") or []]
        if len(top) != len(ids):
            raise RolloutError(
                f"the server's answer has {len(ids)} tokens and top log-probs of {len(top)}: set "
                "top_log_probs=0"
            )
    reason = finish_of(choice)
    stop = choice.get("stop_reason")
    if reason == "stop" and stop is None and ids:
        stop = int(ids[-1])  # vLLM says so of the model's end token
    return GenerationOutput(
        request.request_id,
        [int(token) for token in ids],
        [math.nan if value is None else float(value) for value in values],
        reason,
        [version] * len(ids),
        stop_reason=stop,
        top_log_probs=top,
    )


def finish_of(choice: dict[str, Any]) -> FinishReason:
    """Return why a choice ended; RolloutError for an unknown reason."""
    reason = choice.get("finish_reason")
    if reason not in _FINISH:
        raise RolloutError(
            f"the server ended a response with finish_reason={reason!r}; known are {', '.join(_FINISH)}"
        )
    return cast(FinishReason, reason)


def _top(entry: dict[str, float], count: int) -> list[tuple[int, float]]:
    if not all(name.startswith(TOKEN_ID) for name in entry):
        raise RolloutError(
            "the server names the most probable tokens by their text, which does not tell them apart: set "
            "top_log_probs=0"
        )
    pairs = [(int(name.removeprefix(TOKEN_ID)), float(value)) for name, value in entry.items()]
    # servers add the sampled token where it is not among them
    return sorted(pairs, key=lambda pair: -pair[1])[:count]
