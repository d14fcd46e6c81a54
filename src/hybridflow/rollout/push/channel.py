"""Frames of JSON between the process that sends weights and those that receive them, over one TCP connection
each.

    Listener ◄── connect, token ── Channel of a receiver          then frames in turn: length [4 bytes], JSON

The tensors themselves do not travel here, but by a transport (`transports.py`). A connection that closes too
early is an error on both sides.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from hybridflow.errors import RolloutError

_LENGTH = struct.Struct("!I")
_TOKEN_BYTES = 64
_TOKEN_S = 5.0


class Channel:
    """One connection; a wait longer than `timeout` seconds is a RolloutError."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        connection.settimeout(timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection

    @classmethod
    def connect(cls, host: str, port: int, token: str, timeout: float) -> Channel:
        """The receiver's end."""
        connection = socket.create_connection((host, port), timeout=timeout)
        connection.sendall(token.encode())
        return cls(connection, timeout)

    def send(self, frame: Any) -> None:
        """Send one frame; RolloutError where the other side is gone."""
        data = json.dumps(frame).encode()
        try:
            self._connection.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise RolloutError(f"the other side of a push of weights is gone: {error}") from error

    def receive(self) -> Any:
        """The next frame; RolloutError where the other side closes first, or says nothing for too long."""
        (size,) = _LENGTH.unpack(read_exactly(self._connection, _LENGTH.size))
        return json.loads(read_exactly(self._connection, size))

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


class Listener:
    """Waits for receivers on a free port of `host`; only those that bring its token come in."""

    def __init__(self, host: str) -> None:
        self.token = secrets.token_hex(_TOKEN_BYTES // 2)
        self._socket = socket.create_server((host, 0))
        self.host, self.port = host, int(self._socket.getsockname()[1])

    def accept(self, count: int, *, timeout: float, failed: Callable[[], bool]) -> list[Channel]:
        """The channels of `count` receivers; RolloutError where they do not come, or once `failed` says that
        none will.
        """
        channels: list[Channel] = []
        self._socket.settimeout(0.2)
        end = time.monotonic() + timeout
        while len(channels) < count:
            if failed() or time.monotonic() > end:
                for channel in channels:
                    channel.close()
                raise RolloutError(
                    f"{len(channels)} of {count} workers of the engine came to fetch weights within "
                    f"{timeout:.0f} s"
                )
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            # whoever has it sends it at once: a stranger's silence must not hold the others up
            connection.settimeout(_TOKEN_S)
            try:
                known = hmac.compare_digest(read_exactly(connection, _TOKEN_BYTES), self.token.encode())
            except RolloutError:
                known = False
            if known:
                channels.append(Channel(connection, timeout))
            else:
                connection.close()
        return channels

    def close(self) -> None:
        """Take no more connections."""
        self._socket.close()


def read_exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes; RolloutError where the connection ends before."""
    data = bytearray()
    while len(data) < size:
        try:
            part = connection.recv(min(size - len(data), 1 << 20))
        except OSError as error:
            raise RolloutError(f"a push of weights stopped: {error}") from error
        if not part:
            raise RolloutError("a push of weights was cut off before its end")
        data += part
    return bytes(data)
