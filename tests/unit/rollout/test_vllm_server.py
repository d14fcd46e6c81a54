"""The server's side of vLLM without vLLM: its process, its end, and the HTTP that we speak."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch

from hybridflow.config.actor_rollout_ref import RolloutConfig, RolloutServerConfig
from hybridflow.errors import RolloutError
from hybridflow.models.tiny import create_tiny_model
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams
from hybridflow.rollout.remote import http as process_module
from hybridflow.rollout.remote.http import Address, Refused, ServerGone, ServerProcess, free_port
from hybridflow.rollout.remote.model import ModelFacts
from hybridflow.rollout.remote.runner import EngineDied
from hybridflow.rollout.vllm import build as vllm_build
from hybridflow.rollout.vllm.engine import VLLMEngine
from hybridflow.rollout.vllm.server import VLLMServer
from hybridflow.weight_sync.wire.receiver import Receiver

HELD: dict[str, torch.Tensor] = {}
RECEIVED = Receiver()
SILENT = threading.Event()
"""Ends the silence of the server."""
ADAPTERS: list[str] = []
"""What the server was asked about adapters."""
NAMES: set[str] = set()
"""Adapters that it has."""
NO_ADAPTERS = threading.Event()
UNWELL = threading.Event()
FACTS = {
    "device": "cpu",
    "vocabulary": 50,
    "positions": 99,
    "max_log_probs": 5,
    "temperature_only": True,
} | dict.fromkeys(("adapters", "quantized"), False)


class Answers(BaseHTTPRequestHandler):
    """Streams token 7 with log-prob -0.5 to the end, slowly for prompts that begin with 9; says one and no
    more for those with 6.
    """

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "theirs"}]}, 503 if UNWELL.is_set() else 200)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path == "/collective_rpc" and UNWELL.is_set():
            self.reply({"error": "cancelled"}, 500)
        elif self.path == "/collective_rpc":
            answers = {
                "hybridflow_begin": lambda: FACTS,
                "hybridflow_version": lambda: {"version": RECEIVED.version, "has_base": RECEIVED.has_base},
                "hybridflow_forget": lambda: RECEIVED.forget() or {},
                "hybridflow_empty_adapter": lambda: {"folder": "a-folder"},
                "hybridflow_adapter_ready": lambda: ADAPTERS.append("ready") or {},
                "hybridflow_receive": lambda: RECEIVED.receive(HELD.update, *body["args"]),
            }
            self.reply({"results": [answers[body["method"]]()]})
        elif self.path.endswith("_lora_adapter"):
            what = self.path.removeprefix("/v1/").removesuffix("_lora_adapter")
            ADAPTERS.append(what)
            refused = NO_ADAPTERS.is_set() or (body["lora_name"] in NAMES) == (what == "load")
            if not refused:
                NAMES.symmetric_difference_update({body["lora_name"]})
            self.reply({"said": what}, 400 if refused else 200)
        elif self.path == "/reset_prefix_cache":
            self.reply({"success": True})
        elif self.path != "/v1/completions" or body["prompt"] == [4]:
            self.reply({"error": "no such thing"}, 400)
        else:
            self.stream(body)

    def reply(self, answer: Any, code: int = 200) -> None:
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, body: dict[str, Any]) -> None:
        assert body["model"] == "theirs" and body["stream"] and body["return_token_ids"]
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        if body["prompt"] in ([10], [11]):
            if body["prompt"] == [11]:
                UNWELL.set()
            self.wfile.write(b'data: {"error": {"message": "an issue"}}\n\n')
            return
        for number in range(body["max_tokens"]):
            finish = "length" if number + 1 == body["max_tokens"] else None
            top = [{"token_id:7": -0.5, "token_id:3": -1.5}] if body["logprobs"] else None
            choice = {
                "token_ids": [7],
                "logprobs": {"token_logprobs": [-0.5], "top_logprobs": top},
                "finish_reason": finish,
            }
            try:
                self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
                self.wfile.flush()
            except OSError:
                return
            if body["prompt"][0] == 8 and number == 1:
                return
            if body["prompt"][0] == 6:
                SILENT.wait()
            time.sleep(0.05 if body["prompt"][0] == 9 else 0)
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def engine() -> Iterator[VLLMEngine]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    runner = VLLMServer(
        Address(f"http://127.0.0.1:{server.server_port}"),
        None,
        max_streams=4,
        timeout=3000,
        bucket_bytes=1 << 16,
    )
    made = VLLMEngine(runner, eos_token_ids=[2])
    made.update_weights([("w", torch.arange(5.0))], 3)
    yield made
    made.close()
    server.shutdown()
    server.server_close()
    SILENT.clear()


def request(number: int, first: int = 5, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        number, Prompt((first,)), SamplingParams(**{"max_tokens": 3, **sampling}), seed=number
    )


def test_streams_become_outputs(engine: VLLMEngine) -> None:
    assert torch.equal(HELD["w"], torch.arange(5.0)) and engine.policy_version == 3
    found = {
        output.request_id: output
        for output in engine.generate([request(number, top_log_probs=number % 2) for number in range(9)])
    }
    assert sorted(found) == list(range(9))
    assert all(
        each.token_ids == [7, 7, 7] and each.log_probs == [-0.5] * 3 and each.policy_versions == [3] * 3
        for each in found.values()
    )
    assert found[1].top_log_probs == [[(7, -0.5)]] * 3 and found[0].top_log_probs is None


def test_weights_of_another_run_are_none(engine: VLLMEngine) -> None:
    assert isinstance(engine.runner, VLLMServer)
    other = VLLMEngine(
        VLLMServer(engine.runner.address, None, max_streams=4, timeout=3000, bucket_bytes=1 << 16),
        eos_token_ids=[2],
    )
    assert (engine.policy_version, other.policy_version) == (3, -1)
    with pytest.raises(RolloutError, match="update_weights must come first"):
        list(other.generate([request(0)]))
    other.close()


def test_a_refused_request_is_an_error_of_its_own_and_a_cut_stream_is_the_engines_end(
    engine: VLLMEngine,
) -> None:
    refused, served = sorted(
        engine.generate([request(0, 4), request(1)]), key=lambda output: output.request_id
    )
    assert "vllm refused it" in str(refused.error) and served.finish_reason == "length"
    with pytest.raises(EngineDied, match=r"vllm server http://127\.0\.0\.1.* died: the stream ended"):
        list(engine.generate([request(2, 8, max_tokens=5)]))
    with pytest.raises(RolloutError, match=r"died earlier: the stream ended before the response did"):
        list(engine.generate([request(3)]))


def test_a_server_that_is_not_well_is_the_engines_end_and_not_that_of_a_request(engine: VLLMEngine) -> None:
    (refused,) = engine.generate([request(0, 10)])
    assert "vllm refused it: an issue" in str(refused.error)
    assert isinstance(engine.runner, VLLMServer)
    other = replace(engine.runner)
    try:
        with pytest.raises(EngineDied, match=r"died: an issue; .*/health answered 503"):
            list(engine.generate([request(1, 11)]))
        with pytest.raises(EngineDied, match=r"answered 500: .*cancelled.*/health answered 503"):
            other.version()
    finally:
        UNWELL.clear()


def test_abort_hangs_up(engine: VLLMEngine) -> None:
    running = engine.generate(
        [request(0, 5, max_tokens=1), request(1, 9, max_tokens=90), request(2, 9, max_tokens=4)]
    )
    assert next(running).request_id == 0
    (partial,) = engine.abort([1])
    assert partial.finish_reason == "abort" and len(partial.token_ids) < 90
    assert [output.request_id for output in running] == [2]


def test_abort_hangs_up_on_a_server_that_says_nothing(engine: VLLMEngine) -> None:
    """A reader waits for the next bytes; neither the abort nor this process's end waits with it."""
    running = engine.generate([request(0, 6), request(1)])
    try:
        assert next(running).request_id == 1
        engine.abort([0])
        assert list(running) == []
        assert isinstance(engine.runner, VLLMServer)
        engine.runner._pool.shutdown()  # would wait for ever for a reader that was not cut off
    finally:
        SILENT.set()


