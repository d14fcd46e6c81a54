"""What goes between the sandbox and its fork server: JSON, after its length in four bytes."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!I")
MAX_BYTES = 1 << 30


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    """Send one message."""
    payload = json.dumps(message).encode()
    channel.sendall(_LENGTH.pack(len(payload)) + payload)


def receive(channel: socket.socket) -> dict[str, Any]:
    """Return the next message. Raises EOFError if the other side has ended, and what the socket raises."""
    (length,) = _LENGTH.unpack(_read(channel, _LENGTH.size))
    if length > MAX_BYTES:
        raise EOFError(f"a message of {length} bytes")
    message: dict[str, Any] = json.loads(_read(channel, length))
    return message


def _read(channel: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        part = channel.recv(min(length, 1 << 20))
        if not part:
            raise EOFError("the other side has ended")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
