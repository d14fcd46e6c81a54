"""Requests meant to end or slow the server get a sentence each, and the next is served as ever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import TOKEN, TOKENIZER, TOOL_TEMPLATE, Served, serve_client, serve_script

from hybridflow.models.tiny import create_tiny_model
from hybridflow.rollout.client import EngineReplica
from hybridflow.rollout.server import prompts as prompts_module
from hybridflow.rollout.server.build import ServeSettings, build_service
from hybridflow.tools.parsers import TOOL_PARSERS

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
HALF = "\ud800"
HUGE = 10**30


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server on the native engine, which every request of this file leaves as it was."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model = create_tiny_model(folder, hidden=32, intermediate=64, heads=2, kv_heads=1)
    service = build_service(ServeSettings(str(model), "tiny", max_num_seqs=32, max_model_len=256))
    with serve_client(service.client, service.model) as server:
        yield server
        assert server.http.post(PLAIN, json={"prompt": "1", "max_tokens": 2}).status_code == 200
        (replica,) = service.client.replicas
        assert isinstance(replica, EngineReplica) and replica.failure is None


def ask(server: Served, path: str, body: dict[str, Any] | bytes) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return server.http.post(path, content=content, headers={"content-type": "application/json"})


def chat(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **more}


def called_with(arguments: str) -> dict[str, Any]:
    """A conversation in which a tool was called with these arguments."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    return {"messages": messages, "max_tokens": 2}


ALL_TOKENS = list(range(len(TOKENIZER)))


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (PLAIN, {"prompt": HALF}, "prompt: holds half of a surrogate pair"),
        (PLAIN, {"prompt": [HALF], "echo": True}, "prompt: holds half of a surrogate pair"),
        (PLAIN, {"prompt": "a", "stop": HALF}, "stop: Input should be a valid string"),
        (PLAIN, {"prompt": "a", "logit_bias": {HALF: 1}}, "is no token id"),
        (PLAIN, {"prompt": "a", HALF: 1}, "body: "),
        (CHAT, chat(HALF), "messages: holds half of a surrogate pair"),
        (CHAT, chat([{"type": "text", "text": HALF}]), "messages: holds half of a surrogate pair"),
        (CHAT, called_with("[" * 100_000), "arguments of 'f' are no JSON: nested too deeply"),
        (CHAT, called_with('{"a": ' + "9" * 5_000 + "}"), "arguments of 'f' are no JSON"),
        (PLAIN, b"[" * 100_000, "body"),
        (PLAIN, {"prompt": "a", "logit_bias": {"5" * 5_000: 1}}, "a name of 5000 characters is no token id"),
        (PLAIN, {"prompt": "a", "logit_bias": {"5": 1, "05": 2}}, "token id 5 is given twice, once as '05'"),
        (PLAIN, {"prompt": "a", "logit_bias": {str(n): 1 for n in range(2_000)}}, "logit_bias: "),
        (PLAIN, {"prompt": "a", "temperature": 1e-45}, "temperature=1e-45: use a number from 1e-20"),
        (PLAIN, {"prompt": "a", "temperature": 1e300}, "temperature=1e+300: use a number from"),
        (PLAIN, {"prompt": "a", "repetition_penalty": 1e300}, "repetition_penalty=1e+300: use a number"),
        (PLAIN, {"prompt": "a", "stop_token_ids": ALL_TOKENS, "min_tokens": 1}, "forbid every token"),
        (
            PLAIN,
            {"prompt": "a", "stop_token_ids": [5] * 1_000_000},
            "stop_token_ids: List should have at most 1024",
        ),
        (PLAIN, {"prompt": "a", "stop_token_ids": [HUGE]}, f"stop_token_ids: holds token id {HUGE}"),
        (PLAIN, {"prompt": "a", "stop": ["x"] * 1_000}, "stop"),
        (PLAIN, {"prompt": "a", "stop": "x" * 10_000}, "stop"),
        (PLAIN, {"prompt": [HUGE]}, f"prompt: holds token id {HUGE}"),
        (PLAIN, {"prompt": [""] * 300_000}, "300000 prompts are more than 1024 in one request"),
        (PLAIN, {"prompt": ["a"] * 600, "n": 2}, "600 prompts times 2 responses are more than 1024"),
        (PLAIN, {"prompt": "a" * 3_000_000}, "256 tokens, and this text has at least 250000: shorten it"),
        (CHAT, chat("a" * 3_000_000), "256 tokens, and this text has at least 2500"),
        (PLAIN, {"prompt": "a", "n": HUGE}, "n: "),
        (PLAIN, {"prompt": "a", "max_tokens": HUGE}, "max_tokens: "),
        (PLAIN, {"prompt": "a", "max_tokens": int("9" * 4_000)}, "max_tokens: "),
        (PLAIN, {"prompt": "a", "min_tokens": HUGE}, "min_tokens: "),
        (PLAIN, {"prompt": "a", "top_k": -HUGE}, "top_k=-1000"),
    ],
)
def test_what_cannot_be_served_is_a_400_with_a_sentence(
    served: Served, path: str, body: Any, told: str
) -> None:
    answer = ask(served, path, body)
    assert answer.status_code == 400, answer.text
    assert told in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 2**63},
        {"top_k": HUGE},
        {"top_k": HUGE, "temperature": 0},
        {"seed": HUGE},
        {"seed": -(2**63)},
        {"temperature": 1e-19},
        {"temperature": 1e19},
        {"top_p": 1e-300},
        {"min_p": 1e-300},
        {"repetition_penalty": 1e6, "temperature": 1e-19},
        {"stop_token_ids": [5] * 1_000},
        {"prompt_cache_key": HALF},
        {"n": None, "echo": None, "logprobs": None, "stop": None, "best_of": None, "min_tokens": None},
        {"ignore_eos": None, "skip_special_tokens": None, "add_special_tokens": None, "not_a_field": None},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_can_be_served_is_served(served: Served, fields: dict[str, Any], stream: bool) -> None:
    answer = ask(served, PLAIN, {"prompt": "1", "max_tokens": 4, "stream": stream, **fields})
    assert answer.status_code == 200, answer.text
    assert not stream or answer.text.endswith("data: [DONE]\n\n")


