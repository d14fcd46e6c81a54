"""Messages between the driver and a worker process, framed by a magic number, length and checksum.

    payload ──frame──► mark [4] · length [8] · crc32 [4] · payload ──socket──► take_messages ──► payload

The user's code runs in the worker's process and can write to any of its file descriptors. Bytes that it
writes into this socket do not begin with the mark, so they are noticed and never read as a message.

A message is a pickle of the user's objects, whose classes may come from a file that `data/plugin.py` has
loaded. Such a class is written as its file and its name, so a process that has not loaded the file can read
it. What owns something that ends with it (an object with `__del__`, a temporary folder) does not pickle: the
copy that a process has no more use for would take it away from the others.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import socket
import struct
import sys
import threading
import weakref
import zlib
from operator import attrgetter
from queue import SimpleQueue
from types import FunctionType
from typing import Any

from hybridflow.data.plugin import PLUGIN, load_module

MARK = b"HFR1"
MAX_MESSAGE = 1 << 31
"""Longest payload in bytes; a header that asks for more is no header of ours."""

_HEADER = struct.Struct(">4sQI")
CHUNK = 1 << 20
"""Bytes that are read or sent at once."""
MAX_BYTES = 1 << 26
"""Longest pickle: the driver holds the state of each of thousands of objects."""


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


def dumps(value: Any) -> bytes:
    """Pickle a value; whatever its own code raises comes out, and PicklingError where it is too large."""
    written = io.BytesIO()
    _ChannelPickler(written, pickle.HIGHEST_PROTOCOL).dump(value)
    if written.tell() > MAX_BYTES:
        raise pickle.PicklingError(
            f"a {type(value).__name__} of {written.tell()} bytes: at most {MAX_BYTES} go between processes"
        )
    return written.getvalue()


class _ChannelPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if hasattr(type(value), "__del__") or isinstance(value, weakref.finalize):
            raise pickle.PicklingError(f"a {type(value).__name__} ends something when it is deleted")
        if isinstance(value, type | FunctionType) and str(value.__module__).startswith(PLUGIN):
            module = sys.modules[value.__module__]
            with contextlib.suppress(AttributeError):  # of a class inside a function
                if attrgetter(value.__qualname__)(module) is value:
                    return _find, (module.__name__, module.__file__, value.__qualname__)
        return NotImplemented


def _find(module: str, file: str, name: str) -> Any:
    """Return a class or function of a user's file, which is loaded where it is not yet."""
    return attrgetter(name)(sys.modules.get(module) or load_module(file, key="a class of the user's"))
