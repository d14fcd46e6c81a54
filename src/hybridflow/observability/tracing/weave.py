"""Traces in Weave: a tree of calls for each trajectory, with its facts as attributes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hybridflow.observability.tracing.shown import parts_of, title_of

if TYPE_CHECKING:
    from hybridflow.protocol.spans import TraceSpan


class WeaveExporter:
    """Sends spans as calls `hybridflow.trajectory`, `hybridflow.generate` and so on of a project."""

    def __init__(self, project: str) -> None:
        weave: Any = import_module("weave")
        os.environ.setdefault("WEAVE_PRINT_CALL_LINK", "false")
        self._client: Any = weave.init(project, settings={"implicitly_patch_integrations": False})

    def export(self, traces: Sequence[TraceSpan]) -> None:
        """Hand traces to Weave's client, which sends them from threads of its own."""
        for trace in traces:
            self._call(trace, None)

    def close(self) -> None:
        """Wait until the client has sent what it holds."""
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
