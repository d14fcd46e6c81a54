"""The metrics of a run at an address that Prometheus scrapes (`trainer.prometheus`).

Every metric is a gauge of our own name, with its meaning from the glossary. What generation has done in all
is also there as counters under the names of vLLM, so that boards made for it work.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hybridflow.config.trainer import PrometheusConfig
from hybridflow.errors import ConfigError
from hybridflow.observability.glossary import find
from hybridflow.observability.trackers.base import Outcome, RunInfo, Tracker, import_extra

logger = logging.getLogger(__name__)

PREFIX = "hybridflow"
VLLM_COUNTERS = {
    "rollout/generated_tokens": ("vllm:generation_tokens", "Tokens that were sampled."),
    "rollout/prompt_tokens": ("vllm:prompt_tokens", "Tokens of the prompts of admitted requests."),
    "rollout/preemptions": ("vllm:num_preemptions", "Requests that had to wait again."),
    "rollout/requests": ("vllm:request_success", "Requests that were admitted."),
}
"""Names of vLLM for what a step adds, by our own; Prometheus appends `_total`."""


def prometheus_name(name: str) -> str:
    """Return the name of a metric in Prometheus: `critic/score/mean` is `hybridflow_critic_score_mean`."""
    return f"{PREFIX}_{re.sub('[^a-zA-Z0-9]+', '_', name).strip('_')}"


def check_port(settings: PrometheusConfig) -> None:
    """Raise ConfigError where nothing can listen at the address; a run asks before it loads anything."""
    if not settings.enable:
        return
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        socket.create_server(found[0][4][:2], family=found[0][0]).close()
    except OSError as error:
        raise _cannot_listen(settings, error) from error


def _cannot_listen(settings: PrometheusConfig, error: OSError) -> ConfigError:
    return ConfigError(
        f"trainer.prometheus: {settings.host}:{settings.port} cannot be listened at ({error}): set "
        "trainer.prometheus.port to a free port, or to 0 for any"
    )


class PrometheusTracker(Tracker):
    """Serves the newest value of each metric until the run ends."""

    def __init__(self, run: RunInfo) -> None:
        client = import_extra("prometheus_client", "prometheus")
        settings: PrometheusConfig | None = run.prometheus
        assert settings is not None, "it is built where it is asked for"
        self._client: Any = client
        self._registry = client.CollectorRegistry()
        self._labels = {"project": run.project, "experiment": run.experiment}
        if settings.served_model_name is not None:
            self._labels["model_name"] = settings.served_model_name
        self._gauges: dict[str, Any] = {}
        self._counters: dict[str, Any] = {}
        try:
            self._server, self._thread = client.start_http_server(
                settings.port, settings.host, registry=self._registry
            )
        except OSError as error:
            raise _cannot_listen(settings, error) from error
        self.port: int = self._server.server_port
        logger.info("metrics for Prometheus at http://%s:%d/metrics", settings.host, self.port)
        if settings.file is not None:
            self._write_targets(Path(settings.file), f"{settings.host}:{self.port}")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._gauge(name).labels(**self._labels).set(value)
        for name, (other, meaning) in VLLM_COUNTERS.items():
            if name in metrics:
                self._counter(other, meaning).labels(**self._labels).inc(max(metrics[name], 0.0))

    def close(self, outcome: Outcome = "finished") -> None:
        self._server.shutdown()
        self._server.server_close()

    def _gauge(self, name: str) -> Any:
        short = prometheus_name(name)
        if short not in self._gauges:
            entry = find(name)
            meaning = name
            if entry is not None:
                meaning = f"{name}: {entry.meaning} Unit: {entry.unit}."
            self._gauges[short] = self._client.Gauge(
                short, meaning, tuple(self._labels), registry=self._registry
            )
        return self._gauges[short]

    def _counter(self, name: str, meaning: str) -> Any:
        if name not in self._counters:
            self._counters[name] = self._client.Counter(
                name, meaning, tuple(self._labels), registry=self._registry
            )
        return self._counters[name]

    def _write_targets(self, file: Path, target: str) -> None:
        """Write a configuration with which Prometheus scrapes this run."""
        job = {"job_name": "hybridflow", "static_configs": [{"targets": [target]}]}
        config = {"global": {"scrape_interval": "10s"}, "scrape_configs": [job]}
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        except OSError as error:
            self.close()
            raise ConfigError(
                f"trainer.prometheus.file={file} cannot be written ({error.strerror or error}): set another "
                "path, or leave it out"
            ) from error
