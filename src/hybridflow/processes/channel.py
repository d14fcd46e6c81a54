"""Messages between the driver and a worker process, each with a mark, its length and a checksum.

    payload ──frame──► mark [4] · length [8] · crc32 [4] · payload ──socket──► take_messages ──► payload

The user's code runs in the worker's process and can write to any of its file descriptors. Bytes that it
writes into this socket do not begin with the mark, so they are noticed and never read as a message.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import zlib
from queue import SimpleQueue

MARK = b"HFR1"
MAX_MESSAGE = 1 << 31
"""Longest payload in bytes; a header that asks for more is no header of ours."""

_HEADER = struct.Struct(">4sQI")
CHUNK = 1 << 20
"""Bytes that are read or sent at once."""


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


class DriverEnd:
    """The worker's end of the socket: blocking writes, and a thread that reads into `inbox`.

    Where the driver closes the socket, the worker ends, and its keeper ends all that the user's code started.
    """

    def __init__(self, file_descriptor: int) -> None:
        # otherwise a process that the user's code starts would hold the socket open
        os.set_inheritable(file_descriptor, False)
        self._socket = socket.socket(fileno=file_descriptor)
        self._socket.setblocking(True)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self.inbox: SimpleQueue[bytes] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def write(self, payload: bytes) -> None:
        """Send one message; end the process where the driver is gone."""
        if os.getpid() != self._process:
            os._exit(1)  # a fork that the user's code made and let return: only the worker answers
        try:
            with self._lock:
                self._socket.sendall(frame(payload))
        except OSError:
            os._exit(1)

    def _read(self) -> None:
        buffer = bytearray()
        try:
            while chunk := self._socket.recv(CHUNK):
                buffer += chunk
                for message in take_messages(buffer):
                    self.inbox.put(message)
        finally:  # the driver closed the socket or is dead, or the user's code closed it
            os._exit(1)
