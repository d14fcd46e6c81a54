"""The service between HTTP and the engines: it admits jobs, generates their responses, and counts them
for Prometheus, under our own names and under those of vLLM's server.

job ──admit (429, 503)──► a GenerationRequest for each response ──LLMClient──► outputs
──ChoiceReader──► pieces

Boards and alerts that were made for vLLM work with the second names.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Hashable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from prometheus_client import Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from hybridflow.errors import RolloutError
from hybridflow.protocol.randomness import derive_seed
from hybridflow.rollout.base import GenerationRequest
from hybridflow.rollout.client import DeadlinePassed, LLMClient, Replica, ReplicaLost
from hybridflow.rollout.server.errors import ApiError
from hybridflow.rollout.server.job import Job, chat_job, completion_job
from hybridflow.rollout.server.model import ServedModel
from hybridflow.rollout.server.prompts import Check, JobReaders
from hybridflow.rollout.server.reading import ChoiceReader, Piece
from hybridflow.rollout.server.schema import ChatBody, CompletionBody

T = TypeVar("T")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(frozen=True)
class ServerLimits:
    """Limits of a server."""

    max_queue: int = 4096
    """Responses that run or wait at once; more are answered with 429."""
    max_body_bytes: int = 16 * 2**20
    """A larger body is answered with 413."""
    max_media_bytes: int = 4 * 2**30
    """Bytes of pictures, as the model reads them, in all open requests; more are answered with 429."""
    send_timeout_s: float = 60.0
    """Seconds after which a stream is ended whose client reads nothing, so that its rows are free."""
    deadline_s: float | None = 600.0
    """Seconds after which a request without an answer is aborted and answered with 504; None: no limit."""


class Service:
    """Service of one model, for one event loop."""

    def __init__(self, client: LLMClient, model: ServedModel, limits: ServerLimits) -> None:
        self.client = client
        self.model = model
        self.limits = limits
        self.metrics = ServerCounts(model.name)
        self.readers = JobReaders(limits.max_queue, self.check_open, limits.deadline_s)
        self.draining = False
        """Whether the server is ending: running requests go on, and new ones are refused."""
        self.open_choices = 0
        self.open_media_bytes = 0
        self._ids = itertools.count()

    def check_open(self) -> None:
        """Raise ApiError 503 where nothing new can be served."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if (failure := self.client.failure) is not None:
            raise ApiError(503, f"no engine is alive: {failure}", code="engine_dead")

    def chat_job(self, body: ChatBody, check: Check) -> Job:
        """Return the job of a chat request; ApiError where it cannot be served."""
        return chat_job(body, self.model, check)

    def completion_job(self, body: CompletionBody, check: Check) -> Job:
        """Return the job of a completions request; ApiError where it cannot be served."""
        return completion_job(body, self.model, check)

    @contextmanager
    def admit(self, job: Job) -> Iterator[None]:
        """Count the job's responses as open; ApiError 429 or 503 where they cannot be served now."""
        self.check_open()
        wanted = len(job.prompts) * job.body.n
        if self.open_choices + wanted > self.limits.max_queue:
            raise ApiError(
                429,
                f"{self.open_choices} responses run or wait, and {wanted} more would be over the limit of "
                f"{self.limits.max_queue} (--max-queue): try again later",
                code="queue_full",
            )
        media = job.media_bytes
        if media and self.open_media_bytes and self.open_media_bytes + media > self.limits.max_media_bytes:
            raise ApiError(
                429,
                f"the pictures of open requests have {self.open_media_bytes} bytes as the model reads them, "
                f"and {media} more would be over the limit of {self.limits.max_media_bytes}: try again later",
                code="queue_full",
            )
        self.open_choices += wanted
        self.open_media_bytes += media
        try:
            yield
        finally:
            self.open_choices -= wanted
            self.open_media_bytes -= media

    async def whole(self, job: Job) -> list[Piece]:
        """Return all responses, each as one piece; where one fails, abort the others and raise ApiError."""
        async with self._generating(partial(self._one, job), job) as tasks:
            return await asyncio.gather(*tasks)

    async def pieces(self, job: Job) -> AsyncGenerator[Piece, None]:
        """Yield pieces of all responses as they come; ApiError where one fails. Close the generator where it
        is left early: that aborts the responses.
        """
        arrived: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        async with self._generating(partial(self._follow, job, arrived), job) as tasks:
            left = len(tasks)
            while left:
                piece = await arrived.get()
                if isinstance(piece, Exception):
                    raise piece
                left -= piece.finish_reason is not None
                yield piece

    @asynccontextmanager
    async def _generating(
        self, generate: Callable[[int, GenerationRequest], Coroutine[Any, Any, T]], job: Job
    ) -> AsyncGenerator[list[asyncio.Task[T]], None]:
        """Yield a task for each response, cancelled at the end of the block, and count the job."""
        self.metrics.prompt_tokens += sum(len(prompt) for prompt in job.prompts)
        started = perf_counter()
        tasks = [asyncio.create_task(generate(*each)) for each in enumerate(self._requests(job))]
        try:
            yield tasks
        except (asyncio.CancelledError, GeneratorExit):
            self.metrics.cancelled += 1
            raise
        finally:
            await cancel(tasks)
            self.metrics.seconds.observe(perf_counter() - started)

    def _requests(self, job: Job) -> list[GenerationRequest]:
        seed = job.body.seed
        if seed is None:
            seed = secrets.randbits(63)
        return [
            GenerationRequest(
                next(self._ids), prompt, job.sampling[place], derive_seed(seed, "serve", place, number)
            )
            for place, prompt in enumerate(job.prompts)
            for number in range(job.body.n)
        ]

    async def _one(self, job: Job, choice: int, request: GenerationRequest) -> Piece:
        with told_as_answers():
            output = await self.client.generate(
                request, sticky=_sticky(job, request), deadline_s=self.limits.deadline_s
            )
            piece = ChoiceReader(job, self.model, choice).read(output)
        self.metrics.generated_tokens += len(piece.token_ids)
        return piece

    async def _follow(
        self, job: Job, arrived: asyncio.Queue[Piece | Exception], choice: int, request: GenerationRequest
    ) -> None:
        started = perf_counter()
        reader = ChoiceReader(job, self.model, choice)
        try:
            with told_as_answers():
                outputs = self.client.stream(
                    request, sticky=_sticky(job, request), deadline_s=self.limits.deadline_s
                )
                async with aclosing(outputs):
                    async for output in outputs:
                        first = reader.num_tokens == 0
                        piece = reader.read(output)
                        if first and piece.token_ids:
                            self.metrics.first_token.observe(perf_counter() - started)
                        self.metrics.generated_tokens += len(piece.token_ids)
                        arrived.put_nowait(piece)
                        if piece.finish_reason is not None:
                            return
        except Exception as error:  # the reader of the pieces raises it
            arrived.put_nowait(error)


