"""A way for receivers to a server that listens on this machine's loopback alone: connections that bring a
token are passed on to it, all others are closed.

    receiver's client ──► TunnelEnd ── connect, token ──► Tunnel ──► server at 127.0.0.1
      (its machine)        127.0.0.1      (network)        host      (the sender's machine)

torch's TCPStore takes commands from whoever connects, so a push by process group keeps it behind one of
these. What is left is each machine's own loopback: other users of the two machines can reach the ends there.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from hybridflow.rollout.push.channel import Listener, connect

LOOPBACK = "127.0.0.1"
_CHUNK = 1 << 16


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
    """A receiver's end: a port of its own loopback that leads to the server behind a `Tunnel`."""

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
