"""The base of all engines: checks and parts of requests, sessions, and the copy of received weights into the
module of an engine in this process.

open() ──► EngineSession: requests join and leave at any time ──► EngineReplica
generate(requests) ──► a closed session, which has these requests only, read to its end
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from hybridflow.errors import RolloutError
from hybridflow.protocol.prompt import Prompt
from hybridflow.protocol.randomness import derive_seed
from hybridflow.rollout.base import (
    EngineSession,
    GenerationOutput,
    GenerationRequest,
    RolloutStats,
    SomeWeights,
)

MAX_NAMES = 5
"""Missing weights that a message names."""


class SessionEngine(ABC):
    """A `RolloutEngine` whose sessions a subclass makes; it has at most one at a time."""

    def __init__(self) -> None:
        self._stats = RolloutStats()
        self._session: EngineSession | None = None

    @property
    def stats(self) -> RolloutStats:
        """Statistics of the newest `generate` or session, up to now."""
        return self._stats

    @property
    def asleep(self) -> bool:
        """Whether `wake_up` has to be called before generation."""
        return False

    def open(self, *, closed: bool = False) -> EngineSession:
        """Return a session that requests may join at any time or, if it is `closed`, in one call before its
        first step. RolloutError when asleep or in use.
        """
        self._check_ready("open()")
        self._stats = RolloutStats()
        self._session = self._new_session(closed)
        return self._session

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationOutput]:
        """Yield one output for each request, as they finish.

        A request that cannot be served gives reason "error" and the others go on. RolloutError for a repeated
        request id, when asleep, and while another call runs or a session is open.
        """
        self._check_ready("generate()")
        check_ids(requests)
        return self._generate(requests)

    def _generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationOutput]:
        session = self.open(closed=True)
        try:
            yield from session.add(requests)
            while not session.idle:
                yield from session.step()
        finally:
            session.close()

    def abort(self, request_ids: Iterable[int]) -> list[GenerationOutput]:
        """End requests of the running `generate` or session; their partial responses are returned here."""
        if self._session is None:
            return []
        return self._session.abort(request_ids)

    @abstractmethod
    def _new_session(self, closed: bool) -> EngineSession:
        """Return a session, `closed` as in `open`, that calls `_closed` when it ends."""

    def _closed(self) -> None:
        self._session = None

    def _check_ready(self, call: str) -> None:
        self._check_free(call)
        if self.asleep:
            raise RolloutError(f"{call} was called on a sleeping engine: call wake_up() first")

    def _check_free(self, call: str) -> None:
        if self._session is not None:
            raise RolloutError(
                f"{call} was called while generate() is running or a session is open: read its outputs to "
                "the end or close it first"
            )


@torch.no_grad()
def load_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy weights into a Hugging Face model, by name.

    Raises RolloutError for a name or shape that the model does not have, and for weights that are missing,
    unless the sender says by `SomeWeights` that the others are in place.
    """
    own = model.state_dict(keep_vars=True)
    lacking = {id(parameter): name for name, parameter in reversed(list(own.items()))}
    for name, weight in weights:
        if name not in own or own[name].shape != weight.shape:
            has = "it has no weight of that name"
            if name in own:
                has = f"its own is {tuple(own[name].shape)}"
            raise RolloutError(
                f"update_weights got {name!r} of shape {tuple(weight.shape)}, which does not fit the "
                f"model: {has}"
            )
        own[name].copy_(weight)
        lacking.pop(id(own[name]), None)  # with one of two tied weights the other has come too
    if not lacking or isinstance(weights, SomeWeights):
        return
    names = list(lacking.values())[::-1]
    shown = ", ".join(names[:MAX_NAMES])
    if len(names) > MAX_NAMES:
        shown += f" and {len(names) - MAX_NAMES} more"
    raise RolloutError(
        f"update_weights got {len(own) - len(names)} of {len(own)} weights; missing: {shown}. The "
        "engine now holds old and new weights together: give it all of them, or wrap those that "
        "changed in SomeWeights"
    )


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
    begun = request.partial_response
    named = {"prompt": prompt, "partial_response": begun.token_ids, "stop_token_ids": sampling.stop_token_ids}
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
        return (
            "partial_response lacks the top_log_probs that the request asks for: give them, or ask for none"
        )
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
    if request.partial_response and request.sampling.stop:
        return (
            f"it has begun and has the stop texts {list(request.sampling.stop)}, which this engine finds in "
            "new tokens only: use stop_token_ids, or rollout.name=native"
        )
    return None


def rest_of(request: GenerationRequest) -> GenerationRequest:
    """Return the part of a request that is left to generate, for an engine that knows no `partial_response`.

    What was begun is part of its prompt. Such engines seed by request, so its seed is another one: else its
    draws would be those that the response began with.
    """
    begun = request.partial_response
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
    begun = request.partial_response
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
