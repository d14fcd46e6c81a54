"""Messages between the trainer and a reward worker, each with a mark, its length and a checksum.

    payload ──frame──► mark [4] · length [8] · crc32 [4] · payload ──socket──► take_messages ──► payload

A reward function runs in the worker's process and can write to any of its file descriptors. Bytes that it
writes into this socket do not begin with the mark, so they are noticed and never read as a message.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import zlib

MARK = b"HFR1"
MAX_MESSAGE = 1 << 31
"""Longest payload in bytes; a header that asks for more is no header of ours."""

_HEADER = struct.Struct(">4sQI")
_CHUNK = 1 << 20


class ChannelBroken(Exception):
    """The bytes on the socket are not messages of ours."""


def frame(payload: bytes) -> bytes:
    """The payload with its header, as it goes over the socket."""
    return _HEADER.pack(MARK, len(payload), zlib.crc32(payload)) + payload


def take_messages(buffer: bytearray) -> list[bytes]:
    """Remove the complete messages from the front of `buffer` and return their payloads.

    Raises ChannelBroken where the buffer begins with no header, or a payload lacks its checksum.
    """
    messages = []
    while buffer:
        begin = bytes(buffer[: len(MARK)])
        if not MARK.startswith(begin):
            raise ChannelBroken(f"bytes that are no message: {bytes(buffer[:40])!r}")
        if len(buffer) < _HEADER.size:
            break
        _, length, checksum = _HEADER.unpack_from(buffer)
        if length > MAX_MESSAGE:
            raise ChannelBroken(f"a message of {length} bytes is announced")
        end = _HEADER.size + length
        if len(buffer) < end:
            break
        payload = bytes(memoryview(buffer)[_HEADER.size : end])
        if zlib.crc32(payload) != checksum:
            raise ChannelBroken("a message does not have its checksum")
        del buffer[:end]
        messages.append(payload)
    return messages


class Channel:
    """The trainer's end of the socket to a worker. No call blocks: what does not fit waits in `unsent`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._received = bytearray()
        self.unsent = bytearray()

    def fileno(self) -> int:
        """The socket's file descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, payload: bytes) -> None:
        """Queue a message and send what the socket takes now; OSError if the other end is gone."""
        self.unsent += frame(payload)
        self.flush()

    def flush(self) -> None:
        """Send as much of `unsent` as the socket takes now. Raises OSError if the other end is gone."""
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                sent = self._socket.send(memoryview(self.unsent)[:_CHUNK])
                del self.unsent[:sent]

    def receive(self) -> tuple[list[bytes], bool]:
        """The messages that have arrived, and whether the other end is closed.

        Raises ChannelBroken for bytes that are no messages, OSError if the connection failed.
        """
        closed = False
        with contextlib.suppress(BlockingIOError):
            while chunk := self._socket.recv(_CHUNK):
                self._received += chunk
            closed = True
        return take_messages(self._received), closed

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