def test_another_thread_may_abort_all_that_run(engine: VLLMEngine) -> None:
    running = engine.generate([request(0, 6), request(1)])
    try:
        assert next(running).request_id == 1
        partials: list[GenerationOutput] = []
        timer = threading.Timer(0.2, lambda: partials.extend(engine.abort([0, 1])))
        timer.start()
        assert list(running) == []
        timer.join()
        assert [output.request_id for output in partials] == [0] and not SILENT.is_set()
    finally:
        SILENT.set()


def test_a_server_that_had_adapters_of_another_run_gets_a_base_of_this_one(engine: VLLMEngine) -> None:
    assert isinstance(engine.runner, VLLMServer)
    settings: dict[str, Any] = {"max_streams": 4, "timeout": 3000, "bucket_bytes": 1 << 16, "adapters": True}
    ADAPTERS.clear()
    NAMES.clear()
    for asked in (["load", "ready"], ["load", "unload", "load", "ready"]):
        RECEIVED.version, RECEIVED.has_base = 7, True
        made = VLLMEngine(VLLMServer(engine.runner.address, None, **settings), eos_token_ids=[2])
        assert not made.has_base and made.policy_version == -1, "what is there is an earlier run's"
        made.close()
        assert ADAPTERS[-len(asked) :] == asked
    NO_ADAPTERS.set()
    with pytest.raises(RolloutError, match=r"set actor_rollout_ref\.rollout\.lora_as_adapters=false"):
        VLLMEngine(VLLMServer(engine.runner.address, None, **settings), eos_token_ids=[2])
    NO_ADAPTERS.clear()
    assert ADAPTERS[-1] == "ready", "its folder is gone"


