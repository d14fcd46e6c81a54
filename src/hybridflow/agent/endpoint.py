"""An HTTP endpoint for unmodified agents: a base URL for each trajectory, and every call recorded.

agent ──HTTP──► Endpoint (/t/SECRET/v1/…) ──► Recording ──prompt ids──► Policy ──► output ──► answer
                                                  └── remembers the token ids of each conversation

An agent sends its whole conversation with every request. Where it begins with one that was answered here, the
prompt begins with exactly the ids of that call, and only what is new is tokenised.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import json
import logging
import secrets
from collections.abc import AsyncGenerator, Hashable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from hybridflow.agent.episode import LengthReached, Policy, TrajectoryFailed
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.data.tokenizer import encode_rendered
from hybridflow.errors import DataError
from hybridflow.protocol.prompt import Prompt
from hybridflow.protocol.trajectory import FINISHED, TRUNCATED, FailureCause
from hybridflow.rollout.base import GenerationOutput
from hybridflow.rollout.server.answers import written_message
from hybridflow.rollout.server.app import API_PATHS, Gate, build_api
from hybridflow.rollout.server.errors import ApiError, ErrorResponse, refuse
from hybridflow.rollout.server.job import Job, chat_job, completion_job
from hybridflow.rollout.server.model import ServedModel
from hybridflow.rollout.server.prompts import (
    Check,
    JobReaders,
    SentPictures,
    check_characters,
    picture_prompt,
    template_errors_refused,
    text_in,
)
from hybridflow.rollout.server.reading import ChoiceReader, Piece
from hybridflow.rollout.server.run import LoopServer
from hybridflow.rollout.server.schema import ChatBody, CompletionBody, SamplingBody
from hybridflow.rollout.server.service import ServerCounts, ServerLimits, cancel

logger = logging.getLogger(__name__)

Message = dict[str, Any]
Key = tuple[Hashable, ...]
BodyT = TypeVar("BodyT", bound=SamplingBody)

THE_RUNS_OWN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
    "seed",
    "reasoning_effort",
    "chat_template_kwargs",
)
"""Fields that the keys of the run decide: its log-probs and its templates are the same for every call."""
STATUSES: dict[FailureCause, int] = {"data": 400, "deadline": 504}
"""HTTP status of a call that failed, by its cause; of all others it is 503."""


class Endpoint:
    """HTTP server of the trajectories that run now, in the event loop of their recorder.

    It listens from the first trajectory to the end of the event loop. Paths that belong to none are answered
    with 404, those of one that has ended with 410.
    """

    def __init__(
        self, model: ServedModel, template: ChatTemplate, *, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        """Agents find it at `host` and `port` (0: a free one)."""
        self.model = replace(model, any_name=True)
        self.template = template
        self.limits = ServerLimits()
        self.readers = JobReaders(self.limits.max_queue, lambda: None, self.limits.deadline_s)
        self._address = (host, port)
        self._server: LoopServer | None = None
        self._recordings: dict[str, Recording] = {}
        self._numbers = itertools.count()
        self._key = secrets.token_bytes(32)
        self._warned: set[str] = set()
        api = build_api(_recording_of)
        self._app = Gate(
            api,
            token=None,  # the path is the secret
            max_body_bytes=self.limits.max_body_bytes,
            metrics=ServerCounts(model.name),
            paths=API_PATHS,
            size_option=": send a shorter conversation, or smaller pictures",
        )

    @asynccontextmanager
    async def record(self, policy: Policy) -> AsyncGenerator[Recording, None]:
        """Give a trajectory its URL for the time of the block; ConfigError where the port is taken."""
        if self._server is None or self._server.has_ended:
            self._server = LoopServer(self, *self._address)
        secret = self._signed(str(next(self._numbers)))
        recording = Recording(self, policy, f"{self._server.address}/t/{secret}")
        self._recordings[secret] = recording
        try:
            yield recording
        finally:
            del self._recordings[secret]
            await recording.end()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request (ASGI)."""
        assert scope["type"] == "http", "websockets and lifespans are off"
        _, _, rest = scope["path"].partition("/t/")
        secret, slash, rest = rest.partition("/")
        path = slash + rest
        recording = self._recordings.get(secret)
        if recording is not None:
            await self._app({**scope, "path": path, "recording": recording}, receive, send)
            return
        error = ApiError(404, "there is no trajectory of this URL: use the base URL that the agent was given")
        if hmac.compare_digest(secret.encode(), self._signed(secret.partition("-")[0]).encode()):
            error = _has_ended()
        await ErrorResponse(error, path)(scope, receive, send)

    def warn_once(self, fields: Sequence[str]) -> None:
        """Log that these fields of a request have no effect, each for the first time only."""
        new = [name for name in fields if name not in self._warned]
        self._warned.update(new)
        if new:
            logger.warning(
                "an agent sets %s, which has no effect in training: responses are drawn as the keys of the "
                "run say (actor_rollout_ref.rollout.*, data.apply_chat_template_kwargs)",
                ", ".join(new),
            )

    def _signed(self, number: str) -> str:
        """Return the secret of a trajectory, which is verified without being stored."""
        return f"{number}-{hmac.new(self._key, number.encode(), hashlib.sha256).hexdigest()[:32]}"


