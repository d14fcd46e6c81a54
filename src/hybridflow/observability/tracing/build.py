"""The exporters by the names that `rollout.trace.backend` knows, and what each needs to be installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.version import Version

from hybridflow.config.actor_rollout_ref import RolloutTraceConfig, TraceBackend
from hybridflow.errors import install_extra
from hybridflow.observability.tracing.mlflow import MlflowExporter
from hybridflow.observability.tracing.otel import OtelExporter
from hybridflow.observability.tracing.queue import Exporter
from hybridflow.observability.tracing.trackio import TrackioExporter
from hybridflow.observability.tracing.weave import WeaveExporter
from hybridflow.observability.trackers.libraries import wandb_key_is_set

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
