"""Traces by OpenTelemetry's protocol (OTLP over HTTP): for any collector, and for MLflow's own server."""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hybridflow.observability.tracing.shown import title_of

if TYPE_CHECKING:
    from hybridflow.protocol.spans import TraceSpan

PACKAGE = "opentelemetry.exporter.otlp.proto.http"
NANOSECONDS = 1_000_000_000


class OtelExporter:
    """Sends spans to an address, or where OpenTelemetry's own variables of the environment say.

    The root span has its facts as attributes by verl's names (`step`, `sample_index`, `rollout_n`,
    `validate`); `service.name` is hybridflow unless OTEL_SERVICE_NAME says otherwise.
    """

    def __init__(self, endpoint: str | None, resource: Mapping[str, str]) -> None:
        exporter: Any = import_module(f"{PACKAGE}.trace_exporter")
        self._sdk: Any = import_module("opentelemetry.sdk.trace")
        self._api: Any = import_module("opentelemetry.trace")
        resources: Any = import_module("opentelemetry.sdk.resources")
        scopes: Any = import_module("opentelemetry.sdk.util.instrumentation")
        logging.getLogger(PACKAGE).setLevel(logging.CRITICAL)  # the queue tells failures, once
        self._failure = import_module("opentelemetry.sdk.trace.export").SpanExportResult.FAILURE
        self._resource = resources.Resource.create(
            {"service.name": os.environ.get("OTEL_SERVICE_NAME", "hybridflow"), **resource}
        )
        self._scope = scopes.InstrumentationScope("hybridflow")
        # give the exporter a random state of its own: it draws a pause before each request from Python's,
        # which a reward or an environment of the user may read
        for name, module in list(sys.modules.items()):
            if name.startswith("opentelemetry.exporter.otlp") and getattr(module, "random", None) is random:
                vars(module)["random"] = random.Random()
        self._exporter = exporter.OTLPSpanExporter(endpoint=endpoint)

    def export(self, traces: Sequence[TraceSpan]) -> None:
        """Send the spans of traces in one request. Raises ConnectionError where nobody takes them."""
        spans: list[Any] = []
        for trace in traces:
            trace_id = int.from_bytes(os.urandom(16))  # not of a stream of random numbers that a run reads
            spans += self._spans(trace, trace_id, None)
        if self._exporter.export(spans) == self._failure:
            raise ConnectionError("the collector has not taken them")

    def close(self) -> None:
        """End the session."""
        self._exporter.shutdown()

    def _spans(self, span: TraceSpan, trace_id: int, parent: Any) -> Iterator[Any]:
        """Yield a span and those below it."""
        flags = self._api.TraceFlags(self._api.TraceFlags.SAMPLED)
        span_id = int.from_bytes(os.urandom(8))
        context = self._api.SpanContext(trace_id, span_id, is_remote=False, trace_flags=flags)
        status = self._api.Status(self._api.StatusCode.OK)
        if span.error:
            status = self._api.Status(self._api.StatusCode.ERROR, span.error)
        # attributes, token counts also under OpenTelemetry's names for language models
        attributes = dict(span.attributes)
        if span.name == "generate":
            attributes["gen_ai.operation.name"] = "text_completion"
            if "prompt_tokens" in attributes:
                attributes["gen_ai.usage.input_tokens"] = attributes["prompt_tokens"]
                attributes["gen_ai.usage.output_tokens"] = attributes["response_tokens"]
        yield self._sdk.ReadableSpan(
            name=title_of(span),
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            kind=self._api.SpanKind.INTERNAL,
            status=status,
            start_time=int(span.start * NANOSECONDS),
            end_time=int(span.end * NANOSECONDS),
            instrumentation_scope=self._scope,
        )
        for child in span.children:
            yield from self._spans(child, trace_id, context)
