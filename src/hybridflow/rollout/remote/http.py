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
    """No answer, or one that was cut off."""


class Refused(RolloutError):
    """The server answered that it will not."""


class Call(http.client.HTTPConnection):
    """A call whose answer one thread reads and another may cut off."""

    _socket: socket.socket | None = None

    def connect(self) -> None:
        """As any connection; the socket is remembered, which a connection forgets once an answer has begun."""
        super().connect()
        self._socket = self.sock

    def events(self) -> Iterator[dict[str, Any]]:
        """What a server streams, event by event; Refused with what it says, ServerGone where it ends before
        it has said that it is done.
        """
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
        """End it, also while the other thread waits for its next bytes: closing alone would wait with it."""
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                self._socket.shutdown(socket.SHUT_RDWR)
        self.close()


class Address:
    """Where a server is."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise RolloutError(f"actor_rollout_ref.rollout.server.address={url!r}: wanted http://HOST:PORT")
        self.url, self.host, self.port = url, parts.hostname, parts.port or 80

    def call(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout: float,
        method: str = "POST",
        text: bool = False,
    ) -> Any:
        """The JSON that the server answers, or its text; ServerGone, or Refused with what it says."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            connection.request(
                method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerGone(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise Refused(f"{self.url}{path} answered {response.status}: {said(data)}")
        if text:
            return data.decode(errors="replace")
        return json.loads(data) if data else None

    def begin(self, path: str, body: dict[str, Any], *, timeout: float) -> Call:
        """Ask for something whose answer is read piece by piece; ServerGone."""
        connection = Call(self.host, self.port, timeout=timeout)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ServerGone(f"{type(error).__name__}: {error}") from error
        return connection


def said(data: bytes) -> str:
    """The beginning of an answer, for messages."""
    return " ".join(data.decode(errors="replace").split())[:400]