def _recording_of(request: Request) -> Recording:
    recording = request.scope["recording"]
    assert isinstance(recording, Recording), "a request comes by Endpoint"
    return recording


def _has_ended() -> ApiError:
    return ApiError(410, "this trajectory has ended, and takes no further requests", code="trajectory_ended")


@dataclass(frozen=True)
class _Answered:
    """A conversation up to an answer that was sampled here."""

    prompt: Prompt
    """Its prompt and its output."""
    last_token: int | None
    """Stop token with which the output ended; None where something else ended it."""


class Recording:
    """The requests of one trajectory, as the routes of the server ask for them (`JobService`)."""

    def __init__(self, endpoint: Endpoint, policy: Policy, url: str) -> None:
        self.url = url
        """Base URL of Anthropic's clients; with `/v1` behind it, that of OpenAI's."""
        self.model = endpoint.model
        self.limits = endpoint.limits
        self.readers = endpoint.readers
        self.failure: TrajectoryFailed | LengthReached | None = None
        """Our own error for which a request was not answered. One that fails the trajectory stays the first;
        an agent whose conversation is too long may go on with a shorter one.
        """
        self.messages: list[Message] = []
        """The conversation that was answered last, with its answer."""
        self.outcome = FINISHED
        """How the trajectory would end now: truncated where a limit of the run cut the last response."""
        self._endpoint = endpoint
        self._policy = policy
        self._ended = False
        self._running: set[asyncio.Task[Piece]] = set()
        self._answered: dict[Key, _Answered] = {}

    def check_open(self) -> None:
        """Raise ApiError 410 where the trajectory has ended or has failed: clients do not retry that."""
        if self._ended or isinstance(self.failure, TrajectoryFailed):
            raise _has_ended()

    async def end(self) -> None:
        """Accept no further requests, and cancel running ones."""
        self._ended = True
        await cancel(list(self._running))

    def chat_job(self, body: ChatBody, check: Check) -> Job:
        """Return the job of a chat request, whose prompt begins with recorded ids where it can."""
        if body.continue_final_message or not body.add_generation_prompt:
            raise refuse(
                "continue_final_message", "in training the model answers, and nobody writes its beginning"
            )
        for tool in body.tools or ():
            if tool.function.strict:
                self._endpoint.warn_once(["strict"])
                tool.function.strict = None
        own = self._under_the_run(body, max_completion_tokens=None)
        with self._noting_length():
            job = chat_job(own, self.model, check, prompt_of=partial(self._prompt_of, check))
        return self._drawn_by_the_run(job, body.max_completion_tokens or body.max_tokens)

    def completion_job(self, body: CompletionBody, check: Check) -> Job:
        """Return the job of a completions request."""
        with self._noting_length():
            job = completion_job(self._under_the_run(body, max_tokens=1), self.model, check)
        return self._drawn_by_the_run(job, body.max_tokens)

    @contextmanager
    def admit(self, job: Job) -> Iterator[None]:
        """Raise ApiError 410 as `check_open` does."""
        self.check_open()
        yield

    async def whole(self, job: Job) -> list[Piece]:
        """Return all responses, each as one piece, and record them; ApiError where one fails."""
        choices = range(len(job.prompts) * job.body.n)
        tasks = [asyncio.ensure_future(self._one(job, choice)) for choice in choices]
        self._running.update(tasks)
        try:
            return await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            self.check_open()
            raise
        finally:
            self._running.difference_update(tasks)
            await cancel(tasks)

    async def pieces(self, job: Job) -> AsyncGenerator[Piece, None]:
        """Yield the same, for a stream: a call is recorded as a whole."""
        for piece in await self.whole(job):
            yield piece

    async def _one(self, job: Job, choice: int) -> Piece:
        place = choice // job.body.n
        prompt = job.prompts[place]
        try:
            output = await self._policy.generate(prompt, sampling=job.sampling[place])
        except LengthReached as error:
            self._fail(error)
            raise ApiError(400, str(error), code="context_length_exceeded") from error
        except TrajectoryFailed as error:
            self._fail(error)
            raise ApiError(STATUSES.get(error.cause, 503), str(error), code=error.cause) from error
        if isinstance(self.failure, LengthReached):
            self.failure = None
        self.outcome = FINISHED
        limit = job.sampling[place].max_tokens
        whole = limit < self._policy.sampling.max_tokens and len(output.token_ids) >= limit
        if output.finish_reason == "length" and not whole:  # less than the client's limit: no room for more
            self.outcome = TRUNCATED
        piece = ChoiceReader(job, self.model, choice).read(output)
        if job.messages:
            self._remember(job, output, piece)
        return piece

    def _remember(self, job: Job, output: GenerationOutput, piece: Piece) -> None:
        self.messages = [*job.messages, written_message(piece)]
        last_token = None
        if output.finish_reason == "stop" and isinstance(output.stop_reason, int):
            last_token = output.token_ids[-1]
        key = _key(self.messages, job.template_options, job.pictures)
        (prompt,) = job.prompts
        whole = Prompt((*prompt.token_ids, *output.token_ids), prompt.media)
        self._answered[key] = _Answered(whole, last_token)

    def _prompt_of(
        self,
        check: Check,
        messages: list[Message],
        options: dict[str, Any],
        behind: str,
        pictures: SentPictures,
    ) -> Prompt:
        """Return the prompt of a conversation: the recorded one as far as it continues an answer of ours."""
        check_characters("messages", sum(len(text_in(each["content"])) for each in messages), self.model)
        check()
        tools = options.get("tools")
        given = encode_rendered(self.model.tokenizer, behind)
        key = _key(messages, options, pictures.digests)
        for length in range(len(messages) - 1, 0, -1):
            answered = self._answered.get(key[: length + 1])
            if answered is None:
                continue
            try:
                new = _named_results(messages, length)
                after = self._endpoint.template.after_answer(answered.last_token, new, tools)
            except DataError as error:
                logger.debug("a new row for a conversation that continues: %s", error)
                break
            num_read = sum(len(_places(message)) for message in messages[:length])
            files = pictures.files[num_read:]
            return picture_prompt("messages", [*after, *given], files, self.model, check, answered.prompt)
        with template_errors_refused():
            ids = [*self._endpoint.template.begin(messages, tools), *given]
        return picture_prompt("messages", ids, pictures.files, self.model, check)

    def _under_the_run(self, body: BodyT, **changes: Any) -> BodyT:
        """Return a request without the fields that the run decides, and warn of those that it set."""
        fields = type(body).model_fields
        defaults = {name: fields[name].default for name in THE_RUNS_OWN if name in fields}
        self._endpoint.warn_once([name for name, value in defaults.items() if getattr(body, name) != value])
        return body.model_copy(update={**defaults, "max_tokens": None, **changes})

    def _drawn_by_the_run(self, job: Job, limit: int | None) -> Job:
        """Return the job with the sampling of the run, and with the request's limit and stops."""
        run = self._policy.sampling
        return replace(
            job,
            sampling=[
                replace(
                    run,
                    max_tokens=min(limit or run.max_tokens, run.max_tokens),
                    min_tokens=min(limit or run.max_tokens, run.min_tokens),
                    stop=(*run.stop, *asked.stop),
                    stop_token_ids=(*run.stop_token_ids, *asked.stop_token_ids),
                    top_log_probs=asked.top_log_probs,
                )
                for asked in job.sampling
            ],
        )

    @contextmanager
    def _noting_length(self) -> Iterator[None]:
        """Note that the trajectory has reached its length where a prompt is refused for that."""
        try:
            yield
        except ApiError as error:
            if error.code == "context_length_exceeded":
                self._fail(LengthReached(error.message))
            raise

    def _fail(self, failure: TrajectoryFailed | LengthReached) -> None:
        if not isinstance(self.failure, TrajectoryFailed):
            self.failure = failure


