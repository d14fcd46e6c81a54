"""Traces of trajectories, sent to a receiver by a background thread, so that the run does not wait.

    TraceSpan ──put──► bounded queue ──thread: texts are decoded──► an exporter ──► its receiver

Each exporter imports its library when it is made, and shows the same titles, tags and parts of a trajectory.
A collector that is dead or slow costs a warning and a count. Nothing is drawn from anybody's random state.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from packaging.version import Version

from hybridflow.config.actor_rollout_ref import RolloutTraceConfig, TraceBackend
from hybridflow.errors import install_extra
from hybridflow.observability.trackers.adapters import mlflow_experiment, mlflow_store
from hybridflow.observability.trackers.libraries import wandb_key_is_set

if TYPE_CHECKING:
    from hybridflow.protocol.spans import Attribute, TraceSpan

logger = logging.getLogger(__name__)

PACKAGE = "opentelemetry.exporter.otlp.proto.http"
NANOSECONDS = 1_000_000_000
Decode = Callable[[Sequence[int]], str]

MOST_WAITING = 4096
"""Traces that may wait; later ones are dropped, and counted."""
MOST_AT_ONCE = 256
"""Traces of one request to the collector."""
LINGER_SECONDS = 0.5
"""Time for further traces to come, after the first one, before a request is made."""
CLOSE_SECONDS = 60.0
"""How long the end of a run waits until the traces are sent."""
DEAD_SECONDS = 2.0
"""How long it waits where none was ever taken."""


class Exporter(Protocol):
    """The interface that sends traces to a receiver; it may raise."""

    def export(self, traces: Sequence[TraceSpan]) -> None:
        """Send whole traces."""

    def close(self) -> None:
        """Send the held-back traces, and close."""


class TraceQueue:
    """Sends traces in a background thread; `sent` and `lost` count them."""

    def __init__(self, name: str, build: Callable[[], Exporter], decode: Decode | None = None) -> None:
        """The thread, which begins with the first trace, builds the exporter. `decode` turns token ids into
        text; None: traces have no texts.
        """
        self.name = name
        self.sent = 0
        self.lost = 0
        self.takes_texts = decode is not None
        self._decode = decode
        self._waiting: queue.Queue[TraceSpan] = queue.Queue(MOST_WAITING)
        self._closing = threading.Event()
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._work, args=(build,), name=f"traces {name}", daemon=True)
        self._given = 0

    def put(self, trace: TraceSpan) -> None:
        """Queue a trace, or drop and count it where the queue is full."""
        with self._counting:
            self._given += 1
            if not self._thread.ident:
                self._thread.start()
        try:
            self._waiting.put_nowait(trace)
        except queue.Full:
            self._lose(1, f"{MOST_WAITING} traces wait already")

    def close(self) -> None:
        """Wait at most CLOSE_SECONDS until all is sent; log what was not."""
        if not self._thread.ident:
            return
        self._closing.set()
        seconds = CLOSE_SECONDS
        if self.lost and not self.sent:
            seconds = DEAD_SECONDS
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._lose(self._given - self.sent - self.lost, f"they were not taken within {seconds:g} s")
        if self.lost:
            logger.warning("%s took %d traces of this run, and %d are lost", self.name, self.sent, self.lost)

    def _work(self, build: Callable[[], Exporter]) -> None:
        exporter: Exporter | None = None
        reason = ""
        try:
            exporter = build()
        except (Exception, SystemExit) as error:  # a library's own: an address, the network, its interface
            reason = f"{type(error).__name__}: {error}"
        while (traces := self._next()) or not self._closing.is_set():
            if exporter is None:
                self._lose(len(traces), reason)
            elif not self._sends(exporter, traces) and self._closing.is_set():
                self._lose(self._waiting.qsize(), "the run has ended")
                break
        if exporter is not None:
            try:
                exporter.close()
            except (Exception, SystemExit) as error:
                self._lose(0, f"{type(error).__name__}: {error}")

    def _next(self) -> list[TraceSpan]:
        """Return the traces of one request; none where none has come for a while."""
        traces: list[TraceSpan] = []
        try:
            traces.append(self._waiting.get(timeout=LINGER_SECONDS))
            self._closing.wait(LINGER_SECONDS)
            while len(traces) < MOST_AT_ONCE:
                traces.append(self._waiting.get_nowait())
        except queue.Empty:
            pass
        return traces

    def _sends(self, exporter: Exporter, traces: list[TraceSpan]) -> bool:
        """Send traces, or lose them; return which."""
        if not traces:
            return True
        try:
            exporter.export([self._with_texts(trace) for trace in traces])
        except (Exception, SystemExit) as error:  # whatever a library or a tokenizer raises
            self._lose(len(traces), f"{type(error).__name__}: {error}")
            return False
        self.sent += len(traces)
        return True

    def _with_texts(self, span: TraceSpan) -> TraceSpan:
        """Return a span with texts as attributes, where they are wanted, and no token ids."""
        decode = self._decode
        attributes = dict(span.attributes)
        if decode is not None:
            for name, text in span.texts.items():
                attributes[name] = text if isinstance(text, str) else decode(text)
        children = tuple(self._with_texts(child) for child in span.children)
        return replace(span, attributes=attributes, texts={}, children=children)

    def _lose(self, count: int, why: str) -> None:
        with self._counting:
            first = not self.lost
            self.lost += count
        if first and count:
            logger.warning(
                "traces for %s (actor_rollout_ref.rollout.trace.backend) are lost: %s. The run goes on; "
                "further ones are counted, and reported at its end",
                self.name,
                why,
            )


INPUTS = ("prompt_text", "arguments")
"""Texts that a span reads."""
OUTPUTS = ("response_text", "answer", "reward", "score", "outcome", "finish_reason")
"""Output texts and attributes."""
TAGS = ("step", "sample_index", "rollout_n", "validate", "experiment_name")
"""Facts of a trajectory by which verl's users look it up."""


