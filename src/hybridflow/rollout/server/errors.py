"""What a client of the server did wrong, or the server could not do, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An answer that is no success: status, reason, and the field that is to blame."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refuse(param: str, why: str) -> ApiError:
    """400 for a field that is wrong or cannot be served."""
    return ApiError(400, f"{param}: {why}", param=param)
