"""Errors of the server in OpenAI's shape."""

from __future__ import annotations

from typing import Any

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
