"""The HTTP interface: the gate that every request passes before its body is read, routes, errors, streams,
and clients that go away.

request ──Gate (token, size)──► route ──Job──► JobService ──pieces──► AnswerWriter ──► JSON, or a stream
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractContextManager, aclosing
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybridflow import __version__
from hybridflow.rollout.server.answers import AnswerWriter, ChatAnswer, CompletionAnswer
from hybridflow.rollout.server.errors import MESSAGES_PATH, ApiError, ErrorResponse
from hybridflow.rollout.server.job import Job
from hybridflow.rollout.server.messages import MessagesAnswer, MessagesBody
from hybridflow.rollout.server.model import ServedModel
from hybridflow.rollout.server.prompts import PICTURE_WORDS, Check, JobReaders
from hybridflow.rollout.server.reading import Piece
from hybridflow.rollout.server.responses import ResponsesAnswer, ResponsesBody
from hybridflow.rollout.server.schema import ChatBody, CompletionBody
from hybridflow.rollout.server.service import ServerCounts, ServerLimits, Service

logger = logging.getLogger(__name__)
T = TypeVar("T")
AnyBody = ChatBody | CompletionBody | ResponsesBody | MessagesBody
OTHER_TYPES = ("string_type", "list_type")
"""Problems of a value that is of another type than this alternative."""
GONE = 499
"""Status in the metrics of an answer whose client has gone away."""
OPEN_PATHS = ("/health",)
"""Paths that need no token: they only show supervisors that the server is alive."""
TOKEN_HEADERS = (
    "'Authorization: Bearer TOKEN' (api_key of OpenAI's clients) or 'x-api-key: TOKEN' (of Anthropic's)"
)
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 413: {"Connection": "close"}}
"""Headers of what the gate refuses, by status."""


class JobService(Protocol):
    """Turns the bodies of requests into jobs, and jobs into responses: the `Service` of a server, or the one
    of a trajectory that is recorded.
    """

    model: ServedModel
    limits: ServerLimits
    readers: JobReaders

    def check_open(self) -> None:
        """Raise ApiError where nothing new can be served."""

    def chat_job(self, body: ChatBody, check: Check) -> Job: ...

    def completion_job(self, body: CompletionBody, check: Check) -> Job: ...

    def admit(self, job: Job) -> AbstractContextManager[None]:
        """Count the job as open; ApiError where it cannot be served now."""
        ...

    async def whole(self, job: Job) -> list[Piece]:
        """Return all responses, each as one piece; ApiError where one fails."""
        ...

    def pieces(self, job: Job) -> AsyncGenerator[Piece, None]:
        """Yield pieces of all responses as they come; ApiError where one fails."""
        ...


def build_app(service: Service, *, token: str | None) -> FastAPI:
    """Return the application; with a `token` it answers 401 to requests that do not send it."""
    app = build_api(lambda request: service)

    @app.get("/health")
    async def health() -> Response:
        service.check_open()
        return JSONResponse({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        page = service.metrics.page(service.open_choices, service.client.replicas)
        return PlainTextResponse(page, media_type="text/plain; version=0.0.4")

    app.add_middleware(
        Gate,
        token=token,
        max_body_bytes=service.limits.max_body_bytes,
        metrics=service.metrics,
        paths={*API_PATHS, "/health", "/version", "/metrics"},
    )
    return app


API_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", MESSAGES_PATH, "/v1/models")


def build_api(service_of: Callable[[Request], JobService]) -> FastAPI:
    """Return an application with the paths of OpenAI and Anthropic; `service_of` says which service answers a
    request.
    """
    app = FastAPI(title="hybridflow", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    started = int(time.time())

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        return await _answer(service_of(request), request, body, ChatAnswer)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await _answer(service_of(request), request, body, CompletionAnswer)

    @app.post("/v1/responses")
    async def responses(body: ResponsesBody, request: Request) -> Response:
        return await _answer(service_of(request), request, body, partial(ResponsesAnswer, body=body))

    @app.post(MESSAGES_PATH)
    async def messages(body: MessagesBody, request: Request) -> Response:
        return await _answer(service_of(request), request, body, MessagesAnswer)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model_card(service_of(request).model, started)]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str, request: Request) -> Response:
        model = service_of(request).model
        _check_model(name, model)
        return JSONResponse(_model_card(model, started))

    for kind in (ApiError, RequestValidationError, ValidationError, RecursionError, HTTPException, Exception):
        app.add_exception_handler(kind, answer_error)
    return app


async def _answer(
    service: JobService,
    request: Request,
    body: AnyBody,
    answer_of: Callable[[Job, ServedModel], AnswerWriter],
) -> Response:
    """Make the job of a request, generate, and answer whole or as a stream."""

    def make(check: Check) -> Job:
        if isinstance(body, CompletionBody):
            return service.completion_job(body, check)
        return service.chat_job(body if isinstance(body, ChatBody) else body.chat(), check)

    _check_model(body.model, service.model)
    service.check_open()
    sent = await request.body()
    pictures = service.model.reader is not None and PICTURE_WORDS.search(sent) is not None

    async def answered() -> Response:
        # away from the event loop
        job = await service.readers.run(make, len(sent), pictures=pictures)
        answer = answer_of(job, service.model)
        if job.body.stream:
            return EventStream(service, job, answer)
        with service.admit(job):
            return JSONResponse(answer.whole(await service.whole(job)))

    return await while_connected(request.receive, answered()) or Response(status_code=GONE)


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer a request that raised an error; any but those that are named here is a fault of the server's."""
    path = request.url.path
    headers = None
    if isinstance(error, HTTPException):
        headers = error.headers
        error = ApiError(error.status_code, f"{request.method} {path}: {error.detail}")
    elif isinstance(error, RequestValidationError | ValidationError):
        error = _first_problem(error)
    elif isinstance(error, RecursionError):
        error = ApiError(400, "the request is nested too deeply")
    elif not isinstance(error, ApiError):
        error = ApiError(500, f"the server failed: {type(error).__name__}")
    elif error.status in (429, 503):
        headers = {"Retry-After": "1"}
    return ErrorResponse(error, path, headers)


