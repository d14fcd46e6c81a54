"""A server that answers Weave's client as far as it needs, and keeps the calls it is sent.

Weave has no offline mode, so its own server cannot be had here; the requests are those of its real client.
"""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VIEWER = {"username": "me", "defaultEntity": {"name": "me"}}
ANSWERS: dict[str, dict[str, Any]] = {
    "/graphql": {"data": {"viewer": VIEWER, "project": {"name": "demo"}}},
    "/server_info": {"min_required_weave_python_version": "0.0.1", "trace_server_version": "99.0.0"},
    "/obj/create": {"digest": "digest", "object_id": "object"},
    "/file/create": {"digest": "digest"},
}


class FakeWeave(ThreadingHTTPServer):
    """Answers on this machine; `calls` are those that were sent as complete, as they came."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answerer)
        self.calls: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def environment(self) -> dict[str, str]:
        """Return the variables that send Weave's client here."""
        return {"WANDB_BASE_URL": self.url, "WF_TRACE_SERVER_URL": self.url, "WANDB_API_KEY": "k" * 40}


class Answerer(BaseHTTPRequestHandler):
    server: FakeWeave

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        if self.path.endswith("/calls/complete"):
            self.server.calls += json.loads(body)["batch"]
        self._answer()

    def _answer(self) -> None:
        body = json.dumps(ANSWERS.get(self.path, {})).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def fake_weave() -> Iterator[FakeWeave]:
    server = FakeWeave()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
