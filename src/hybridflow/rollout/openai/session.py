"""A session of the openai engine: each request is a call of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from hybridflow.rollout.base import GenerationOutput, GenerationRequest, PartialOutput, RolloutStats
from hybridflow.rollout.openai.calls import Calls
from hybridflow.rollout.requests import aborted, check_ids

if TYPE_CHECKING:
    import httpx


@dataclass(eq=False)
class OpenAISession:
    """An `EngineSession` over `calls`, which it ends."""

    calls: Calls[GenerationOutput]
    stats: RolloutStats
    answer: Callable[[GenerationRequest, httpx.AsyncClient], Awaitable[GenerationOutput]]
    """Function that asks the endpoint for the output of one request."""
    closed: Callable[[], None]

    def __post_init__(self) -> None:
        self._requests: dict[int, GenerationRequest] = {}
        self._began = perf_counter()

    @property
    def policy_version(self) -> int:
        """Always 0: the endpoint does not say which weights it has."""
        return 0

    @property
    def num_running(self) -> int:
        """Number of requests without an answer; the endpoint does not say which of them wait."""
        return self.calls.num_open

    @property
    def idle(self) -> bool:
        """Whether all requests have an answer."""
        return self.calls.num_open == 0

    def add(self, requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
        """Send requests; RolloutError for an id that is in use."""
        check_ids(requests, self._requests)
        for request in requests:
            self._requests[request.request_id] = request
            self.calls.add(request.request_id, partial(self.answer, request))
        return []

    def step(self) -> list[GenerationOutput]:
        """Wait for the next answers."""
        outputs = self.calls.wait()
        for output in outputs:
            del self._requests[output.request_id]
            self.stats.generated_tokens += len(output.token_ids)
        self.stats.seconds = perf_counter() - self._began
        return outputs

    def abort(self, request_ids: Iterable[int]) -> list[GenerationOutput]:
        """End requests by closing their connections; what they had so far is the server's and is lost."""
        return [aborted(self._requests.pop(number)) for number in self.calls.cancel(set(request_ids))]

    def so_far(self, since: Mapping[int, int]) -> list[PartialOutput]:
        """Return nothing: answers come whole."""
        return []

    def close(self) -> None:
        """Close all connections, and let the engine be used otherwise."""
        self.calls.stop()
        self.closed()
