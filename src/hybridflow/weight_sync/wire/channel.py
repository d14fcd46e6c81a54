"""Frames of JSON between the process that sends weights and those that receive them, over one TCP connection
each.

    Listener ◄── connect, token ── Channel of a receiver          then frames in turn: length [4 bytes], JSON

The tensors themselves do not travel here, but by a transport (`transports.py`). A connection that closes too
early is an error on both sides.

A tunnel is the way for receivers to a server that listens on this machine's loopback alone: connections that
bring a token are passed on to it, all others are closed.

    receiver's client ──► TunnelEnd ── connect, token ──► Tunnel ──► server at 127.0.0.1
      (its machine)        127.0.0.1      (network)        host      (the sender's machine)

torch's TCPStore takes commands from any client, so a push by process group keeps it behind one of
these. What is left is each machine's own loopback: other users of the two machines can reach the ends there.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from hybridflow.errors import RolloutError

_LENGTH = struct.Struct("!I")
_TOKEN_BYTES = 64
_TOKEN_S = 5.0
"""Seconds that a connection may take to send its token."""
_MAX_PENDING = 256
"""Connections without a token that are kept at a time; one more ends the oldest of them."""
_POLL_S = 0.2
LOOPBACK = "127.0.0.1"
_CHUNK = 1 << 16


class Channel:
    """One connection; a wait longer than `timeout` seconds is a RolloutError."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        connection.settimeout(timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._incoming = connection.makefile("rb")

    @classmethod
    def connect(cls, host: str, port: int, token: str, timeout: float) -> Channel:
        """Connect to a `Listener` as one of its receivers."""
        return cls(connect(host, port, token, timeout), timeout)

    def send(self, frame: Any) -> None:
        """Send one frame; RolloutError where the other side is gone."""
        data = json.dumps(frame).encode()
        try:
            self._connection.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise RolloutError(f"the other side of a push of weights is gone: {error}") from error

    def receive(self) -> Any:
        """Return the next frame; RolloutError where the other side closes first or is silent for too long."""
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return json.loads(self._read(size))

    def _read(self, size: int) -> bytes:
        try:
            data = self._incoming.read(size)
        except OSError as error:
            raise RolloutError(f"a push of weights stopped: {error}") from error
        if len(data) < size:
            raise RolloutError("a push of weights was cut off before its end")
        return data

    def close(self) -> None:
        """Close the connection."""
        self._incoming.close()
        self._connection.close()


@dataclass
class _Pending:
    """A connection that has not sent its whole token yet."""

    connection: socket.socket
    ends: float
    """Time, on the monotonic clock, at which it is closed."""
    data: bytearray = field(default_factory=bytearray)


