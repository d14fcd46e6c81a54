"""Errors of the server, in OpenAI's shape or, under its own path, in Anthropic's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
MESSAGES_PATH = "/v1/messages"
"""Path of Anthropic's interface, whose errors have their own shape."""
ANTHROPIC_KINDS = {**KINDS, 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}


class ApiError(Exception):
    """An error response: its status, the reason, and the field that is at fault."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """Return the error as OpenAI's clients read it."""
        kind = KINDS.get(self.status, "server_error")
        if self.status < 500:
            kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """Return the error as Anthropic's clients read it."""
        kind = ANTHROPIC_KINDS.get(self.status, "api_error")
        if self.status < 500:
            kind = ANTHROPIC_KINDS.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def refuse(param: str, why: str) -> ApiError:
    """Return the 400 for a field that is wrong or cannot be served."""
    return ApiError(400, f"{param}: {why}", param=param)


class ErrorResponse(JSONResponse):
    """An error in ASCII, so that it can quote what the client sent, whatever that is."""

    def __init__(self, error: ApiError, path: str, headers: Mapping[str, str] | None = None) -> None:
        body = error.anthropic_body if path.startswith(MESSAGES_PATH) else error.body
        super().__init__(body, error.status, headers)

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return json.dumps(content).encode()
