"""A collector of OpenTelemetry on this machine, which keeps the spans that it is sent."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Got:
    """A span as it arrived, with the spans below it."""

    name: str
    start: float
    end: float
    attributes: dict[str, Any]
    error: str
    below: list[Got] = field(default_factory=list)

    def names(self) -> list[Any]:
        """Names in the order of their starts: one, or a list of it and those below it."""
        return [self.name, *[each.names() for each in self.below]] if self.below else self.name  # type: ignore[return-value]


class Collector(ThreadingHTTPServer):
    """Listens on a free port; `address` takes traces."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[ExportTraceServiceRequest] = []
        self.status = 200
        self.address = f"http://127.0.0.1:{self.server_port}/v1/traces"

    def resources(self) -> list[dict[str, Any]]:
        """The attributes of the senders."""
        return [
            _values(sent.resource.attributes) for request in self.requests for sent in request.resource_spans
        ]

    def traces(self) -> list[Got]:
        """Roots of all traces, in the order in which they arrived."""
        found: dict[bytes, Got] = {}
        parents: dict[bytes, bytes] = {}
        for request in self.requests:
            for sent in request.resource_spans:
                for scope in sent.scope_spans:
                    for span in scope.spans:
                        found[span.span_id] = Got(
                            span.name,
                            span.start_time_unix_nano / 1e9,
                            span.end_time_unix_nano / 1e9,
                            _values(span.attributes),
                            span.status.message,
                        )
                        parents[span.span_id] = span.parent_span_id
        for name, span in sorted(found.items(), key=lambda each: each[1].start):
            if parents[name]:
                found[parents[name]].below.append(span)
        return [span for name, span in found.items() if not parents[name]]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        if self.server.status == 200:
            self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(self.server.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