def _first_problem(error: RequestValidationError | ValidationError) -> ApiError:
    problems = error.errors()
    # of the alternatives that a field has, the one that the value meant: not those of another type
    first = next((each for each in problems if each["type"] not in OTHER_TYPES), problems[0])
    if first["type"] == "json_invalid":
        why = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"the body is no JSON: {why}", code="invalid_json")
    begin = 1 if isinstance(error, RequestValidationError) else 0  # the first part of its places is "body"
    names = [str(part) for part in first["loc"][begin:]]
    place = ".".join(name for name in names if name.isidentifier() or name.isdecimal()) or "body"
    place = place.removesuffix(".str")
    why = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        why = "is no field of this endpoint, or one that is not supported"
    return ApiError(400, f"{place}: {why}", param=place)


def _check_model(name: str | None, model: ServedModel) -> None:
    if name not in (None, model.name) and not model.any_name:
        raise ApiError(
            404,
            f"there is no model {name!r} here, only {model.name!r}",
            param="model",
            code="model_not_found",
        )


def _model_card(model: ServedModel, started: int) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": started,
        "owned_by": "hybridflow",
        "max_model_len": model.max_model_len,
    }


class EventStream(Response):
    """Stream of server-sent events, one for each piece. A refusal to admit the job keeps its own status."""

    def __init__(self, service: JobService, job: Job, answer: AnswerWriter) -> None:
        super().__init__(
            status_code=200, media_type="text/event-stream", headers={"cache-control": "no-cache"}
        )
        del self.headers["content-length"]
        self._service = service
        self._job = job
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._service.admit(self._job):
            try:
                await while_connected(receive, self._send(send))
            except TimeoutError:
                logger.warning(
                    "a client read nothing of its stream for %g s: the stream is ended",
                    self._service.limits.send_timeout_s,
                )

    async def _send(self, slow_send: Send) -> None:
        async def send(message: Message) -> None:
            async with asyncio.timeout(self._service.limits.send_timeout_s):
                await slow_send(message)

        async with aclosing(self._events()) as events:
            first = await anext(events)  # a request that fails at once has its own status
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except ApiError as error:
                failure = self._event(self._answer.failure(error))
                await send({"type": "http.response.body", "body": failure, "more_body": True})
            end = b"" if self._answer.names_events else b"data: [DONE]\n\n"
            await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _events(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._service.pieces(self._job)) as pieces:
            async for piece in pieces:
                for event in self._answer.events(piece):
                    yield self._event(event)
        for event in self._answer.last_events():
            yield self._event(event)

    def _event(self, body: dict[str, Any]) -> bytes:
        name = b""
        if self._answer.names_events:
            name = f"event: {body['type']}\n".encode()
        return name + b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


async def while_connected(receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`; when the client goes away, cancel it and return None."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class Gate:
    """ASGI application around the server's own."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        max_body_bytes: int,
        metrics: ServerCounts,
        paths: Iterable[str],
        credential: str = TOKEN_HEADERS,
        size_option: str = " (--max-body-mb)",
    ) -> None:
        """`credential` and `size_option` are what messages say of sending the token and of larger bodies."""
        self.app = app
        self._credential = credential
        self._size_option = size_option
        self.metrics = metrics
        self.max_body_bytes = max_body_bytes
        self._token = None if token is None else token.encode()
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = False

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                path = scope["path"]
                if path not in self._paths:
                    path = "other"
                self.metrics.answers[path, message["status"]] += 1
            await send(message)

        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            # the one kind of error that a reader of the body passes on unchanged
            if read > self.max_body_bytes:
                raise HTTPException(413, self._too_large().message)
            return message

        try:
            self._check(scope)
            await self.app(scope, limited, counted)
        except ApiError as error:
            if begun:
                raise
            await ErrorResponse(error, scope["path"], HEADERS.get(error.status))(scope, receive, counted)
        except asyncio.CancelledError:  # the grace of running requests is over: nothing else cancels them
            if not begun:
                ended = ApiError(503, "the server has ended before the answer was whole")
                await ErrorResponse(ended, scope["path"])(scope, receive, counted)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        if self._token is not None and scope["path"] not in OPEN_PATHS:
            scheme, _, credentials = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer":  # RFC 7235: the name of a scheme may be in any case
                credentials = b""
            given = [credentials.strip(b" "), headers.get(b"x-api-key", b"")]
            if not any(hmac.compare_digest(each, self._token) for each in given):
                what = "the token is not the server's"
                if b"authorization" not in headers and b"x-api-key" not in headers:
                    what = "there is no token"
                raise ApiError(
                    401,
                    f"{what}: send the header {self._credential}",
                    code="invalid_api_key",
                )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body has more than {self.max_body_bytes} bytes{self._size_option}",
            code="body_too_large",
        )