def test_a_top_k_beyond_the_vocabulary_means_all_tokens(served: Served) -> None:
    texts = set()
    for fields in ({}, {"top_k": 10**6}, {"top_k": HUGE}):
        body = {"prompt": "1", "max_tokens": 12, "seed": 3, "ignore_eos": True, **fields}
        texts.add(ask(served, PLAIN, body).json()["choices"][0]["text"])
    assert len(texts) == 1


class CountingTokenizer:
    """A tokenizer that counts the characters it is given."""

    def __init__(self) -> None:
        self.num_characters = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.num_characters += len(text)
        return TOKENIZER(text, **options)


def test_texts_that_cannot_fit_are_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = CountingTokenizer()
    with serve_script(model={"tokenizer": tokenizer, "chat_template": TOOL_TEMPLATE}) as server:
        ask(server, PLAIN, {"prompt": "a", "max_tokens": 1})
        tokenizer.num_characters = 0
        for path, body in (
            (PLAIN, {"prompt": "a" * 3_000_000}),
            (PLAIN, {"prompt": [""] * 3_000_000}),
            (PLAIN, {"prompt": ["abc"] * 600, "n": 2}),
            (CHAT, chat("a" * 3_000_000)),
        ):
            assert ask(server, path, body).status_code == 400
        assert tokenizer.num_characters == 0
        # a text that might fit by its length is tokenised until it is seen not to
        monkeypatch.setattr(prompts_module, "SLICE", 1_000)
        told = ask(server, PLAIN, {"prompt": "a" * 6_000}).json()["error"]
        assert told["code"] == "context_length_exceeded" and tokenizer.num_characters == 1_000


class SlowTokenizer(CountingTokenizer):
    """A tokenizer that does not come to an end with texts that hold a z, until it is let go on."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.slow: list[str] = []

    def __call__(self, text: str, **options: Any) -> Any:
        if "z" in text:
            self.slow.append(text)
            self.begun.set()
            self.go_on.wait(300)
        return super().__call__(text, **options)


def test_an_exception_that_a_future_refuses_reaches_the_request() -> None:
    class Exhausted(CountingTokenizer):
        def __call__(self, text: str, **options: Any) -> Any:
            raise StopIteration("no more tokens")

    with serve_script(model={"tokenizer": Exhausted()}) as server:
        answer = ask(server, PLAIN, {"prompt": "a"})
    assert answer.status_code == 500 and "RuntimeError" in answer.json()["error"]["message"]


def test_a_long_text_holds_up_no_short_one_and_is_dropped_with_its_client() -> None:
    tokenizer = SlowTokenizer()
    with serve_script(model={"tokenizer": tokenizer, "max_model_len": 100_000}) as server:
        long = {"prompt": ["z" * 70_000, "z" * 70_001], "max_tokens": 2}

        def leave() -> None:
            with pytest.raises(httpx.ReadTimeout):
                server.http.post(PLAIN, json=long, timeout=2)

        leaving = threading.Thread(target=leave)
        leaving.start()
        assert tokenizer.begun.wait(60)
        assert ask(server, PLAIN, {"prompt": "ab", "max_tokens": 2}).json()["choices"][0]["text"] == "ba"
        leaving.join(60)
        server.wait_idle()
        ends = 2_000
        while server.service.readers.num_open and (ends := ends - 1):
            threading.Event().wait(0.01)
        assert server.service.readers.num_open == 0
        tokenizer.go_on.set()
        # the thread of long texts goes on with the next one
        assert ask(server, PLAIN, {"prompt": "a" * 70_000, "max_tokens": 2}).status_code == 200
        assert len(tokenizer.slow) == 1, "of the first text one slice was read, and nothing of the other"


PROCESS = """
import sys, time
from fake_session import FakeSession
from serving import TOKEN, TOKENIZER, echoes, tiny_model
from test_serve_hostile import SlowTokenizer
from hybridflow.rollout.client import EngineReplica, LLMClient
from hybridflow.rollout.server.run import listen, run_server
from hybridflow.rollout.server.service import ServerLimits, Service

