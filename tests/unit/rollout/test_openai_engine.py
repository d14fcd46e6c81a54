"""The openai engine against a server whose every answer is written here."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hybridflow.errors import RolloutError
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams
from hybridflow.rollout.openai.engine import OpenAIEngine, check_reachable


class Scripted(ThreadingHTTPServer):
    """Answers a prompt by its first token: 500 fails once, 503 always, 400 refuses, 1 waits until `released`,
    7 has no token ids, others are served.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.tries: dict[int, int] = {}
        self.running, self.most = 0, 0
        self.lock = threading.Lock()
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Scripted

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append(body)
            server.keys.add(self.headers.get("Authorization"))
            server.running += 1
            server.most = max(server.most, server.running)
        status, answer = self.chat(body) if self.path == "/v1/chat/completions" else self.complete(body)
        with server.lock:
            server.running -= 1
        data = json.dumps(answer).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if status == 429:
                self.send_header("Retry-After", "0.2")
            self.end_headers()
            self.wfile.write(data)
        except OSError:  # the engine hung up
            pass

    def chat(self, body: dict[str, Any]) -> tuple[int, Any]:
        said = body["messages"][-1]["content"]
        if said == "bad":
            return 400, {"error": {"message": "no such thing"}}
        return 200, {"choices": [{"message": {"content": said.upper()}, "finish_reason": "stop"}]}

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        first = body["prompt"][0]
        with self.server.lock:
            self.server.tries[first] = self.server.tries.get(first, 0) + 1
        if first == 400:
            return 400, {"error": {"message": "the prompt is too long", "type": "invalid_request_error"}}
        if first == 503 or (first in (500, 429) and self.server.tries[first] == 1):
            return first, {"detail": "overloaded"}
        self.server.released.wait() if first == 1 else time.sleep(0.02)
        ids = [(first + place) % 90 for place in range(body["max_tokens"])]
        names = [f"token_id:{token}" for token in ids]
        log_probs: dict[str, Any] = {"tokens": names, "token_logprobs": [-0.5] * len(ids)}
        if count := body.get("logprobs"):
            log_probs["top_logprobs"] = [
                {f"token_id:{80 - place}": -2.0 - place for place in range(-1, count)} for _ in ids
            ]
        choice: dict[str, Any] = {
            "text": "…",
            "finish_reason": "length",
            "logprobs": log_probs,
            "token_ids": ids,
        }
        if first == 7:
            choice |= {"token_ids": None, "logprobs": None}
        if first == 8:
            choice |= {"logprobs": None, "finish_reason": "stop", "stop_reason": None}
        return 200, {"choices": [choice]}