def _named_results(messages: Sequence[Message], start: int) -> list[Message]:
    """Return the messages from `start` on; results of tools get the names that their calls have."""
    names = {call["id"]: call["function"]["name"] for each in messages for call in each.get("tool_calls", ())}
    new = []
    for message in messages[start:]:
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message = {"name": names[message["tool_call_id"]], **message}
        new.append(message)
    return new


def _key(messages: Sequence[Message], options: dict[str, Any], pictures: Sequence[str]) -> Key:
    """Return what two equal conversations have in common, however a client writes them: their options, and
    for each message what it means. `pictures` are the digests of their pictures.
    """
    left = iter(pictures)
    return (_as_text(options), *(_meaning(message, left) for message in messages))


def _places(message: Message) -> list[int]:
    """Return the numbers of the parts of a message that are pictures."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return [number for number, part in enumerate(parts) if part["type"] == "image"]


def _meaning(message: Message, pictures: Iterator[str]) -> Hashable:
    text = text_in(message.get("content"))
    if message["role"] == "assistant":
        text = text.strip()  # clients do so, too
    shown = tuple((place, next(pictures)) for place in _places(message))
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        calls.append((call["function"]["name"], _as_text(arguments)))
    return (message["role"], text, shown, message.get("reasoning_content"), *calls)


def _as_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