class StuckSession(FakeSession):
    def step(self):
        if "step" in sys.argv:
            print("begun", flush=True)
            time.sleep(600)
        return super().step()

class Slow(SlowTokenizer):
    def __call__(self, text, **options):
        if "z" in text:
            print("begun", flush=True)
            time.sleep(600)
        return TOKENIZER(text, **options)

client = LLMClient([EngineReplica(StuckSession(echoes))])
bound = listen("127.0.0.1", 0)
print(bound.getsockname()[1], flush=True)
run_server(Service(client, tiny_model(tokenizer=Slow()), ServerLimits()), bound, token=TOKEN, grace_s=1)
"""


@pytest.mark.parametrize("where", [pytest.param("tokenizer", marks=pytest.mark.slow), "step"])
def test_the_process_ends_within_its_grace_whatever_a_thread_does(where: str) -> None:
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, "-c", PROCESS, where]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            url = f"http://127.0.0.1:{process.stdout.readline().strip()}{PLAIN}"
            headers = {"Authorization": f"Bearer {TOKEN}"}
            body = {"prompt": "z" if where == "tokenizer" else "a", "max_tokens": 4}

            def wait_for_answer() -> None:
                with pytest.raises(httpx.HTTPError):
                    httpx.post(url, json=body, headers=headers, timeout=300).raise_for_status()

            asking = threading.Thread(target=wait_for_answer, daemon=True)
            asking.start()
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(300) == 0  # what it waits for would take ten minutes
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()


@pytest.mark.parametrize("n", [2, 5])
def test_each_of_several_responses_has_a_seed_of_its_own(n: int) -> None:
    seeds: list[int] = []

    def says(request: Any) -> list[int]:
        if request.request_id not in known:
            known.add(request.request_id)
            seeds.append(request.seed)
        return list(request.prompt_token_ids)

    known: set[int] = set()
    with serve_script(says) as server:
        for _ in range(2):
            assert ask(server, PLAIN, {"prompt": ["ab", "ab", "cd"], "n": n, "seed": 7}).status_code == 200
        first, again = seeds[: 3 * n], seeds[3 * n :]
        assert len(set(first)) == 3 * n and sorted(first) == sorted(again)
        assert ask(server, PLAIN, {"prompt": "ab", "n": n}).status_code == 200
        assert len(set(seeds)) == 4 * n  # without a seed they are new ones


@pytest.mark.parametrize("name", list(TOOL_PARSERS))
@pytest.mark.parametrize(
    "value", ['"\\ud800"', "[" * 100_000, "9" * 5_000], ids=["surrogate", "deep", "long"]
)
def test_a_call_that_the_model_wrote_never_breaks_the_answer(name: str, value: str) -> None:
    parser = TOOL_PARSERS[name]()
    written = {
        "hermes": f'<tool_call>{{"name": "f", "arguments": {{"a": {value}}}}}</tool_call>',
        "llama3_json": f'{{"name": "f", "parameters": {{"a": {value}}}}}',
        "qwen3_coder": f"<tool_call><function=f><parameter=a>{value}</parameter></function></tool_call>",
        "gpt-oss": f'to=functions.f<|message|>{{"a": {value}}}<|call|>',
        "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
        f'{{"a": {value}}}<｜tool▁calls▁end｜>',
        "glm": f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>",
        "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>"
        f'{{"a": {value}}}<|tool_calls_section_end|>',
        "mistral": f'[TOOL_CALLS]f[ARGS]{{"a": {value}}}',
        "python": f"```python\n{value}\n```",
        "code_interpreter": f"```python\n{value}\n```",
    }[name]
    parts = [*parser.feed(written), *parser.end()]
    assert parts
    for part in parts:
        text = part if isinstance(part, str) else part.name + part.arguments
        assert text.encode()
