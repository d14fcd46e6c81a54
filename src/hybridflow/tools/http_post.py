"""Requests of tools to services: tried again while the service is busy, and so many at once."""

from __future__ import annotations

import asyncio
import functools
import ssl
import weakref
from typing import Any

import httpx

RETRY_DELAYS = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each further try; the deadline of the call ends them earlier."""
BUSY = (429, 500, 502, 503, 504)


class Limit:
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
    return httpx.create_ssl_context()  # reads all certificates: once a process


async def post(url: str, payload: dict[str, Any], *, timeout: float) -> Any:
    """Return the JSON answer of a service to a JSON request; `timeout` is in seconds, for each try.

    Raises httpx.HTTPError where it refuses, or after the last try, and ValueError for an answer that is no
    JSON.
    """
    async with httpx.AsyncClient(timeout=timeout, verify=_ssl_context()) as client:
        for delay in (*RETRY_DELAYS, None):
            try:
                response = await client.post(url, json=payload)
                response.raise_for_status()
                return response.json()
            except httpx.HTTPStatusError as error:
                if delay is None or error.response.status_code not in BUSY:
                    raise
            except httpx.TransportError:
                if delay is None:
                    raise
            await asyncio.sleep(delay)
