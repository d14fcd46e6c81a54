"""Checks and parts of requests that are the same for every engine."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace

from hybridflow.errors import RolloutError
from hybridflow.protocol.prompt import Prompt
from hybridflow.protocol.randomness import derive_seed
from hybridflow.rollout.base import GenerationOutput, GenerationRequest


def request_problem(
    request: GenerationRequest, *, vocabulary: int | None, positions: int | None, reads_media: bool = False
) -> str | None:
    """Return why a model of this vocabulary (None: unknown) and number of positions (None: no limit) cannot
    serve the request, or None where it can.
    """
    prompt = request.prompt_token_ids
    sampling = request.sampling
    if not prompt:
        return "the prompt is empty; at least one token is needed to predict the next"
    if request.prompt.media and not reads_media:
        return (
            f"the prompt has {len(request.prompt.media)} media, and this engine or its model reads token ids "
            "only: use rollout.name=native with a model that reads pictures, or leave them out of the data"
        )
    begun = request.begun
    named = {"prompt": prompt, "begun": begun.token_ids, "stop_token_ids": sampling.stop_token_ids}
    for name, ids in named.items():
        for token in (min(ids, default=0), max(ids, default=0)):
            if vocabulary is not None and not 0 <= token < vocabulary:
                return f"{name} holds token id {token}, and the model's vocabulary is 0..{vocabulary - 1}"
    if len(begun) >= sampling.max_tokens:
        return (
            f"{len(begun)} tokens of the response were begun, and max_tokens {sampling.max_tokens} leaves no "
            "further one: raise data.max_response_length, or take the response as it is"
        )
    if begun and sampling.top_log_probs and begun.top_log_probs is None:
        return "begun has no top_log_probs, and the request asks for them: give them too, or ask for none"
    if positions is not None and request.most_tokens > positions:
        return (
            f"prompt of {len(prompt)} tokens + max_tokens {sampling.max_tokens} = {request.most_tokens} is "
            f"more than the {positions} positions of the model (its max_position_embeddings, or fewer where "
            "its rotary frequencies depend on a row's length): shorten data.max_prompt_length or "
            "data.max_response_length"
        )
    return None


def refused(request: GenerationRequest, problem: str) -> GenerationOutput:
    """Return the output of a request that is not served."""
    error = f"request {request.request_id}: {problem}"
    return GenerationOutput(request.request_id, [], [], "error", [], error, refused=True)


def aborted(request: GenerationRequest) -> GenerationOutput:
    """Return the output of a request that ended before an engine did anything for it."""
    return whole_of(request, GenerationOutput(request.request_id, [], [], "abort", []))


def rest_problem(request: GenerationRequest) -> str | None:
    """Return the reason why `rest_of` is not the same request, or None where it is."""
    if request.begun and request.sampling.stop:
        return (
            f"it has begun and has the stop texts {list(request.sampling.stop)}, which this engine finds in "
            "new tokens only: use stop_token_ids, or rollout.name=native"
        )
    return None


def rest_of(request: GenerationRequest) -> GenerationRequest:
    """Return the part of a request that is left to generate, for an engine that knows no `begun`.

    What was begun is part of its prompt. Such engines seed by request, so its seed is another one: else its
    draws would be those that the response began with.
    """
    begun = request.begun
    if not begun:
        return request
    sampling = request.sampling
    left = replace(
        sampling,
        max_tokens=sampling.max_tokens - len(begun),
        min_tokens=max(0, sampling.min_tokens - len(begun)),
    )
    prompt = Prompt(request.prompt.token_ids + begun.token_ids, request.prompt.media)
    seed = derive_seed(request.seed, "begun", len(begun))
    return GenerationRequest(request.request_id, prompt, left, seed)


def whole_of(request: GenerationRequest, rest: GenerationOutput) -> GenerationOutput:
    """Return the output of a request from that of its `rest_of`."""
    begun = request.begun
    top = None
    if request.sampling.top_log_probs:
        top = [*(begun.top_log_probs or ()), *(rest.top_log_probs or ())]
    return replace(
        rest,
        token_ids=[*begun.token_ids, *rest.token_ids],
        log_probs=[*begun.log_probs, *rest.log_probs],
        policy_versions=[*begun.policy_versions, *rest.policy_versions],
        top_log_probs=top,
    )


def check_ids(requests: Sequence[GenerationRequest], running: Container[int] = ()) -> None:
    """RolloutError where two requests have the same id, or one has that of a request that is `running`."""
    seen: set[int] = set()
    for request in requests:
        number = request.request_id
        if number in seen or number in running:
            raise RolloutError(
                "request ids must be unique, and two requests that run at the same time have the same "
                f"request_id: {number}"
            )
        seen.add(number)


def sort_out(
    requests: Iterable[GenerationRequest], problem_of: Callable[[GenerationRequest], str | None]
) -> tuple[list[GenerationRequest], list[GenerationOutput]]:
    """Return the requests without a `problem_of`, and the outputs of those that have one."""
    good = []
    outputs = []
    for request in requests:
        problem = problem_of(request)
        if problem is None:
            good.append(request)
        else:
            outputs.append(refused(request, problem))
    return good, outputs