@pytest.fixture
def server() -> Iterator[Scripted]:
    scripted = Scripted()
    thread = threading.Thread(target=scripted.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield scripted
    scripted.shutdown()
    thread.join()


def request(number: int, first: int, **params: Any) -> GenerationRequest:
    return GenerationRequest(
        number, Prompt((first, 5)), SamplingParams(**{"max_tokens": 3, **params}), seed=number - (1 << 40)
    )


def run(engine: OpenAIEngine, requests: list[GenerationRequest]) -> dict[int, GenerationOutput]:
    return {output.request_id: output for output in engine.generate(requests)}


def test_tokens_and_log_probs_come_back_and_the_key_goes_along(server: Scripted) -> None:
    engine = OpenAIEngine(server.url, model="m", api_key="secret", max_concurrent=4)
    outputs = run(engine, [request(number, 10 + number) for number in range(12)])
    assert {number: output.token_ids for number, output in outputs.items()} == {
        n: [10 + n, 11 + n, 12 + n] for n in range(12)
    }
    assert outputs[3] == GenerationOutput(3, [13, 14, 15], [-0.5] * 3, "length", [0] * 3)
    assert server.keys == {"Bearer secret"} and server.most <= 4
    assert engine.stats.generated_tokens == 36
    assert all(
        body["seed"] >= 0 and body["return_token_ids"] and body["logprobs"] == 0 for body in server.bodies
    )


def test_all_sampling_parameters_have_their_fields(server: Scripted) -> None:
    params: dict[str, Any] = {
        "temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2,
        "min_tokens": 1, "stop": ("x",),
        "stop_token_ids": (5,), "logit_bias": ((6, 1.5),), "ignore_eos": True, "top_log_probs": 2,
    }  # fmt: skip
    output = run(OpenAIEngine(server.url, model="m"), [request(0, 20, **params)])[0]
    body = server.bodies[0]
    wanted = {
        **params,
        "stop": ["x"],
        "stop_token_ids": [5],
        "logit_bias": {"6": 1.5},
        "logprobs": 2,
        "max_tokens": 3,
        "model": "m",
    }
    del wanted["top_log_probs"]
    assert {name: body[name] for name in wanted} == wanted
    assert output.top_log_probs == [[(81, -1.0), (80, -2.0)]] * 3  # the most probable first, none too many
    run(OpenAIEngine(server.url, model="m"), [request(0, 20, greedy=True, temperature=0.5, top_k=3)])
    assert server.bodies[1]["temperature"] == 0 and "top_k" not in server.bodies[1]


def test_what_may_pass_is_tried_again_and_what_not_is_told(server: Scripted) -> None:
    patient = OpenAIEngine(server.url, model="m")
    outputs = run(patient, [request(0, 500), request(1, 400), request(3, 30), request(4, 429)])
    # these two fail until their deadline
    outputs |= run(OpenAIEngine(server.url, model="m", deadline=3.0), [request(2, 503), request(5, 1)])
    reasons = {number: output.finish_reason for number, output in outputs.items()}
    assert {number for number, reason in reasons.items() if reason == "length"} == {0, 3, 4}
    assert {number for number, reason in reasons.items() if reason == "error"} == {1, 2, 5}
    assert server.tries[500] == server.tries[429] == 2 and server.tries[400] == 1 and server.tries[503] >= 2
    assert "the prompt is too long" in str(outputs[1].error) and "request 1" in str(outputs[1].error)
    assert "503" in str(outputs[2].error)
    assert server.url in str(outputs[2].error)
    assert "3 s" in str(outputs[2].error)
    assert "deadline" in str(outputs[5].error)


def test_an_endpoint_that_is_not_there_is_named(server: Scripted) -> None:
    check_reachable(server.url)  # which knows no GET
    with pytest.raises(RolloutError, match=r"nothing answers at http://127\.0\.0\.1:9/v1"):
        check_reachable("http://127.0.0.1:9/v1")
    output = run(OpenAIEngine("http://127.0.0.1:9/v1", model="m", deadline=0.4), [request(0, 3)])[0]
    assert output.finish_reason == "error" and "openai engine at http://127.0.0.1:9/v1" in str(output.error)


def test_without_token_ids_only_text(server: Scripted) -> None:
    output = run(OpenAIEngine(server.url, model="m"), [request(0, 7)])[0]
    assert output.finish_reason == "error" and "chat()" in str(output.error)
    plain = OpenAIEngine(server.url, model="m", extended=False)
    refused = run(plain, [request(0, 20, top_k=3)])[0]
    assert "top_k" in str(refused.error) and "extended" in str(refused.error) and not server.bodies[1:]
    answers = plain.chat(
        [[{"role": "user", "content": word}] for word in ("one", "bad", "two")], SamplingParams(5)
    )
    assert [answer.text for answer in answers] == ["ONE", "", "TWO"]
    assert answers[1].finish_reason == "error" and "no such thing" in str(answers[1].error)
    assert "return_token_ids" not in server.bodies[-1]


def test_log_probs_that_are_not_given_are_nan_and_an_end_token_is_the_reason(server: Scripted) -> None:
    output = run(OpenAIEngine(server.url, model="m"), [request(0, 8)])[0]
    assert all(math.isnan(value) for value in output.log_probs) and len(output.log_probs) == 3
    assert (output.finish_reason, output.stop_reason) == ("stop", 10)


def test_aborting_and_leaving_early(server: Scripted) -> None:
    engine = OpenAIEngine(server.url, model="m")
    stream = engine.generate([request(0, 40), request(1, 1), request(2, 1)])
    assert next(stream).request_id == 0
    with pytest.raises(RolloutError, match=r"generate\(\) is running"):
        engine.generate([])
    with pytest.raises(RolloutError, match="while generate"):
        engine.sleep()
    assert [(output.request_id, output.finish_reason) for output in engine.abort([1, 9])] == [(1, "abort")]
    stream.close()  # type: ignore[attr-defined]  # would wait for ever if it waited for the answer
    assert run(engine, [request(0, 41)])[0].token_ids == [41, 42, 43]
    assert run(engine, []) == {}


def test_its_weights_are_not_ours() -> None:
    engine = OpenAIEngine("http://127.0.0.1:9/v1", model="m")
    engine.set_version(0)
    with pytest.raises(RolloutError, match="native"):
        engine.update_weights([], 1)
    with pytest.raises(RolloutError, match="endpoint"):
        engine.set_version(1)
