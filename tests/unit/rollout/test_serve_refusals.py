"""Who may not ask, what cannot be served, and the limits: each with a status and a reason."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from serving import TOKEN, TOOL_TEMPLATE, Served, echoes, ids, serve_script

from hybridflow.errors import ConfigError
from hybridflow.rollout.server.answers import CompletionAnswer
from hybridflow.rollout.server.app import EventStream
from hybridflow.rollout.server.job import completion_job
from hybridflow.rollout.server.run import choose_token, listen
from hybridflow.rollout.server.schema import CompletionBody
from hybridflow.rollout.server.service import ServerLimits

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]
LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 400}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    limits = ServerLimits(max_queue=64, max_body_bytes=20_000)
    with serve_script(model={"chat_template": TOOL_TEMPLATE}, limits=limits) as server:
        yield server
        answer = server.http.post(PLAIN, json={"prompt": "ab", "max_tokens": 2})
        assert answer.json()["choices"][0]["text"] == "ba"
        server.wait_idle()


def reason(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Authorization": f"Basic {TOKEN}"}],
)
def test_without_the_token_there_is_nothing(served: Served, headers: dict[str, str]) -> None:
    for path in (CHAT, PLAIN, "/v1/models", "/metrics", "/nothing"):
        body = {"prompt": "a"} if path in (CHAT, PLAIN) else None
        answer = httpx.request("POST" if body else "GET", served.url + path, headers=headers, json=body)
        assert "Authorization: Bearer TOKEN" in reason(answer, 401)
        assert answer.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{served.url}/health").status_code == 200
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0).models.list()


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_of_a_token_may_be_in_any_case(served: Served, scheme: str) -> None:
    headers = {"Authorization": f"{scheme} {TOKEN}"}
    assert httpx.get(f"{served.url}/v1/models", headers=headers).status_code == 200


def refused_requests() -> Iterator[tuple[str, Any, str]]:
    """Path, body and a part of the message of each request of the table, and of those that are no YAML."""
    table = yaml.safe_load(Path(__file__).with_name("refused_requests.yaml").read_text(encoding="utf-8"))
    for fields, told in table["completions"]:
        yield PLAIN, {"prompt": "a", **fields} if fields else {}, told
    for fields, told in table["chat"]:
        yield CHAT, {"messages": HELLO, **fields}, told
    yield PLAIN, {"prompt": "a" * 600}, "the model's context has 512 tokens"
    for content, told in ((b"{", "the body is no JSON"), (b"[]", "body: "), (b"\xff\xfe", "body")):
        yield PLAIN, content, told


@pytest.mark.parametrize(("path", "body", "told"), list(refused_requests()))
def test_what_cannot_be_served_is_said(served: Served, path: str, body: Any, told: str) -> None:
    for stream in (False, True):
        if isinstance(body, dict):
            streamed = stream and "stream_options" not in body
            answer = served.http.post(path, json={**body, "stream": True} if streamed else body)
        else:
            answer = served.http.post(path, content=body, headers={"content-type": "application/json"})
        assert told in reason(answer, 400)


def test_other_models_paths_methods_and_large_bodies(served: Served) -> None:
    assert "no model 'gpt'" in reason(served.http.post(PLAIN, json={"model": "gpt", "prompt": "a"}), 404)
    assert "GET /nothing" in reason(served.http.get("/nothing"), 404)
    assert reason(served.http.get(PLAIN), 405)
    assert "20000 bytes" in reason(served.http.post(PLAIN, json={"prompt": "a" * 30_000}), 413)
    chunks = served.http.post(PLAIN, content=(b"x" * 1_000 for _ in range(40)))
    assert "20000 bytes" in reason(chunks, 413)


@pytest.mark.parametrize("broken", ["{{ 2.0 ** 9999 }}", "{{ messages[0].content.nothing() }}", "{% for %}"])
def test_a_template_that_breaks_is_a_bad_request(broken: str) -> None:
    with serve_script(model={"chat_template": broken}) as server:
        answer = server.http.post(CHAT, json={"messages": HELLO})
    assert "chat template does not take them" in reason(answer, 400)


def test_a_template_that_refuses_is_a_bad_request() -> None:
    with serve_script(model={"chat_template": "{{ raise_exception('roles must alternate') }}"}) as server:
        assert "roles must alternate" in reason(server.http.post(CHAT, json={"messages": HELLO}), 400)


def endless(request: Any) -> list[int]:
    return ids("x") * 10_000


def test_a_full_queue_says_so() -> None:
    with serve_script(endless, limits=ServerLimits(max_queue=3), seconds=0.05) as server:
        with server.http.stream("POST", PLAIN, json={**LONG, "n": 2, "stream": True}) as running:
            chunks = running.iter_raw()  # kept: the stream ends with its iterator
            next(chunks)
            answer = server.http.post(PLAIN, json={"prompt": "a", "n": 2})
            assert "2 responses run or wait" in reason(answer, 429) and answer.headers["retry-after"] == "1"
            assert server.http.post(PLAIN, json={"prompt": "a", "max_tokens": 2}).status_code == 200
        server.wait_idle()


def test_clients_that_go_away_free_their_rows() -> None:
    with serve_script(endless, seconds=0.05) as server:  # 400 tokens would take 20 s
        with server.http.stream("POST", PLAIN, json={**LONG, "n": 3, "stream": True}) as running:
            chunks = running.iter_raw()  # kept: the stream ends with its iterator
            next(chunks)
            assert server.service.open_choices == 3
        server.wait_idle()
        with pytest.raises(httpx.ReadTimeout):
            server.http.post(PLAIN, json={**LONG, "n": 3}, timeout=1)
        server.wait_idle()
        assert server.sessions[0].steps < 350 and server.service.metrics.cancelled == 2


def test_a_client_that_takes_nothing_of_its_stream_is_left() -> None:
    with serve_script(endless, limits=ServerLimits(send_timeout_s=0.05), seconds=0.05) as server:
        service, begun = server.service, asyncio.Event()
        body = CompletionBody(**LONG, n=2, stream=True)
        job = completion_job(body, service.model, lambda: None)

        async def takes_nothing(message: Any) -> None:
            begun.set()
            if message["type"] == "http.response.body":
                await asyncio.sleep(3600)

        async def stays() -> Any:
            await asyncio.sleep(3600)

        stream = EventStream(service, job, CompletionAnswer(job, service.model))
        asyncio.run(asyncio.wait_for(stream({}, stays, takes_nothing), 600))
        assert begun.is_set()
        server.wait_idle()
        assert server.sessions[0].steps < 350


def test_a_deadline_is_504_or_an_event() -> None:
    with serve_script(endless, limits=ServerLimits(deadline_s=0.1), seconds=0.05) as server:
        assert "within 0.1 s" in reason(server.http.post(PLAIN, json=LONG), 504)
        server.wait_idle()
    with serve_script(
        endless, limits=ServerLimits(deadline_s=3.0), seconds=0.05
    ) as server:  # a stream has begun by then
        text = server.http.post(PLAIN, json={**LONG, "stream": True}).text
        assert '"code": "deadline_passed"' in text and text.endswith("data: [DONE]\n\n")
        server.wait_idle()


def test_an_engine_that_dies_is_named_and_the_server_goes_on_saying_so() -> None:
    with serve_script(endless, dies_at=5) as server:
        assert "native-0 died: RuntimeError" in reason(server.http.post(PLAIN, json=LONG), 503)
        told = "no engine is alive: replica native-0 died"
        assert told in reason(server.http.post(PLAIN, json=LONG), 503)
        assert "no engine is alive" in reason(server.http.get("/health"), 503)


def test_at_the_end_what_runs_is_finished_and_nothing_new_begins() -> None:
    with serve_script(endless, seconds=0.002) as server:
        answers: list[httpx.Response] = []
        body = {"prompt": "a", "max_tokens": 200}
        asking = threading.Thread(target=lambda: answers.append(server.http.post(PLAIN, json=body)))
        with server.http as kept:
            assert kept.get("/version").status_code == 200
            asking.start()
            while not server.service.open_choices:
                time.sleep(0.002)
            server.server.handle_exit(15, None)
            server.thread.join(600)
            asking.join(600)
        assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 200
        with pytest.raises(httpx.ConnectError):
            server.http.get("/version")


def test_a_draining_server_lets_nothing_in() -> None:
    with serve_script() as server:
        server.service.draining = True
        assert "shutting down" in reason(server.http.post(PLAIN, json={"prompt": "a"}), 503)
        assert "shutting down" in reason(server.http.get("/health"), 503)


def test_tokens_and_hosts() -> None:
    token, made = choose_token("127.0.0.1", None)
    assert made and token is not None and len(token) >= 32 and token != choose_token("127.0.0.1", None)[0]
    assert choose_token("localhost", "mine") == ("mine", False)
    assert choose_token("::1", None, no_token=True) == (None, False)
    assert choose_token("0.0.0.0", "x" * 16) == ("x" * 16, False)
    for host, given, no_token, told in (
        ("0.0.0.0", None, False, "needs a token of at least 16"),
        ("0.0.0.0", "short", False, "needs a token of at least 16"),
        ("10.0.0.1", None, True, "needs a token of at least 16"),
        ("127.0.0.1", "", False, "is empty"),
        ("127.0.0.1", "two words", False, "characters that no header may have"),
        ("127.0.0.1", "mine", True, "exclude each other"),
    ):
        with pytest.raises(ConfigError, match=told):
            choose_token(host, given, no_token=no_token)


def test_a_taken_port_is_said() -> None:
    with listen("127.0.0.1", 0) as bound:
        bound.listen()
        with pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1:\d+: Address already in use"):
            listen("127.0.0.1", bound.getsockname()[1])
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        listen("192.0.2.1", 8000)


def test_replicas_share_the_work() -> None:
    with serve_script(echoes, replicas=2, seconds=0.002) as server:

        async def ask(number: int) -> None:
            answer = await client.completions.create(model="tiny", prompt=f"a{number}", max_tokens=8)
            assert answer.choices[0].text == f"a{number}"[::-1]

        async def ask_all() -> None:
            async with client:
                await asyncio.gather(*map(ask, range(20)))

        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0)
        asyncio.run(ask_all())
        assert all(session.num_added > 5 for session in server.sessions)
