"""Gate that every request passes before its body is read: token, size limit, count of answers."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterable

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybridflow.rollout.server.errors import ApiError, ErrorResponse
from hybridflow.rollout.server.metrics import Metrics

OPEN_PATHS = ("/health",)
"""Paths that need no token: they only tell supervisors that the server lives."""
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 413: {"Connection": "close"}}
"""Headers of what the gate refuses, by status."""


class Gate:
    """ASGI application around the server's own."""

    def __init__(
        self, app: ASGIApp, *, token: str | None, max_body_bytes: int, metrics: Metrics, paths: Iterable[str]
    ) -> None:
        self.app = app
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
            # the one kind of error that whoever reads the body passes on as it is
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
        except asyncio.CancelledError:  # the grace of running requests is over: nobody else cancels them
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
                    f"{what}: send the header 'Authorization: Bearer TOKEN' (api_key of OpenAI's clients) or "
                    "'x-api-key: TOKEN' (of Anthropic's)",
                    code="invalid_api_key",
                )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body has more than {self.max_body_bytes} bytes (--max-body-mb)", code="body_too_large"
        )
