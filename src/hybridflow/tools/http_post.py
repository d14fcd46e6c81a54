"""HTTP requests to services, with retries while the service is busy, and a limit on concurrency."""

from __future__ import annotations

import asyncio
import functools
import os
import ssl
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

RETRY_DELAYS = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each further try; the deadline of the call ends them earlier."""
BUSY = (429, 500, 502, 503, 504)


class OpenRequests:
    """A number of requests that may be open at once, in whichever event loop they are made."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._of: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._of = weakref.WeakKeyDictionary()

    def here(self) -> asyncio.Semaphore:
        """Return the semaphore of the running event loop; a run has one loop a step."""
        return self._of.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._number))


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    import httpx

    return httpx.create_ssl_context()  # reads all certificates: once a process


async def ask_model(
    messages: Sequence[Mapping[str, Any]],
    *,
    model: str,
    base_url: str | None = None,
    timeout: float = 60.0,
    **fields: Any,
) -> str:
    """Return the answer of a model behind an OpenAI-compatible endpoint to a conversation.

    The endpoint is `base_url`, else OPENAI_BASE_URL of the environment, else OpenAI's; its key is
    OPENAI_API_KEY. `fields` are further ones of the request. Raises as `post` does.
    """
    base_url = base_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"
    headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"}
    request = {"model": model, "messages": list(messages), **fields}
    answer = await post(f"{base_url.rstrip('/')}/chat/completions", request, timeout=timeout, headers=headers)
    return str(answer["choices"][0]["message"]["content"])


async def post(
    url: str, payload: dict[str, Any], *, timeout: float, headers: Mapping[str, str] | None = None
) -> Any:
    """Return the JSON answer of a service to a JSON request; `timeout` is in seconds, for each try.

    Raises httpx.HTTPError where it refuses, or after the last try, and ValueError for an answer that is no
    JSON.
    """
    import httpx  # here, because workers that post nothing start faster without it

    async with httpx.AsyncClient(timeout=timeout, verify=_ssl_context()) as client:
        for delay in (*RETRY_DELAYS, None):
            try:
                response = await client.post(url, json=payload, headers=headers)
                response.raise_for_status()
                return response.json()
            except httpx.HTTPStatusError as error:
                if delay is None or error.response.status_code not in BUSY:
                    raise
            except httpx.TransportError:
                if delay is None:
                    raise
            await asyncio.sleep(delay)
