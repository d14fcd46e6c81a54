"""An engine behind HTTP: JSON calls to its server, and a server that this process starts. It waits until
the server answers, ends it with itself, and keeps its log for error messages.
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hybridflow.errors import RolloutError
from hybridflow.processes.supervisor import SupervisedProcess

_STOP_S = 10.0
"""Seconds a server has to end itself and its workers."""


class ServerGone(Exception):
    """The server did not answer, or its answer was cut off."""


class Refused(RolloutError):
    """The server refused the request; `status` is that of its answer, 0 where it told none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class HttpCall(http.client.HTTPConnection):
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
                raise Refused(said(response.read()), response.status)
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
            raise Refused(f"{self.url}{path} answered {response.status}: {said(data)}", response.status)
        return data

    def begin(
        self, path: str, body: dict[str, Any] | None, *, timeout: float, method: str = "POST"
    ) -> HttpCall:
        """Begin a call whose answer is read piece by piece; raises ServerGone."""
        connection = HttpCall(self.host, self.port, timeout=timeout)
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


class ServerProcess:
    """A running server. `command`: its whole command line. `engine`: its name in messages."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, engine: str) -> None:
        self.engine = engine
        handle, path = tempfile.mkstemp(prefix=f"hybridflow_{engine}_", suffix=".log")
        self.log = Path(path)
        with os.fdopen(handle, "wb") as log:
            self._process = SupervisedProcess(
                command,
                grace_s=_STOP_S,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.pid = self._process.keeper.pid
        atexit.register(self.stop)

    @classmethod
    def start(
        cls, command: Sequence[str], environment: Mapping[str, str], *, engine: str, timeout: float
    ) -> tuple[Address, ServerProcess]:
        """Start a server on a free port that only this machine reaches; RolloutError where it does not start.
        `command`: its command line without host and port. `timeout`: seconds until it answers.
        """
        port = free_port()
        process = cls([*command, "--host", "127.0.0.1", "--port", str(port)], environment, engine=engine)
        address = Address(f"http://127.0.0.1:{port}")
        process.wait_until_ready(address, timeout)
        return address, process

    def exit_code(self) -> int | None:
        """Return the exit code, or None while the server runs."""
        return self._process.keeper.poll()

    def wait_until_ready(self, address: Address, timeout: float) -> None:
        """Wait until the server answers; RolloutError with the end of its log where it does not."""
        end = time.monotonic() + timeout
        problem = "did not start"
        while self.exit_code() is None:
            try:
                address.call("/health", timeout=5.0, method="GET")
                return
            except (ServerGone, Refused):
                time.sleep(0.5)
            if time.monotonic() > end:
                key = "actor_rollout_ref.rollout.server.start_timeout"
                problem = f"did not answer within {timeout:.0f} s ({key})"
                break
        words = self.last_words()
        self.stop()
        raise RolloutError(f"the {self.engine} server {problem}{words}")

    def last_words(self) -> str:
        """Return the exit code, if the server has ended, and the end of its log."""
        try:
            code: int | None = self._process.keeper.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            code = None
        how = "" if code is None else f" (exit code {code})"
        lines = [
            line
            for line in self.log.read_text(errors="replace").splitlines()
            if line.strip() and "GET /health" not in line
        ]
        if not lines:
            return how
        return f"{how}; its log {self.log} ends: {' | '.join(lines[-3:])[-500:]}"

    def stop(self) -> None:
        """End the server and its workers; a second call does nothing."""
        if self.exit_code() is None:
            self._process.kill()
            self.log.unlink(missing_ok=True)
        atexit.unregister(self.stop)


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
