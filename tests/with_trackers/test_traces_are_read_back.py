"""Traces of a run that MLflow's own server has taken by OTLP, and those that each backend keeps, read back.

`make test-trackers` runs this in an environment that has all the libraries (scripts/setup_trackers.sh).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_weave import fake_weave

from hybridflow.config.actor_rollout_ref import RolloutTraceConfig, TraceBackend
from hybridflow.models.tiny import create_tiny_model
from hybridflow.observability import tracing
from hybridflow.observability.tracing import TraceQueue, exporter_of, trace_problems
from hybridflow.protocol.spans import TraceSpan

LIBRARIES = ("mlflow", "weave", "trackio", "opentelemetry.exporter.otlp.proto.http")
BEGAN = 1_700_000_000.0
GENERATE = TraceSpan(
    "generate", BEGAN, BEGAN + 1.5, {"prompt_tokens": 3, "response_tokens": 2}, {"response_text": [7, 8]}
)
TOOL = TraceSpan("tool", BEGAN + 1.5, BEGAN + 1.75, {"tool": "add"}, {"arguments": "{}"}, "raised")
TURN = TraceSpan("turn", BEGAN, BEGAN + 1.75, {"turn": 0}, children=(GENERATE, TOOL))
FACTS: dict[str, Any] = {"step": 4, "sample_index": 17, "rollout_n": 2, "validate": False, "reward": 0.5}
TRACE = TraceSpan(
    "trajectory",
    BEGAN,
    BEGAN + 2.0,
    {**FACTS, "experiment_name": "traced"},
    {"prompt_text": [1], "response_text": [7, 8]},
    children=(TURN,),
)


def is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


pytestmark = [
    pytest.mark.skipif(
        not all(is_there(name) for name in LIBRARIES),
        reason="wants every tracker's library: make test-trackers",
    ),
    pytest.mark.timeout(1800),
    pytest.mark.slow,
]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for libraries that a busy machine imports slowly."""
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 600.0)


def send(backend: TraceBackend, folder: Path) -> None:
    """Send the trace twice, with its texts, as a run does."""
    keys = RolloutTraceConfig(backend, token2text=True)
    assert not list(trace_problems(keys))
    sent = TraceQueue(backend, exporter_of(keys, "demo", "traced", str(folder)), lambda ids: f"text {ids}")
    for _ in range(2):
        sent.put(TRACE)
    sent.close()
    assert (sent.sent, sent.lost) == (2, 0)


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of MLflow's own server."""
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = f"sqlite:///{folder / 'server.db'}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", store, "--artifacts-destination", str(folder), "--workers", "1"]
    address = f"http://127.0.0.1:{port}"
    log = folder / "server.log"
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            until = time.monotonic() + 600
            while not answers(f"{address}/health"):
                assert process.poll() is None and time.monotonic() < until, log.read_text()[-2000:]
                time.sleep(0.5)
            yield address
        finally:
            process.terminate()


def answers(address: str) -> bool:
    try:
        return httpx.get(address, timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


def train(model: Path, folder: Path, further: list[str], environment: dict[str, str]) -> None:
    overrides = [
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={folder}",
        "trainer.logger=[]",
        "trainer.experiment_name=traced",
        "data.train_batch_size=4",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "data.task.val_size=3",
        "data.max_response_length=8",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        "trainer.save_freq=-1",
        "trainer.val_before_train=false",
        *further,
    ]
    command = [sys.executable, "-m", "hybridflow.cli.main", "train", "--recipe", "tiny/grpo", *overrides]
    known = {**os.environ, **environment, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=known, capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0 and "are lost" not in ran.stderr, ran.stderr[-3000:]


def test_a_runs_spans_go_to_mlflows_server_by_otlp(mlflow_server: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=mlflow_server)
    experiment = client.create_experiment("by otlp")
    trace = "actor_rollout_ref.rollout.trace"
    keys = [f"{trace}.backend=otel", f"{trace}.token2text=true"]
    keys.append(f"{trace}.endpoint={mlflow_server}/v1/traces")
    header = {"OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"x-mlflow-experiment-id={experiment}"}
    train(create_tiny_model(tmp_path / "model", seed=0), tmp_path / "run", keys, header)
    found = client.search_traces(locations=[experiment], max_results=100)
    assert len(found) == 2 * 4 * 2 + 3
    steps = []
    for each in found:
        root, *below = sorted(
            each.data.spans, key=lambda span: (span.parent_id is not None, span.start_time_ns)
        )
        assert root.name == "trajectory" and [span.name for span in below] == ["generate", "reward"]
        assert {span.parent_id for span in below} == {root.span_id}
        assert root.start_time_ns == below[0].start_time_ns < below[0].end_time_ns
        assert root.attributes["prompt_text"] and root.attributes["experiment_name"] == "traced"
        assert root.attributes["reward"] == below[1].attributes["score"]
        steps.append((root.attributes["validate"], root.attributes["step"]))
    assert sorted(steps) == [(False, 1)] * 8 + [(False, 2)] * 8 + [(True, 2)] * 3


def test_mlflows_store_has_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    send("mlflow", tmp_path)
    assert "MLFLOW_TRACKING_URI" not in os.environ, "another run of this process would use this one's store"
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("demo")
    found = client.search_traces(locations=[experiment.experiment_id], filter_string="tags.step = '4'")
    assert len(found) == 2
    for each in found:
        spans = {span.name: span for span in each.data.spans}
        assert set(spans) == {"trajectory", "turn", "generate", "tool add"}
        assert spans["generate"].parent_id == spans["turn"].span_id
        assert spans["generate"].end_time_ns - spans["generate"].start_time_ns == 1_500_000_000
        assert spans["trajectory"].inputs == {"prompt_text": "text [1]"}
        assert spans["trajectory"].outputs == {"response_text": "text [7, 8]", "reward": 0.5}
        assert spans["tool add"].attributes["error"] == "raised"
        assert {each.info.tags[name] for name in ("sample_index", "rollout_n")} == {"17", "2"}


def test_trackio_keeps_messages_facts_and_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trackio.sqlite_storage
    import trackio.utils

    for module in (trackio.utils, trackio.sqlite_storage):  # read from the environment when it is imported
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    send("trackio", tmp_path)
    logged = trackio.sqlite_storage.SQLiteStorage.get_traces("demo", "traced-traces")
    assert [each["step"] for each in logged] == [4, 4]
    for each in logged:
        assert [message["content"] for message in each["messages"]] == ["text [1]", "text [7, 8]"]
        assert each["metadata"].items() >= FACTS.items()
        assert [(span["id"], span["parent_id"]) for span in each["spans"]] == [
            ("0", None),
            ("0.0", "0"),
            ("0.0.0", "0.0"),
            ("0.0.1", "0.0"),
        ]
        assert each["spans"][3]["error"] == "raised" and each["spans"][2]["kind"] == "generation"


def test_weaves_client_sends_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_weave() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        send("weave", tmp_path)
        calls = list(server.calls)
    assert len(calls) == 2 * 4
    by_id = {call["id"]: call for call in calls}
    for call in calls:
        if call["display_name"] == "generate":
            turn = by_id[call["parent_id"]]
            assert turn["display_name"] == "turn"
            assert by_id[turn["parent_id"]]["attributes"].items() >= {"step": 4, "sample_index": 17}.items()
            assert call["output"] == {"response_text": "text [7, 8]"}
            assert call["started_at"].startswith("2023-11-14T22:13:20")
        assert (call.get("exception") is not None) == (call["display_name"] == "tool add")
