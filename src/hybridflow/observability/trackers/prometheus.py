"""The metrics of a run at an address that Prometheus scrapes (`trainer.prometheus`).

Every metric is a gauge of our own name, with its meaning from the glossary. What generation has done in all
is also there as counters under the names of vLLM, so that boards made for it work.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import yaml

from hybridflow.config.trainer import PrometheusConfig
from hybridflow.errors import ConfigError
from hybridflow.observability.glossary import find
from hybridflow.observability.trackers.base import Outcome, RunInfo, Tracker, import_extra

logger = logging.getLogger(__name__)

PREFIX = "hybridflow"
JOB = "hybridflow"
"""Name of the runs' job in a configuration of Prometheus."""
RELOAD_SECONDS = 10.0
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
            self._server = _server(settings.host, settings.port, self._page)
        except OSError as error:
            raise _cannot_listen(settings, error) from error
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        self.port: int = self._server.server_port
        logger.info("metrics for Prometheus at http://%s:%d/metrics", settings.host, self.port)
        if settings.file is not None:
            try:
                self._write_targets(settings, Path(settings.file))
            except BaseException:
                self.close()
                raise

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._gauge(name).labels(**self._labels).set(value)
        for name, (other, meaning) in VLLM_COUNTERS.items():
            if name in metrics:
                if other not in self._counters:
                    self._counters[other] = self._client.Counter(
                        other, meaning, tuple(self._labels), registry=self._registry
                    )
                self._counters[other].labels(**self._labels).inc(max(metrics[name], 0.0))

    def close(self, outcome: Outcome = "finished") -> None:
        self._server.shutdown()
        self._server.server_close()

    def _page(self) -> bytes:
        page: bytes = self._client.generate_latest(self._registry)
        return page

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

    def _write_targets(self, settings: PrometheusConfig, file: Path) -> None:
        """Write this run into a configuration of Prometheus, and have that read it where it is asked to."""
        config: dict[str, Any] = {"global": {"scrape_interval": "10s"}}
        if file.is_file():
            config = _configuration(file)
        targets = [{"targets": [f"{settings.host}:{self.port}"]}]
        others = [job for job in config.get("scrape_configs") or [] if job.get("job_name") != JOB]
        config["scrape_configs"] = [*others, {"job_name": JOB, "static_configs": targets}]
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"trainer.prometheus.file={file} cannot be written ({error.strerror or error}): set another "
                "path, or leave it out"
            ) from error
        if settings.reload_port is not None:
            _reload(f"http://127.0.0.1:{settings.reload_port}/-/reload")


def _server(host: str, port: int, page: Callable[[], bytes]) -> ThreadingHTTPServer:
    """Return a server of a page in Prometheus' text format, whatever format is asked for.

    The library's own server has OpenMetrics too, where it writes `vllm:x` as `vllm_x`, which no board finds.
    """

    class MetricsHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = page()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log no requests."""

    found: Any = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]

    class MetricsServer(ThreadingHTTPServer):
        address_family = found[0]
        daemon_threads = True

    return MetricsServer(found[4][:2], MetricsHandler)


def _configuration(file: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(
            f"trainer.prometheus.file: {file} cannot be read ({error}): name another file"
        ) from error
    if not isinstance(config, dict | None):
        raise ConfigError(
            f"trainer.prometheus.file: {file} has no configuration of Prometheus: name another file"
        )
    return config or {}


def _reload(address: str) -> None:
    """Ask a Prometheus to read its configuration again; one that does not answer costs a warning."""
    try:
        httpx.post(address, timeout=RELOAD_SECONDS).raise_for_status()
    except httpx.HTTPError as error:
        logger.warning(
            "trainer.prometheus.reload_port: %s does not answer (%s): start Prometheus with "
            "--web.enable-lifecycle and with this file as --config.file, or have it read the file yourself",
            address,
            error,
        )