class Shown(NamedTuple):
    """The attributes of a span by their parts."""

    inputs: dict[str, Attribute]
    outputs: dict[str, Attribute]
    facts: dict[str, Attribute]


def title_of(span: TraceSpan) -> str:
    """Return the name that a viewer shows: with the tool, or the method of the environment."""
    detail = span.attributes.get("tool") or span.attributes.get("method")
    return f"{span.name} {detail}" if detail else span.name


def parts_of(span: TraceSpan) -> Shown:
    """Return the inputs of a span, its outputs, and all other attributes."""
    inputs, outputs = (
        {name: span.attributes[name] for name in names if name in span.attributes}
        for names in (INPUTS, OUTPUTS)
    )
    facts = {name: value for name, value in span.attributes.items() if name not in (*INPUTS, *OUTPUTS)}
    return Shown(inputs, outputs, facts)


def tags_of(trace: TraceSpan) -> dict[str, str]:
    """Return the facts by which a trace is found, as texts."""
    return {name: str(trace.attributes[name]) for name in TAGS if name in trace.attributes}


MLFLOW_KINDS = {
    "generate": "LLM",
    "tool": "TOOL",
    "trajectory": "AGENT",
    "turn": "CHAIN",
    "reward": "EVALUATOR",
}


class MlflowExporter:
    """Hands spans to MLflow's own exporter, which sends a trace when its root has ended."""

    def __init__(self, project: str, run_dir: Path) -> None:
        os.environ.setdefault("MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "false")  # this is a thread already
        self._mlflow: Any = import_module("mlflow")
        address, place = mlflow_store(run_dir)
        self._mlflow.set_tracking_uri(address)
        if place is not None:
            # MLflow sets the variable: the next run of this process, or a child, would take this run's store
            os.environ.pop("MLFLOW_TRACKING_URI", None)
        self._experiment_id = mlflow_experiment(self._mlflow.MlflowClient(), project, place)

    def export(self, traces: Sequence[TraceSpan]) -> None:
        """Log traces, one after the other."""
        for trace in traces:
            self._log(trace, None)

    def close(self) -> None:
        """Do nothing: a trace is written when it ends."""

    def _log(self, span: TraceSpan, parent: Any) -> None:
        shown = parts_of(span)
        of_root = {}
        if parent is None:
            of_root = {"tags": tags_of(span), "experiment_id": self._experiment_id}
        live = self._mlflow.start_span_no_context(
            title_of(span),
            span_type=MLFLOW_KINDS.get(span.name, "UNKNOWN"),
            parent_span=parent,
            inputs=shown.inputs or None,
            attributes=shown.facts,
            start_time_ns=int(span.start * NANOSECONDS),
            **of_root,
        )
        for child in span.children:
            self._log(child, live)
        if span.error:
            live.set_attribute("error", span.error)
        live.end(
            outputs=shown.outputs or None,
            status="ERROR" if span.error else "OK",
            end_time_ns=int(span.end * NANOSECONDS),
        )


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
        logging.getLogger(PACKAGE).setLevel(logging.CRITICAL)  # the queue logs failures, once
        self._failure = import_module("opentelemetry.sdk.trace.export").SpanExportResult.FAILURE
        self._resource = resources.Resource.create(
            {"service.name": os.environ.get("OTEL_SERVICE_NAME", "hybridflow"), **resource}
        )
        self._scope = scopes.InstrumentationScope("hybridflow")
        # give the exporter its own random state: it draws a pause before each request from Python's,
        # which a reward or an environment of the user may read
        for name, module in list(sys.modules.items()):
            if name.startswith("opentelemetry.exporter.otlp") and getattr(module, "random", None) is random:
                vars(module)["random"] = random.Random()
        self._exporter = exporter.OTLPSpanExporter(endpoint=endpoint)

    def export(self, traces: Sequence[TraceSpan]) -> None:
        """Send the spans of traces in one request. Raises ConnectionError where no receiver takes them."""
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


TRACKIO_KINDS = {"generate": "generation", "tool": "tool"}


class TrackioExporter:
    """Logs a `trackio.Trace` for each trajectory: the prompt and the response as messages, and its spans."""

    def __init__(self, project: str, experiment: str) -> None:
        self._trackio: Any = import_module("trackio")
        self._run: Any = self._trackio.init(
            project=project,
            name=f"{experiment}-traces",
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def export(self, traces: Sequence[TraceSpan]) -> None:
        """Log traces under their steps."""
        for trace in traces:
            facts = dict(trace.attributes)
            messages = [
                {"role": role, "content": str(facts.pop(name))}
                for role, name in (("user", "prompt_text"), ("assistant", "response_text"))
                if name in facts
            ]
            logged = self._trackio.Trace(messages, metadata=facts, spans=list(_spans(trace, "0", None)))
            self._run.log({"trace": logged}, step=int(trace.attributes["step"]))

    def close(self) -> None:
        """Wait until the library has written its queue."""
        self._run.finish()


def _spans(span: TraceSpan, name: str, parent: str | None) -> Iterator[dict[str, Any]]:
    """Yield a span and those below it, each named by its place in the tree."""
    shown = parts_of(span)
    yield {
        "id": name,
        "parent_id": parent,
        "name": title_of(span),
        "kind": TRACKIO_KINDS.get(span.name, "span"),
        "start_time": datetime.fromtimestamp(span.start, UTC).isoformat(),
        "end_time": datetime.fromtimestamp(span.end, UTC).isoformat(),
        "status": "error" if span.error else "success",
        "error": span.error or None,
        "input": shown.inputs or None,
        "output": shown.outputs or None,
        "metadata": shown.facts,
    }
    for number, child in enumerate(span.children):
        yield from _spans(child, f"{name}.{number}", name)


class WeaveExporter:
    """Sends spans as calls `hybridflow.trajectory`, `hybridflow.generate` and so on of a project."""

    def __init__(self, project: str) -> None:
        weave: Any = import_module("weave")
        os.environ.setdefault("WEAVE_PRINT_CALL_LINK", "false")
        self._client: Any = weave.init(project, settings={"implicitly_patch_integrations": False})

    def export(self, traces: Sequence[TraceSpan]) -> None:
        """Hand traces to Weave's client, which sends them from its own threads."""
        for trace in traces:
            self._call(trace, None)

    def close(self) -> None:
        """Wait until the client has sent its queue."""
        self._client.flush()

    def _call(self, span: TraceSpan, parent: Any) -> None:
        shown = parts_of(span)
        call = self._client.create_call(
            f"hybridflow.{span.name}",
            shown.inputs,
            parent=parent,
            attributes=shown.facts,
            display_name=title_of(span),
            use_stack=False,
            started_at=datetime.fromtimestamp(span.start, UTC),
        )
        for child in span.children:
            self._call(child, call)
        error = RuntimeError(span.error) if span.error else None
        ended_at = datetime.fromtimestamp(span.end, UTC)
        self._client.finish_call(call, output=shown.outputs, exception=error, ended_at=ended_at)


KEY = "actor_rollout_ref.rollout.trace.backend"
OLDEST: Mapping[TraceBackend, tuple[str, str]] = {
    "otel": ("opentelemetry-exporter-otlp-proto-http", "1.30"),
    "mlflow": ("mlflow", "3.6"),
    "weave": ("weave", "0.54"),
    "trackio": ("trackio", "0.43"),
}
"""Package of each backend, and its oldest version; the extra has the backend's name."""


def trace_problems(keys: RolloutTraceConfig) -> Iterator[str]:
    """Yield what the backend lacks: its package, a newer version of it, or a key. Nothing is imported."""
    if keys.backend is None:
        return
    package, oldest = OLDEST[keys.backend]
    needs = f"{KEY}={keys.backend} needs {package} {oldest} or newer"
    way_out = f"{install_extra(keys.backend)}, or set {KEY}=null"
    try:
        found = version(package)
    except PackageNotFoundError:
        yield f"{needs}, which is not installed: {way_out}"
        return
    if Version(found) < Version(oldest):
        yield f"{needs}, and {found} is installed: upgrade it, or set {KEY}=null"
    if keys.backend == "weave" and not wandb_key_is_set():
        yield (
            f"{KEY}=weave wants a key of Weights & Biases: set WANDB_API_KEY or run `wandb login`, or set "
            f"{KEY}=otel"
        )


def exporter_of(
    keys: RolloutTraceConfig, project: str, experiment: str, run_dir: str
) -> Callable[[], Exporter]:
    """Return a function that makes the exporter of the backend, which is set."""
    exporters: dict[TraceBackend, Callable[[], Exporter]] = {
        "otel": partial(OtelExporter, keys.endpoint, {"project": project, "experiment": experiment}),
        "mlflow": partial(MlflowExporter, project, Path(run_dir)),
        "weave": partial(WeaveExporter, project),
        "trackio": partial(TrackioExporter, project, experiment),
    }
    assert keys.backend is not None, "a run without a backend has no traces"
    return exporters[keys.backend]
