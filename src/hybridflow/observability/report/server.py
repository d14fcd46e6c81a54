"""The page served on this machine while a run writes: `hybridflow view --live RUN`.

    browser ──GET /?token=…──► the page        ──GET /changes?run=0&after=CURSOR──► what is new in the files
                                               ──GET /trajectory?run=0&kind=…&step=…&index=…──► its rows

It listens on the loopback address only. Every request needs the token that was made at the start, and names
a run by its number, never a path. The run is not asked for anything: this process can end without harm.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hybridflow.errors import ConfigError
from hybridflow.observability.report.follow import RunFollower
from hybridflow.observability.report.page import render

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")
"""Names that it answers to. Another one is that of a foreign page that has bound its own to this machine."""


class LiveServer:
    """Serves the page of a run, and of one to compare it with."""

    def __init__(self, runs: Sequence[str | Path], port: int = 0) -> None:
        """Listen on `port`, 0: one that is free. ConfigError where the port is taken."""
        self.token = secrets.token_urlsafe(24)
        self.followers = [RunFollower(run) for run in runs]
        self._lock = threading.Lock()
        self._page, self._policy = render({"live": len(runs)}, live=True)
        try:
            self._http = ThreadingHTTPServer((HOST, port), self._handler())
        except OSError as error:
            raise ConfigError(f"port {port} cannot be listened on ({error}): set another --port") from error
        self._http.daemon_threads = True

    @property
    def url(self) -> str:
        """Address of the page, with the token."""
        return f"http://{HOST}:{self._http.server_port}/?token={self.token}"

    def serve(self) -> None:
        """Answer until `close` is called."""
        self._http.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop to answer, and let the port go."""
        self._http.shutdown()
        self._http.server_close()

    def answer(self, target: str, host: str, token: str) -> tuple[int, str, str]:
        """Return status, content type and body for a request."""
        url = urlsplit(target)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        if host.rpartition(":")[0] not in _NAMES:
            return 403, "text/plain", "this server answers to 127.0.0.1 and localhost"
        given = (token or query.get("token", "")).encode("utf-8", "replace")
        if not hmac.compare_digest(given, self.token.encode()):
            return (
                403,
                "text/plain",
                "the token is missing or wrong: open the address that the command printed",
            )
        if url.path == "/":
            return 200, "text/html", self._page
        try:
            follower = self.followers[_number(query, "run", len(self.followers))]
            if url.path == "/changes":
                with self._lock:
                    follower.poll()
                    return 200, "application/json", _json(follower.changes(query.get("after", "")))
            if url.path == "/trajectory":
                step = _number(query, "step")
                index = _number(query, "index")
                with self._lock:
                    rows = follower.trajectory(query.get("kind", ""), step, index)
                return 200, "application/json", _json(rows)
        except ValueError as error:
            return 400, "text/plain", str(error)
        return 404, "text/plain", "there is no such page"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        live = self

        class Handler(BaseHTTPRequestHandler):
            """One request."""

            server_version = "hybridflow"
            sys_version = ""
            timeout = 30

            def do_GET(self) -> None:
                """Answer a request."""
                scheme, _, token = self.headers.get("Authorization", "").partition(" ")
                if scheme.lower() != "bearer":
                    token = ""
                status, kind, text = live.answer(self.path, self.headers.get("Host", ""), token.strip())
                body = text.encode("utf-8", "backslashreplace")
                self.send_response(status)
                for name, value in live.headers(kind, len(body)).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Log a request where debugging is on; its address has the token in it, and stays out."""
                logger.debug("%s %s", self.command, urlsplit(self.path).path)

        return Handler

    def headers(self, kind: str, length: int) -> dict[str, str]:
        """Return the headers of an answer."""
        return {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(length),
            "Content-Security-Policy": f"{self._policy}; frame-ancestors 'none'; base-uri 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }


def _number(query: dict[str, str], name: str, below: int | None = None) -> int:
    """Return a number of the query that is not negative. ValueError where it is none."""
    text = query.get(name, "")
    if not (text.isascii() and text.isdigit()) or (below is not None and int(text) >= below):
        raise ValueError(f"{name}={text!r}: wanted a number" + ("" if below is None else f" below {below}"))
    return int(text)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
