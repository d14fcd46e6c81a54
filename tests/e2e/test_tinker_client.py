"""`hybridflow tinker` as a process: killed and begun anew, and asked by Tinker's client if it is here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from hybridflow.models.tiny import create_tiny_model
from plain_tinker import KEY, PlainClient, PlainRun, Row

pytestmark = pytest.mark.slow
TOKENS = [20, 30, 40, 50, 60]
ROWS: list[Row] = [(TOKENS[:-1], {"target_tokens": TOKENS[1:], "weights": [1.0] * 4})]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(create_tiny_model(tmp_path_factory.mktemp("model") / "tiny", hidden=64, intermediate=96))


@contextmanager
def server(model: str, folder: Path, *, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server and its address."""
    key_file = folder / "key"
    folder.mkdir(exist_ok=True)
    key_file.write_text(f"{KEY}\n")
    words = ["tinker", model, "--folder", str(folder / "state"), "--port", str(port), "--device", "cpu"]
    words += ["--api-key-file", str(key_file)]
    process = subprocess.Popen(
        [sys.executable, "-m", "hybridflow", *words],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving "), line
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.wait()


def learn(run: PlainRun, steps: int, rows: list[Row] = ROWS) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(run.forward_backward(rows, "cross_entropy")[1])
        run.step(learning_rate=1e-2)
    return losses


def test_a_killed_server_goes_on_from_what_was_saved(model: str, tmp_path: Path) -> None:
    with server(model, tmp_path) as (process, url):
        client = PlainClient(httpx.Client(base_url=url, timeout=600))
        run = client.train(model)
        learn(run, 3)
        path = run.save("three")
        at = run.seq
        wanted = learn(run, 3)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with server(model, tmp_path) as (process, url):
        client.http = httpx.Client(base_url=url, timeout=600)
        run.seq = at
        assert learn(run, 3) == wanted
        assert learn(client.load(path), 3) == wanted
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_the_client_of_tinker(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tinker = pytest.importorskip("tinker")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    types = tinker.types
    weights = {"target_tokens": TOKENS[1:], "weights": [1.0] * 4}
    datum = types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=weights)
    with server(model, tmp_path) as (process, url):
        with pytest.raises(Exception, match="the token is not the server's"):
            tinker.ServiceClient(base_url=url, api_key="tml-wrong").create_lora_training_client(
                model
            ).result()
        service = tinker.ServiceClient(base_url=url, api_key=KEY)
        run = service.create_lora_training_client(model, rank=8, seed=1).result()
        assert run.get_info().lora_rank == 8 and run.get_tokenizer().decode(TOKENS)
        plain = PlainClient(httpx.Client(base_url=url, timeout=600)).train(model, rank=8, seed=1)
        losses = []
        for _ in range(3):
            future = run.forward_backward([datum, datum], "cross_entropy")
            done = run.optim_step(types.AdamParams(learning_rate=1e-2))
            losses.append(future.result().metrics["loss:sum"])
            assert done.result().metrics["grad_norm"] > 0
        assert losses == learn(plain, 3, ROWS * 2)

        def custom(data: Any, log_probs: Any) -> tuple[Any, dict[str, float]]:
            return -sum(each.sum() for each in log_probs), {}

        found = run.forward_backward_custom([datum], custom).result()
        direct = run.forward([datum], "cross_entropy").result()
        assert found.metrics["loss:sum"] == pytest.approx(direct.metrics["loss:sum"], rel=1e-6)
        run.optim_step(types.AdamParams(learning_rate=0.0)).result()
        sampler = run.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints(TOKENS)
        params = types.SamplingParams(max_tokens=5, seed=2, stop=[])
        sampled = sampler.sample(prompt, 2, params).result()
        assert [len(each.tokens) for each in sampled.sequences] == [5, 5]
        assert len({each.sequence_id for each in sampled.sequences}) == 2
        scores = sampler.compute_logprobs(prompt).result()
        assert scores[0] is None and scores[1:] == pytest.approx(
            direct.loss_fn_outputs[0]["logprobs"].data, abs=1e-5
        )
        with pytest.raises(tinker.RequestFailedError, match="ppo wants advantages"):
            run.forward_backward([datum], "ppo").result()
        named = run.save_weights_for_sampler("end").result().path
        again = service.create_sampling_client(model_path=named).result().sample(prompt, 2, params).result()
        assert [each.tokens for each in again.sequences] == [each.tokens for each in sampled.sequences]
        path = run.save_state("end").result().path
        process.kill()
        process.wait()
    with server(model, tmp_path, port=int(url.rpartition(":")[2])) as (process, url):
        # the clients of before go on: nothing was asked between the save and the kill
        assert run.forward([datum], "cross_entropy").result().metrics == direct.metrics
        again = sampler.sample(prompt, 2, params).result()
        assert [each.tokens for each in again.sequences] == [each.tokens for each in sampled.sequences]
        service = tinker.ServiceClient(base_url=url, api_key=KEY)
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        assert resumed.forward([datum], "cross_entropy").result().metrics == direct.metrics
        rest = tinker.RestClient(base_url=url, api_key=KEY)
        assert rest.get_server_capabilities().result().supported_models[0].model_name == model
        listed = rest.list_user_checkpoints().result().checkpoints
        assert {each.tinker_path for each in listed} == {path, named}
        rest.delete_checkpoint_from_tinker_path(named).result()
        assert len(rest.list_user_checkpoints().result().checkpoints) == 1
