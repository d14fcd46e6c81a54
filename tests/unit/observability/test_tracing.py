"""Traces leave by a queue that neither ends nor holds up a run; OpenTelemetry's protocol, read by a stub."""

from __future__ import annotations

import logging
import random
import socket
import threading
from collections.abc import Sequence

import pytest

from collectors import collecting
from hybridflow.config import PPOConfig
from hybridflow.config.actor_rollout_ref import RolloutTraceConfig
from hybridflow.config.load import load_config, prepare_config
from hybridflow.errors import ConfigError
from hybridflow.observability import tracing
from hybridflow.observability.tracing import OtelExporter, TraceQueue, parts_of, tags_of, trace_problems
from hybridflow.protocol.spans import SpanLog, TraceSpan

GENERATE = TraceSpan(
    "generate", 10.0, 11.5, {"prompt_tokens": 3, "response_tokens": 2}, {"response_text": [7, 8]}
)
TOOL = TraceSpan("tool", 11.5, 11.75, {"tool": "add"}, {"arguments": '{"a": 1}'}, "raised")
TRACE = TraceSpan(
    "trajectory", 10.0, 12.0, {"step": 4, "validate": False, "reward": 0.5}, children=(GENERATE, TOOL)
)


class Kept:
    """An exporter that keeps traces, or raises."""

    def __init__(self, fails: bool = False) -> None:
        self.traces: list[TraceSpan] = []
        self.fails = fails
        self.closed = False

    def export(self, traces: Sequence[TraceSpan]) -> None:
        if self.fails:
            raise ConnectionError("nobody is there")
        self.traces += traces

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "LINGER_SECONDS", 0.01)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")  # of a collector that is dead


def test_a_span_log_notes_what_happens_in_a_context() -> None:
    log = SpanLog()
    with log.span("tool", tool="add") as span:
        span.attributes["reward"] = 1.0
    with pytest.raises(ValueError, match="as ordered"), log.span("environment"):
        raise ValueError("as ordered")
    first, second = log.spans
    assert (first.name, first.attributes, first.error) == ("tool", {"tool": "add", "reward": 1.0}, "")
    assert second.error == "ValueError: as ordered" and first.start <= first.end <= second.start


def test_a_collector_reads_names_times_facts_and_the_tree() -> None:
    state = random.getstate()
    with collecting() as server:
        sent = TraceQueue(
            "otel", lambda: OtelExporter(server.address, {"project": "p"}), lambda ids: str(ids)
        )
        sent.put(TRACE)
        sent.put(TRACE)
        sent.close()
        first, second = server.traces()
        assert server.resources()[0].items() >= {"service.name": "hybridflow", "project": "p"}.items()
    assert random.getstate() == state, "ids are drawn from the system, not from a stream that a run reads"
    assert (sent.sent, sent.lost) == (2, 0)
    assert first.names() == second.names() == ["trajectory", "generate", "tool add"]
    assert first.attributes == {"step": 4, "validate": False, "reward": 0.5}
    generate, tool = first.below
    assert (first.start, first.end, generate.end, tool.end) == (10.0, 12.0, 11.5, 11.75)
    assert generate.attributes["response_text"] == "[7, 8]"
    assert generate.attributes["gen_ai.usage.output_tokens"] == 2
    assert (tool.error, tool.attributes["arguments"]) == ("raised", '{"a": 1}')


def test_without_texts_none_leaves() -> None:
    kept = Kept()
    sent = TraceQueue("kept", lambda: kept)
    sent.put(TRACE)
    sent.close()
    assert [dict(child.attributes) for child in kept.traces[0].children] == [
        GENERATE.attributes,
        TOOL.attributes,
    ]
    assert kept.closed and not kept.traces[0].children[0].texts


def test_a_dead_collector_costs_one_warning_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sent = TraceQueue("otel", lambda: OtelExporter(f"http://127.0.0.1:{port}/v1/traces", {}))
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            sent.put(TRACE)
        sent.close()
    assert (sent.sent, sent.lost) == (0, 5)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and "are lost" in told[0] and "5 are lost" in told[1]


@pytest.mark.parametrize("fails", [False, True])
def test_an_exporter_that_cannot_be_made_or_raises_loses_traces_only(fails: bool) -> None:
    def build() -> Kept:
        if fails:
            return Kept(fails=True)
        raise RuntimeError("no such server")

    sent = TraceQueue("kept", build)
    for _ in range(3):
        sent.put(TRACE)
    sent.close()
    assert (sent.sent, sent.lost) == (0, 3)


def test_what_is_too_much_is_dropped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MOST_WAITING", 4)
    goes_on = threading.Event()
    kept = Kept()

    def build() -> Kept:
        goes_on.wait()
        return kept

    sent = TraceQueue("kept", build)
    for _ in range(10):
        sent.put(TRACE)
    assert sent.lost == 6, "nobody waited"
    goes_on.set()
    sent.close()
    assert len(kept.traces) == sent.sent == 4


def test_parts_for_viewers() -> None:
    span = TraceSpan("generate", 0, 1, {"prompt_text": "a", "response_text": "b", "version_first": 3})
    assert parts_of(span) == ({"prompt_text": "a"}, {"response_text": "b"}, {"version_first": 3})
    assert tags_of(TRACE) == {"step": "4", "validate": "False"}


def test_missing_packages_are_told_by_key_and_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(trace_problems(RolloutTraceConfig()))
    assert not list(trace_problems(RolloutTraceConfig("otel")))
    monkeypatch.setattr(tracing, "OLDEST", {"otel": ("no-such-package", "1"), "mlflow": ("packaging", "999")})
    (missing,) = trace_problems(RolloutTraceConfig("otel"))
    assert "trace.backend=otel needs no-such-package" in missing and "hybridflow[otel]" in missing
    (old,) = trace_problems(RolloutTraceConfig("mlflow"))
    assert "needs packaging 999 or newer" in old


def test_verls_keys_and_wrong_addresses() -> None:
    trace = "actor_rollout_ref.rollout.trace"
    keys = [f"{trace}.backend=weave", f"{trace}.token2text=true", f"{trace}.project_name=p"]
    loaded = load_config(PPOConfig, [*keys, f"{trace}.max_samples_per_step_per_worker=5"])
    assert loaded.config.actor_rollout_ref.rollout.trace == RolloutTraceConfig("weave", True, 5)
    for wrong in ("endpoint=collector:4318", "endpoint='http://h:4318/v1/traces'"):
        with pytest.raises(ConfigError, match=r"trace\.endpoint"):
            prepare_config(PPOConfig, [*keys[:2], f"{trace}.{wrong}"])
