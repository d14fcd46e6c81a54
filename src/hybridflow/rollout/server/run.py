"""The server as a process: its address, its token, and its end."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from hybridflow.errors import ConfigError, RolloutError
from hybridflow.rollout.client import Replica
from hybridflow.rollout.server.app import build_app
from hybridflow.rollout.server.service import Service

logger = logging.getLogger(__name__)

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
WILDCARDS = ("", "0.0.0.0", "::")
"""Hosts to listen on that are no address: others find the machine by its name."""
BACKLOG = 2048
"""Connections that may wait to be accepted, also while the model is loaded."""
CLOSE_S = 2.0
"""Seconds that an engine has to end its step when the server ends."""
SHORTEST_TOKEN = 16
"""Characters of a token that guards a server on a network."""


def choose_token(
    host: str, given: str | None, *, no_token: bool = False, variable: str = "HYBRIDFLOW_SERVE_TOKEN"
) -> tuple[str | None, bool]:
    """Return the token, and whether it was made here; ConfigError for a missing one or an easy guess.

    `variable` is the variable of the environment that messages name.
    """
    if given is not None and (not given or not given.isascii() or not given.isprintable() or " " in given):
        raise ConfigError(
            "the server's token is empty or has characters that no header may have: set "
            f"{variable} to plain ASCII"
        )
    if host in LOCAL_HOSTS:
        if no_token and given is not None:
            raise ConfigError(
                f"--no-token and a token (--api-key or {variable}) exclude each other: leave one of them out"
            )
        if given is not None or no_token:
            return given, False
        return secrets.token_urlsafe(24), True
    if given is None or len(given) < SHORTEST_TOKEN:
        raise ConfigError(
            f"--host {host} lets others on the network in, so it needs a token of at least {SHORTEST_TOKEN} "
            f"characters: set {variable}, or leave --host out to serve this machine only"
        )
    return given, False


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that takes connections, which are answered once the server runs; ConfigError where the
    address is taken or not this machine's.
    """
    if not 0 <= port <= 65535:  # the system takes some of them for another port
        raise ConfigError(f"--port {port}: wanted 1 to 65535, or 0 for any free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}. Give another --port (0: any free "
            "one) or --host"
        ) from error
    return bound


def run_server(service: Service, bound: socket.socket, *, token: str | None, grace_s: int = 30) -> None:
    """Serve until SIGINT or SIGTERM; then refuse new requests, wait for running ones, and close the engines,
    all within about `grace_s` seconds. At its exit the process ends at once, whatever a thread is doing.
    """
    _raise_file_limit()
    try:
        DrainingServer(service, token=token, grace_s=grace_s).run([bound])
    finally:
        bound.close()
        _close_engines(service.client.replicas)
    # Python's own end clears every module, for seconds, and a thread inside of C++ code does not survive that
    atexit.register(_end_process)


def _close_engines(replicas: Sequence[Replica]) -> None:
    """Close all engines within `CLOSE_S` seconds, and leave those that are still inside of a step."""
    for replica in replicas:
        with suppress(RolloutError):
            replica.close(0.0)  # they end their steps at the same time
    ends = time.monotonic() + CLOSE_S
    for replica in replicas:
        try:
            replica.close(max(0.0, ends - time.monotonic()))
        except RolloutError as error:
            logger.warning("the process ends all the same: %s", error)


def _end_process() -> None:
    """End the process at once, in place of Python's own end."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class DrainingServer(uvicorn.Server):
    """Server that answers 503 to requests that come after the signal to end."""

    def __init__(self, service: Service, *, token: str | None, grace_s: int = 30) -> None:
        app = build_app(service, token=token)
        # what is left of the grace is for closing the engines
        super().__init__(server_config(app, max(grace_s - round(CLOSE_S), (grace_s + 1) // 2)))
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse new requests and end when running ones are answered; a second SIGINT ends at once."""
        self._service.draining = True
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True


class LoopServer(uvicorn.Server):
    """Server in an event loop that others use too, until that ends; signals stay with their present
    handlers.
    """

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        _raise_file_limit()
        super().__init__(server_config(app, grace_s=1))
        bound = listen(host, port)
        told = socket.gethostname() if host in WILDCARDS else host
        if ":" in told:
            told = f"[{told}]"
        self.address = f"http://{told}:{bound.getsockname()[1]}"
        """Start of its URLs; connections are taken at once, and answered when the event loop goes on."""
        self._serving = asyncio.create_task(self._serve_to_the_end(bound))
        self._serving.add_done_callback(lambda _: bound.close())  # also where the task never began

    @property
    def has_ended(self) -> bool:
        """Whether its event loop has ended."""
        return self._serving.done()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the handlers of signals as they are."""
        yield

    async def _serve_to_the_end(self, bound: socket.socket) -> None:
        """Serve until the event loop cancels this; requests that still run are cancelled after a second."""
        try:
            await self.serve([bound])
        except asyncio.CancelledError:
            if self.started:
                await self.shutdown([bound])
            raise


def server_config(app: ASGIApp, grace_s: int) -> uvicorn.Config:
    """Return uvicorn's settings; running requests have `grace_s` seconds at the end."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        ws="none",
        lifespan="off",
        timeout_graceful_shutdown=grace_s,
        server_header=False,
    )


def _raise_file_limit() -> None:
    """Raise the limit of open files as far as the system allows: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            logger.warning(
                "at most %d connections at once: the limit of open files cannot be raised (%s)", soft, error
            )
