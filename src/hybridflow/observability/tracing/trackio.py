"""Traces in Trackio: those of a run are in its project, under the name `{experiment}-traces`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hybridflow.observability.tracing.shown import parts_of, title_of

if TYPE_CHECKING:
    from hybridflow.protocol.spans import TraceSpan

KINDS = {"generate": "generation", "tool": "tool"}


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
        """Wait until the library has written what it holds."""
        self._run.finish()


def _spans(span: TraceSpan, name: str, parent: str | None) -> Iterator[dict[str, Any]]:
    """Yield a span and those below it, each named by its place in the tree."""
    shown = parts_of(span)
    yield {
        "id": name,
        "parent_id": parent,
        "name": title_of(span),
        "kind": KINDS.get(span.name, "span"),
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
