"""JSON calls to an engine's HTTP server."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from hybridflow.errors import RolloutError


class ServerGone(Exception):
    """The server did not answer, or its answer was cut off."""


class Refused(RolloutError):
    """The server refused the request."""


class Call(http.client.HTTPConnection):
    """A call whose answer is read by one thread and may be cut off by another."""

    _socket: socket.socket | None = None

    def connect(self) -> None:
        """Connect, and remember the socket: a connection forgets it once an answer has begun."""
        super().connect()
        self._socket = self.sock

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream; raises Refused, and ServerGone where it ends before "[DONE]"."""
        try:
            response = self.getresponse()
            if response.status != 200:
                raise Refused(said(response.read()))
            for line in response:
                if line.strip() == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    yield json.loads(line[len(b"data: ") :])
        except (
            OSError,
            http.client.HTTPException,
            ValueError,
            AttributeError,
        ) as error:  # the last two: hung up meanwhile
            raise ServerGone(f"{type(error).__name__}: {error}") from error
        finally:
            self.close()
        raise ServerGone("the stream ended before the response did")

    def hang_up(self) -> None:
        """End the call, also while another thread waits for its next bytes."""
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                self._socket.shutdown(socket.SHUT_RDWR)
        self.close()


class Address:
    """The host and port of a server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise RolloutError(f"actor_rollout_ref.rollout.server.address={url!r}: wanted http://HOST:PORT")
        self.url = url
        self.host = parts.hostname
        self.port = parts.port or 80

    def call(
        self, path: str, body: dict[str, Any] | None = None, *, timeout: float, method: str = "POST"
    ) -> bytes:
        """Return what the server answers; raises ServerGone or Refused."""
        connection = self.begin(path, body, timeout=timeout, method=method)
        try:
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerGone(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise Refused(f"{self.url}{path} answered {response.status}: {said(data)}")
        return data

    def begin(self, path: str, body: dict[str, Any] | None, *, timeout: float, method: str = "POST") -> Call:
        """Begin a call whose answer is read piece by piece; raises ServerGone."""
        connection = Call(self.host, self.port, timeout=timeout)
        data = None if body is None else json.dumps(body)
        try:
            connection.request(method, path, data, {"Content-Type": "application/json"})
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ServerGone(f"{type(error).__name__}: {error}") from error
        return connection


def said(data: bytes) -> str:
    """Return the beginning of an answer, for messages."""
    return " ".join(data.decode(errors="replace").split())[:400]