class Listener:
    """A free port of `host` where receivers connect. Only those that send its token are let in, and a silent
    one delays no other: tokens are read from all side by side.
    """

    def __init__(self, host: str) -> None:
        self.token = secrets.token_hex(_TOKEN_BYTES // 2)
        self._socket = socket.create_server((host, 0))
        self._socket.setblocking(False)
        self.host = host
        self.port = int(self._socket.getsockname()[1])

    def accept(self, count: int, *, timeout: float, failed: Callable[[], bool]) -> list[Channel]:
        """Return the channels of `count` receivers; RolloutError where they do not come within `timeout`
        seconds, or once `failed` returns true: then none will come.
        """
        channels: list[Channel] = []
        end = time.monotonic() + timeout
        arrivals = self.arrivals(lambda: failed() or time.monotonic() > end)
        while len(channels) < count:
            connection = next(arrivals, None)
            if connection is None:
                for channel in channels:
                    channel.close()
                raise RolloutError(
                    f"{len(channels)} of {count} workers of the engine came to fetch weights within "
                    f"{timeout:.0f} s"
                )
            channels.append(Channel(connection, timeout))
        arrivals.close()
        return channels

    def arrivals(self, stopped: Callable[[], bool]) -> Generator[socket.socket]:
        """Yield each connection that has sent the token, until `stopped` returns true."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            pending: dict[int, _Pending] = {}
            try:
                while not stopped():
                    for key, _ in selector.select(_POLL_S):
                        if key.fileobj is self._socket:
                            self._greet(selector, pending)
                            continue
                        visitor = pending.get(key.fd)
                        if visitor is None:  # another one's arrival has just ended it
                            continue
                        known = self._knows(visitor)
                        if known is None:
                            continue
                        selector.unregister(visitor.connection)
                        del pending[key.fd]
                        if known:
                            visitor.connection.setblocking(True)
                            yield visitor.connection
                        else:
                            visitor.connection.close()
                    self._drop_late(selector, pending)
            finally:
                for visitor in pending.values():
                    visitor.connection.close()

    def _greet(self, selector: selectors.BaseSelector, pending: dict[int, _Pending]) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:  # it has gone again
            return
        connection.setblocking(False)
        if len(pending) >= _MAX_PENDING:
            oldest = next(iter(pending))
            selector.unregister(pending[oldest].connection)
            pending.pop(oldest).connection.close()
        pending[connection.fileno()] = _Pending(connection, time.monotonic() + _TOKEN_S)
        selector.register(connection, selectors.EVENT_READ)

    def _knows(self, visitor: _Pending) -> bool | None:
        """Read what a connection has sent: whether that is the token, or None while a part is missing."""
        try:
            part = visitor.connection.recv(_TOKEN_BYTES - len(visitor.data))
        except BlockingIOError:
            return None
        except OSError:
            return False
        visitor.data += part
        if part and len(visitor.data) < _TOKEN_BYTES:
            return None
        return hmac.compare_digest(bytes(visitor.data), self.token.encode())

    def _drop_late(self, selector: selectors.BaseSelector, pending: dict[int, _Pending]) -> None:
        now = time.monotonic()
        for number in [number for number, visitor in pending.items() if now > visitor.ends]:
            selector.unregister(pending[number].connection)
            pending.pop(number).connection.close()

    def close(self) -> None:
        """Take no more connections."""
        self._socket.close()


def connect(host: str, port: int, token: str, timeout: float) -> socket.socket:
    """Connect to a `Listener` and send its token."""
    connection = socket.create_connection((host, port), timeout=timeout)
    try:
        connection.sendall(token.encode())
    except BaseException:
        connection.close()
        raise
    return connection


class Tunnel(Listener):
    """The server's end: passes connections with the token on to port `target` of this machine."""

    def __init__(self, host: str, target: int) -> None:
        super().__init__(host)
        self._target = target
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="push-tunnel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more connections; those that are open end with their client."""
        self._closed.set()
        self._thread.join()
        super().close()

    def _serve(self) -> None:
        for visitor in self.arrivals(self._closed.is_set):
            try:
                server = socket.create_connection((LOOPBACK, self._target))
            except OSError:
                visitor.close()
                continue
            _join(visitor, server)


class TunnelEnd:
    """A receiver's end: a port of its loopback that leads to the server behind a `Tunnel`."""

    def __init__(self, host: str, port: int, token: str, timeout: float) -> None:
        self._far = (host, port, token, timeout)
        self._socket = socket.create_server((LOOPBACK, 0))
        self.host = LOOPBACK
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, name="push-tunnel-end", daemon=True).start()

    def close(self) -> None:
        """Take no more connections; those that are open end with their client."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # closing alone would leave `accept` waiting
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:  # closed
                return
            try:
                far = connect(*self._far)
            except OSError:
                client.close()
                continue
            far.settimeout(None)
            _join(client, far)


def _join(one: socket.socket, other: socket.socket) -> None:
    """Pass on what either side sends until one of them closes."""
    for source, target in ((one, other), (other, one)):
        threading.Thread(target=_pass_on, args=(source, target), name="push-tunnel-pipe", daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
    # both directions come here: the sockets close when the last one lets go of them
