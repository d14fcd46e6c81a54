"""Checks of requests that hold for every engine."""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.errors import RolloutError
from hybridflow.rollout.base import GenerationOutput, GenerationRequest


def request_problem(request: GenerationRequest, *, vocabulary: int, positions: int | None) -> str | None:
    """Return the reason why a model with this vocabulary and number of positions (None: no limit) cannot
    serve the request, or None where it can.
    """
    prompt = request.prompt_token_ids
    sampling = request.sampling
    if not prompt:
        return "the prompt is empty; at least one token is needed to predict the next"
    if request.prompt.media:
        return (
            f"the prompt has {len(request.prompt.media)} media, and this engine reads token ids only: leave "
            "pictures, videos and sounds out of the data"
        )
    for name, ids in (("prompt", prompt), ("stop_token_ids", sampling.stop_token_ids)):
        wrong = next(
            (token for token in (min(ids, default=0), max(ids, default=0)) if not 0 <= token < vocabulary),
            None,
        )
        if wrong is not None:
            return f"{name} holds token id {wrong}, and the model's vocabulary is 0..{vocabulary - 1}"
    if positions is not None and len(prompt) + sampling.max_tokens > positions:
        return (
            f"prompt of {len(prompt)} tokens + max_tokens {sampling.max_tokens} = "
            f"{len(prompt) + sampling.max_tokens} is more than the "
            f"model's max_position_embeddings {positions}: shorten data.max_prompt_length or "
            "data.max_response_length"
        )
    return None


def refused(request: GenerationRequest, problem: str) -> GenerationOutput:
    """Return the output of a request that is not served."""
    error = f"request {request.request_id}: {problem}"
    return GenerationOutput(request.request_id, [], [], "error", [], error, refused=True)


def check_ids(requests: Sequence[GenerationRequest]) -> None:
    """RolloutError where two requests of one call have the same id."""
    if len({request.request_id for request in requests}) != len(requests):
        raise RolloutError(
            "two requests of one generate() call have the same request_id: they must be unique"
        )