def test_a_python_of_its_own_is_that_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def start(arguments: dict[str, Any], *, python: str | None, **_: Any) -> Any:
        asked.append(python)
        raise RolloutError("it starts")

    monkeypatch.setattr(vllm_build, "start_server", start)
    config = RolloutConfig(name="vllm", max_model_len=64, server=RolloutServerConfig(python="another/python"))
    facts = ModelFacts(str(create_tiny_model(tmp_path / "model", seed=0)), torch.device("cpu"), "float32")
    with pytest.raises(RolloutError, match="it starts"):
        vllm_build.build_vllm_engine(config, facts, [2])
    assert asked == ["another/python"]


def test_addresses() -> None:
    with pytest.raises(RolloutError, match="wanted http://HOST:PORT"):
        Address("10.0.0.1:80")
    with pytest.raises(ServerGone):
        Address(f"http://127.0.0.1:{free_port()}").call("/health", timeout=60, method="GET")
    assert issubclass(Refused, RolloutError)


def test_a_server_that_ends_before_it_answers_says_its_last_words() -> None:
    process = ServerProcess(
        [sys.executable, "-c", "import sys; print('out of luck'); sys.exit(3)"], os.environ, engine="vllm"
    )
    with pytest.raises(RolloutError, match=r"did not start \(exit code 3\); its log .* ends: out of luck"):
        process.wait_until_ready(Address(f"http://127.0.0.1:{free_port()}"), 600)
    process.stop()


def test_a_server_that_takes_too_long_is_ended() -> None:
    process = ServerProcess(
        [sys.executable, "-c", "import time; time.sleep(3600)"], os.environ, engine="vllm"
    )
    with pytest.raises(RolloutError, match=r"server\.start_timeout"):
        process.wait_until_ready(Address(f"http://127.0.0.1:{free_port()}"), 0.1)
    assert process.exit_code() is not None


STUBBORN = """
import pathlib, signal, subprocess, sys, time
worker = (
    "import signal, time; signal.signal(signal.SIGTERM, lambda *_: None); "
    "print('ready', flush=True); time.sleep(3600)"
)
child = subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.PIPE)
child.stdout.readline()
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(3600)
"""
"""A server that ends when it is told to, and whose worker does not."""


def worker_of(file: Path) -> int:
    deadline = time.monotonic() + 600
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(file.read_text())


@pytest.mark.parametrize("how", ["stop", "driver killed"])
def test_a_server_ends_with_its_workers(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "_STOP_S", 0.5)
    file = tmp_path / "pid"
    command = [sys.executable, "-c", STUBBORN, str(file)]
    if how == "stop":
        server = ServerProcess(command, os.environ, engine="vllm")
        worker = psutil.Process(worker_of(file))
        assert worker in psutil.Process(server.pid).children(recursive=True)
        server.stop()
        assert server.exit_code() is not None and not server.log.exists()
    else:
        start = (
            f"import json, os, time; import {process_module.__name__} as each; each._STOP_S = 0.5; "
            f"each.ServerProcess({command!r}, os.environ, engine='vllm'); time.sleep(3600)"
        )
        driver = subprocess.Popen([sys.executable, "-c", start])
        worker = psutil.Process(worker_of(file))
        driver.kill()
        driver.wait()
    assert not psutil.wait_procs([worker], timeout=600)[1]


def test_an_engine_that_cannot_be_had_leaves_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    started = SimpleNamespace(pid=1, exit_code=lambda: None, last_words=lambda: "")
    runner = VLLMServer(
        Address("http://127.0.0.1:1"), cast(Any, started), max_streams=1, timeout=1, bucket_bytes=64
    )
    monkeypatch.setattr(runner, "close", lambda: closed.append(True))
    with pytest.raises(RolloutError, match=r"vllm server http://127\.0\.0\.1:1 .* died"):
        VLLMEngine(runner, eos_token_ids=[2])
    assert closed