def _sticky(job: Job, request: GenerationRequest) -> Hashable:
    """Return the key by which a replica is chosen; without one, responses to one prompt share a prefill."""
    return job.body.prompt_cache_key or job.body.user or hash(request.prompt)


@contextmanager
def told_as_answers() -> Iterator[None]:
    """Turn errors of generation into answers: ApiError 504, 503 or 500."""
    try:
        yield
    except DeadlinePassed as error:
        raise ApiError(504, str(error), code="deadline_passed") from error
    except ReplicaLost as error:
        raise ApiError(503, str(error), code="engine_dead") from error
    except RolloutError as error:
        raise ApiError(500, str(error)) from error


async def cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until their requests are aborted."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class ServerCounts:
    """Counts since the start of the server."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.answers: Counter[tuple[str, int]] = Counter()
        """Number of answers by (path, status)."""
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.cancelled = 0
        self.seconds = Histogram("seconds", "", registry=None, buckets=SECONDS)
        self.first_token = Histogram("seconds", "", registry=None, buckets=SECONDS)

    def page(self, open_choices: int, replicas: Sequence[Replica]) -> str:
        """Return the page in Prometheus' text format; what is open now comes from the arguments."""
        load = sum(replica.load for replica in replicas)
        waiting = sum(replica.waiting for replica in replicas)
        alive = sum(replica.failure is None for replica in replicas)
        answers = CounterMetricFamily(
            "hybridflow_http_answers", "Answers by path and status.", labels=["model", "path", "status"]
        )
        for (path, status), count in sorted(self.answers.items()):
            answers.add_metric([self._model, path, str(status)], count)
        metrics: list[Metric] = [answers]

        def add(kind: Any, name: str | None, vllm: str | None, meaning: str, *value: Any) -> None:
            for label, prefix, known_as in (("model", "hybridflow_", name), ("model_name", "vllm:", vllm)):
                if known_as is not None:
                    family = kind(prefix + known_as, meaning, labels=[label])
                    family.add_metric([self._model], *value)
                    metrics.append(family)

        counter = CounterMetricFamily
        gauge = GaugeMetricFamily
        times = HistogramMetricFamily
        generated = "Tokens of responses that were handed on."
        whole = "From admission to the last token."
        first = "From admission to the first token, of streams."
        add(counter, "prompt_tokens", "prompt_tokens", "Tokens of prompts.", self.prompt_tokens)
        add(counter, "generated_tokens", "generation_tokens", generated, self.generated_tokens)
        add(counter, "requests_cancelled", None, "Requests whose client went away.", self.cancelled)
        add(gauge, "responses_open", None, "Responses in work or waiting.", open_choices)
        add(gauge, "responses_in_engines", None, "Responses that the engines have not answered.", load)
        add(gauge, "replicas_alive", None, "Engines that serve.", alive)
        add(gauge, None, "num_requests_running", "Requests that get tokens.", load - waiting)
        add(gauge, None, "num_requests_waiting", "Requests without room in an engine.", waiting)
        add(times, "request_seconds", "e2e_request_latency_seconds", whole, *_values(self.seconds))
        add(times, "first_token_seconds", "time_to_first_token_seconds", first, *_values(self.first_token))
        return generate_latest(_Page(metrics)).decode()


def _values(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Return the buckets of a histogram, each with the count of all values up to it, and their sum."""
    (family,) = histogram.collect()
    buckets = [(each.labels["le"], each.value) for each in family.samples if each.name == "seconds_bucket"]
    return buckets, next(each.value for each in family.samples if each.name == "seconds_sum")


class _Page(Collector):
    """A page's metrics, as they are written."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics
