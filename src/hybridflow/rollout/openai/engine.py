"""The openai engine: an endpoint that speaks the OpenAI API, for evaluation and for frozen teachers and
judges. Its calls run concurrently on an event loop in a thread.

    OpenAISession ──at most `max_concurrent` at a time──► POST /completions, again after a failure until the
    deadline ──► outputs, as they come

The weights are the endpoint's, so every call that would change them is refused.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from time import monotonic, perf_counter
from typing import Any, Generic, TypeVar

from torch import Tensor

from hybridflow.errors import RolloutError, install_extra
from hybridflow.rollout.base import (
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    PartialOutput,
    RolloutStats,
    SamplingParams,
)
from hybridflow.rollout.openai.wire import completion_body, finish_of, read_completion, sampling_fields
from hybridflow.rollout.session_engine import (
    SessionEngine,
    aborted,
    check_ids,
    refused,
    request_problem,
    rest_of,
    rest_problem,
    whole_of,
)

try:
    import httpx
except ImportError as error:
    raise RolloutError(f"the openai engine needs httpx: {install_extra('openai')}") from error

T = TypeVar("T")
POLL_S = 0.05
"""Seconds that `wait` waits at most."""
AGAIN = frozenset({408, 429, 500, 502, 503, 504})
"""Answers after which the same request may succeed."""
LONGEST_PAUSE = 5.0
"""Seconds between two tries, at most."""
PROBE_SECONDS = 60.0
"""Seconds within which a server that is there answers at all."""

Message = dict[str, str]


@dataclass(frozen=True)
class TextAnswer:
    """An answer to a conversation, as text: without token ids and log-probs it cannot be trained on."""

    text: str
    finish_reason: FinishReason
    error: str | None = None


class OpenAIEngine(SessionEngine):
    """A `RolloutEngine` over HTTP. `base_url` ends in /v1, as a rule.

    `extended`: the endpoint knows vLLM's fields; without them it gives no token ids, and only `chat` can be
    used. `deadline`: seconds for a request with all of its tries. Log-probs are the server's own: vLLM's are
    temperature-only with `--logprobs-mode processed_logprobs` and no top-k or top-p, `hybridflow serve`'s
    always.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str,
        api_key: str | None = None,
        extended: bool = True,
        max_concurrent: int = 32,
        deadline: float = 600.0,
    ) -> None:
        super().__init__()
        self.base_url = base_url.rstrip("/")
        self.model = model
        self.extended = extended
        self.max_concurrent = max_concurrent
        self.deadline = deadline
        self._headers: dict[str, str] = {}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    @property
    def policy_version(self) -> int:
        """Always 0: the versions of the endpoint's weights are not known."""
        return 0

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Raises RolloutError: the endpoint's weights are its own."""
        raise RolloutError(
            f"the openai engine cannot update the weights of {self.base_url}: they are the endpoint's own. "
            "To train, use actor_rollout_ref.rollout.name=native, or another engine that "
            "docs/rollout/engines.md lists with weight updates"
        )

    def set_version(self, version: int) -> None:
        """Raises RolloutError for a version other than 0, as `update_weights`."""
        if version:
            self.update_weights((), version)

    def sleep(self, level: int = 1) -> None:
        """Do nothing, because the endpoint's memory is its own; RolloutError while generating."""
        self._check_free("sleep()")

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Do nothing."""

    def _new_session(self, closed: bool) -> OpenAISession:
        calls: Calls[GenerationOutput] = Calls(self._client, self.max_concurrent)
        return OpenAISession(calls, self._stats, answer=self._one, closed=self._closed)

    def chat(self, conversations: Sequence[Sequence[Message]], sampling: SamplingParams) -> list[TextAnswer]:
        """Return an answer as text, which any endpoint gives, to each conversation of {role, content}."""
        calls: Calls[tuple[int, TextAnswer]] = Calls(self._client, self.max_concurrent)
        answers: dict[int, TextAnswer] = {}
        try:
            for place, messages in enumerate(conversations):
                calls.add(place, partial(self._chat, place, messages, sampling))
            while calls.num_open:
                answers |= dict(calls.wait())
        finally:
            calls.stop()
        return [answers[place] for place in range(len(conversations))]

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(
            max_connections=self.max_concurrent, max_keepalive_connections=self.max_concurrent
        )
        return httpx.AsyncClient(headers=self._headers, limits=limits, timeout=httpx.Timeout(self.deadline))

    async def _one(self, request: GenerationRequest, client: httpx.AsyncClient) -> GenerationOutput:
        problem = request_problem(request, vocabulary=None, positions=None) or rest_problem(request)
        if problem is not None:
            return refused(request, problem)
        try:
            rest = rest_of(request)
            body = completion_body(rest, self.model, extended=self.extended)
            answer = await self._post(client, "/completions", body)
            return whole_of(request, read_completion(answer, rest, self.policy_version))
        except (RolloutError, LookupError, TypeError, ValueError) as error:
            return refused(request, self._said(error))

    async def _chat(
        self, place: int, messages: Sequence[Message], sampling: SamplingParams, client: httpx.AsyncClient
    ) -> tuple[int, TextAnswer]:
        try:
            body = {
                "model": self.model,
                "messages": list(messages),
                **sampling_fields(sampling, extended=self.extended),
            }
            choice = (await self._post(client, "/chat/completions", body))["choices"][0]
            return place, TextAnswer(choice["message"]["content"] or "", finish_of(choice))
        except (RolloutError, LookupError, TypeError, ValueError) as error:
            return place, TextAnswer("", "error", self._said(error))

    def _said(self, error: Exception) -> str:
        what = str(error)
        if not isinstance(error, RolloutError):
            what = f"its answer cannot be read: {type(error).__name__}: {error}"
        return f"openai engine at {self.base_url} (model {self.model}): {what}"

    async def _post(self, client: httpx.AsyncClient, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one request; RolloutError when it is refused or fails until the deadline."""
        ends = monotonic() + self.deadline
        tries = 0
        last = "no answer"
        while (left := ends - monotonic()) > 0:
            tries += 1
            pause = min(LONGEST_PAUSE, 0.1 * 2**tries)
            try:
                answer = await asyncio.wait_for(client.post(self.base_url + route, json=body), left)
            except (httpx.HTTPError, TimeoutError) as error:
                last = f"{type(error).__name__}: {error}".removesuffix(": ")
            else:
                if answer.is_success:
                    return dict(answer.json())
                last = f"status {answer.status_code}: {reason_of(answer)}"
                if answer.status_code not in AGAIN:
                    raise RolloutError(f"it refused the request{_size(body)} with {last}")
                pause = max(pause, seconds_to_wait(answer))
            if monotonic() + pause >= ends:
                break
            await asyncio.sleep(pause)
        raise RolloutError(
            f"no success within {self.deadline:g} s in {tries} tries, the last: {last}. Is it running? "
            "Raise `deadline` if slow"
        )


def check_reachable(base_url: str) -> None:
    """Raise RolloutError where no server answers at an address; whatever it answers, it is there."""
    try:
        httpx.get(f"{base_url.rstrip('/')}/models", timeout=PROBE_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RolloutError(
            f"nothing answers at {base_url} ({type(error).__name__}: {error}). Is the server running, and is "
            "this its address? As a rule it ends in /v1"
        ) from error


def reason_of(answer: httpx.Response) -> str:
    """Return the error message of an unsuccessful answer, in one line."""
    try:
        payload = answer.json()
        said = payload.get("error", payload)
        text = said.get("message", said) if isinstance(said, dict) else said
    except (ValueError, AttributeError):
        text = answer.text
    return " ".join(str(text).split())[:400]


def seconds_to_wait(answer: httpx.Response) -> float:
    """Return the seconds to wait before the next try that the server asks for, or 0."""
    try:
        return float(answer.headers.get("Retry-After", 0))
    except ValueError:
        return 0.0


def _size(body: dict[str, Any]) -> str:
    """Describe the length of a request: servers that refuse one for its length do not always say so."""
    if "prompt" not in body:
        return ""
    return f" ({len(body['prompt'])} prompt tokens, max_tokens={body['max_tokens']})"


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
        """End requests by closing their connections; their tokens so far are with the server and are lost."""
        return [aborted(self._requests.pop(number)) for number in self.calls.cancel(set(request_ids))]

    def so_far(self, since: Mapping[int, int]) -> list[PartialOutput]:
        """Return nothing: answers come whole."""
        return []

    def close(self) -> None:
        """Close all connections, and release the engine for other uses."""
        self.calls.stop()
        self.closed()


class Calls(Generic[T]):
    """Named jobs on one client, at most `max_concurrent` at a time; for one thread that adds and waits, and
    `cancel` for any.
    """

    def __init__(self, connect: Callable[[], httpx.AsyncClient], max_concurrent: int) -> None:
        self._client = connect()
        self._turn = asyncio.Semaphore(max_concurrent)
        self._done: queue.SimpleQueue[tuple[int, Future[T]]] = queue.SimpleQueue()
        self._open: dict[int, Future[T]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="openai-engine", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Number of jobs that have given no result and were not cancelled."""
        return len(self._open)

    def add(self, name: int, work: Callable[[httpx.AsyncClient], Awaitable[T]]) -> None:
        """Start a job; a name may be used again when its job is no longer open."""
        future = self._open[name] = asyncio.run_coroutine_threadsafe(self._run(work), self._loop)
        future.add_done_callback(lambda ended: self._done.put((name, ended)))

    def wait(self) -> list[T]:
        """Wait a little for jobs to end, and return the finished results; raises what a job raised."""
        try:
            found = [self._done.get(timeout=POLL_S)]
        except queue.Empty:  # the caller may have something to add or to cancel
            return []
        found += [self._done.get() for _ in range(self._done.qsize())]
        results: list[T] = []
        for name, future in found:
            if self._open.get(name) is future:  # and was not cancelled
                del self._open[name]
                results.append(future.result())
        return results

    def cancel(self, names: set[int]) -> list[int]:
        """Cancel these jobs; returns those that had given no result."""
        ended = []
        for name in sorted(names):
            future = self._open.pop(name, None)
            if future is not None:
                future.cancel()
                ended.append(name)
        return ended

    def stop(self) -> None:
        """End all jobs and the thread."""
        self.cancel(set(self._open))
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _run(self, work: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
        async with self._turn:
            return await work(self._client)

    async def _close(self) -> None:
        """Wait until the cancelled jobs have ended, and close the client."""
        jobs = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*jobs, return_exceptions=True)
        await self._client.aclose()
