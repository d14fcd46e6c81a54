"""Metrics that Prometheus scrapes, and advice that goes to an address."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from hybridflow.config.trainer import PrometheusConfig, TrainerConfig
from hybridflow.errors import ConfigError
from hybridflow.observability.advice import Advice
from hybridflow.observability.trackers import build_trackers
from hybridflow.observability.trackers.base import RunInfo
from hybridflow.observability.trackers.build import check_trackers
from hybridflow.observability.trackers.prometheus import PrometheusTracker, prometheus_name


def scraped(port: int) -> dict[tuple[str, str], tuple[float, str]]:
    """Value and meaning by name and experiment, as Prometheus reads them."""
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"  # Prometheus' own
    page = httpx.get(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept}).text
    return {
        (sample.name, sample.labels["experiment"]): (sample.value, family.documentation)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if "experiment" in sample.labels
    }


def test_prometheus_reads_every_metric_with_its_meaning(tmp_path: Path) -> None:
    file = tmp_path / "p" / "prometheus.yml"
    settings = PrometheusConfig(enable=True, port=0, file=str(file), served_model_name="m")
    tracker = PrometheusTracker(RunInfo(tmp_path, experiment="e", prometheus=settings))
    try:
        tracker.log({"critic/score/mean": 0.25, "rollout/generated_tokens": 10.0, "my/own-one": 3.0}, 1)
        tracker.log({"critic/score/mean": 0.5, "rollout/generated_tokens": 32.0}, 2)
        found = scraped(tracker.port)
        value, meaning = found["hybridflow_critic_score_mean", "e"]
        assert value == 0.5 and meaning.startswith("critic/score/mean: Score of a trajectory")
        assert found["hybridflow_my_own_one", "e"][0] == 3.0
        assert found["vllm:generation_tokens_total", "e"][0] == 42.0, "what all steps have added"
        config = yaml.safe_load(file.read_text())
        assert config["scrape_configs"][0]["static_configs"] == [{"targets": [f"127.0.0.1:{tracker.port}"]}]
    finally:
        tracker.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{tracker.port}/metrics")


def test_a_run_joins_a_configuration_and_has_it_read_again(
    tmp_path: Path, received: tuple[str, list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    address, bodies = received
    file = tmp_path / "prometheus.yml"
    rays = {"job_name": "ray", "file_sd_configs": [{"files": ["ray.json"]}]}
    old = {"job_name": "hybridflow", "static_configs": [{"targets": ["gone:1"]}]}
    file.write_text(yaml.safe_dump({"global": {"scrape_interval": "3s"}, "scrape_configs": [rays, old]}))
    reload_port = int(address.rstrip("/").rpartition(":")[2])
    settings = PrometheusConfig(enable=True, port=0, file=str(file), reload_port=reload_port)
    for _ in range(2):
        tracker = PrometheusTracker(RunInfo(tmp_path, prometheus=settings))
        tracker.close()
    config = yaml.safe_load(file.read_text())
    assert config["global"] == {"scrape_interval": "3s"} and config["scrape_configs"][0] == rays
    (ours,) = config["scrape_configs"][1:]
    assert ours["static_configs"] == [{"targets": [f"127.0.0.1:{tracker.port}"]}]
    assert bodies == ["", ""], "it was asked each time"
    assert sum("does not answer" in record.message for record in caplog.records) == 1, "500 the first time"
    file.write_text("- no configuration")
    with pytest.raises(ConfigError, match=r"trainer\.prometheus\.file"):
        PrometheusTracker(RunInfo(tmp_path, prometheus=settings))


def test_names_for_prometheus() -> None:
    assert prometheus_name("val-core/gsm8k/acc/mean@1") == "hybridflow_val_core_gsm8k_acc_mean_1"
    assert prometheus_name("timing_s/gen") == "hybridflow_timing_s_gen"


def test_a_port_that_is_taken_is_told_by_its_key(tmp_path: Path) -> None:
    first = PrometheusTracker(RunInfo(tmp_path, prometheus=PrometheusConfig(enable=True, port=0)))
    taken = PrometheusConfig(enable=True, port=first.port)
    try:
        with pytest.raises(ConfigError, match=r"trainer\.prometheus\.port to a free port"):
            build_trackers([], tmp_path, prometheus=taken)
    finally:
        first.close()


@pytest.fixture
def received() -> Iterator[tuple[str, list[Any]]]:
    """An address, and what was posted to it; the first answer is an error."""
    bodies: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            bodies.append(json.loads(body) if body else "")
            self.send_response(500 if len(bodies) == 1 else 200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", bodies
    server.shutdown()
    thread.join()
    server.server_close()


def test_advice_is_posted_and_an_address_that_fails_ends_nothing(
    received: tuple[str, list[Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address, bodies = received
    with (
        caplog.at_level("WARNING", logger="hybridflow"),
        build_trackers([], tmp_path, "p", "e", alert_webhook=address) as trackers,
    ):
        trackers.log({"response_length/clip_ratio": 0.75}, 1)
        trackers.log({"actor/entropy": 0.0}, 2)
    first, second = bodies
    assert first["rule"] == "truncated" and first["step"] == 1 and first["keys"][0] in first["text"]
    assert second["text"].startswith("p/e, step 2: entropy has collapsed")
    assert second["project"] == "p" and second["run_dir"] == str(tmp_path)
    assert "500" in caplog.text, "the first failure is logged"


def test_what_is_told_names_the_keys() -> None:
    assert str(Advice("r", "it is so", ("a.b", "c"))) == "it is so (keys: a.b, c)"
    assert str(Advice("r", "it is so", ())) == "it is so"


def test_a_file_for_prometheus_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = PrometheusConfig(enable=True, port=0, file=str(tmp_path / "file" / "targets.yml"))
    with pytest.raises(ConfigError, match=r"trainer.prometheus.file=.* cannot be written"):
        build_trackers([], tmp_path, "p", "e", prometheus=settings)


def test_a_port_that_is_taken_is_said_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = PrometheusConfig(enable=True, port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=r"cannot be listened at .*to a free port"):
            check_trackers(TrainerConfig(logger=["console"], prometheus=settings))
    check_trackers(TrainerConfig(logger=["console"], prometheus=settings))
