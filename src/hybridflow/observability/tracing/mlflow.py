"""Traces in MLflow: the store in the run folder (`mlflow.db`), or where MLFLOW_TRACKING_URI says.

In MLflow's pages they are under the experiment `trainer.project_name`, with verl's tags:
`tags.step = '1'` finds those of a step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.observability.tracing.shown import parts_of, tags_of, title_of

if TYPE_CHECKING:
    from hybridflow.protocol.spans import TraceSpan

URI_VARIABLE = "MLFLOW_TRACKING_URI"
NANOSECONDS = 1_000_000_000
KINDS = {"generate": "LLM", "tool": "TOOL", "trajectory": "AGENT", "turn": "CHAIN", "reward": "EVALUATOR"}


class MlflowExporter:
    """Hands spans to MLflow's own exporter, which sends a trace when its root has ended."""

    def __init__(self, project: str, run_dir: Path) -> None:
        os.environ.setdefault("MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "false")  # this is a thread already
        self._mlflow: Any = import_module("mlflow")
        uri = os.environ.get(URI_VARIABLE)
        folder = run_dir.resolve()
        self._mlflow.set_tracking_uri(uri or f"sqlite:///{folder / 'mlflow.db'}")
        if not uri:
            # MLflow sets the variable: the next run of this process, or a child, would take this run's store
            os.environ.pop(URI_VARIABLE, None)
        client = self._mlflow.MlflowClient()
        found = client.get_experiment_by_name(project)
        if found is not None:
            self._experiment_id = found.experiment_id
        else:
            place = None if uri else (folder / "mlruns").as_uri()
            self._experiment_id = client.create_experiment(project, artifact_location=place)

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
            span_type=KINDS.get(span.name, "UNKNOWN"),
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
