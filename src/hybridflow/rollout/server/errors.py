"""Errors of the server in OpenAI's shape."""

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


class ApiError(Exception):
    """Answer that is no success: its status, the reason, and the field that is to blame."""

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


def refuse(param: str, why: str) -> ApiError:
    """Return the 400 for a field that is wrong or cannot be served."""
    return ApiError(400, f"{param}: {why}", param=param)


class ErrorResponse(JSONResponse):
    """An error in ASCII, so that it can quote what the client sent, whatever that is."""

    def __init__(self, error: ApiError, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(error.body, error.status, headers)

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return json.dumps(content).encode()
