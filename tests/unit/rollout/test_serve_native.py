"""The server on the native engine: as a process, with the engine's own answers, for many clients."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import TOKEN, TOKENIZER, Served, ids, serve_client

from hybridflow.errors import ConfigError
from hybridflow.models.copies.quantized_copy import QuantizedCopy
from hybridflow.models.files.build import build_policy
from hybridflow.models.tiny import create_tiny_model
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationRequest, SamplingParams
from hybridflow.rollout.client import EngineReplica
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.rollout.server.build import ServeSettings, build_service

PROMPT = "user: 3 + 4 = "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny", hidden=32, intermediate=64, heads=2, kv_heads=1
    )


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    service = build_service(ServeSettings(str(model), "tiny", max_num_seqs=32, max_model_len=256))
    with serve_client(service.client, service.model) as server:
        yield server


def own(model: Path, sampling: SamplingParams) -> list[int]:
    engine = NativeEngine(build_policy(model, device="cpu"), eos_token_ids=[TOKENIZER.eos_token_id])
    (output,) = engine.generate([GenerationRequest(0, Prompt(tuple(ids(PROMPT))), sampling, 0)])
    return output.token_ids


def test_greedy_answers_are_the_engines_streamed_or_not(served: Served, model: Path) -> None:
    expected = own(model, SamplingParams(24, greedy=True))
    ask: dict[str, Any] = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 24,
        "temperature": 0,
        "extra_body": {"return_token_ids": True},
    }
    whole = served.openai.completions.create(**ask, n=2, logprobs=2)
    assert [choice.model_extra["token_ids"] for choice in whole.choices] == [expected] * 2
    for choice in whole.choices:
        best = [max(place, key=place.get) for place in choice.logprobs.top_logprobs]
        assert best == choice.logprobs.tokens
        assert all(len(place) == 2 for place in choice.logprobs.top_logprobs)
        assert choice.logprobs.token_logprobs == pytest.approx(
            [max(place.values()) for place in choice.logprobs.top_logprobs]
        )
    create = served.openai.completions.create
    pieces = [choice for chunk in create(**ask, stream=True) for choice in chunk.choices]
    assert [token for choice in pieces for token in choice.model_extra["token_ids"]] == expected
    assert "".join(choice.text for choice in pieces) == whole.choices[0].text
    chunks = create(**ask, stream=True, logprobs=2)
    tops = [place for chunk in chunks for choice in chunk.choices for place in choice.logprobs.top_logprobs]
    assert tops == [pytest.approx(place, abs=1e-5) for place in whole.choices[0].logprobs.top_logprobs]


def test_a_seed_repeats_and_sampling_fields_act(served: Served) -> None:
    def ask(**fields: Any) -> list[int]:
        body = {"prompt": PROMPT, "max_tokens": 12, "return_token_ids": True, "ignore_eos": True, **fields}
        (choice,) = served.http.post("/v1/completions", json=body).json()["choices"]
        return list(choice["token_ids"])

    assert ask(seed=5) == ask(seed=5) != ask(seed=6) and ask() != ask()
    assert ask(logit_bias={str(ids("z")[0]): 100}) == ids("z") * 12
    assert ask(seed=5, top_k=1) == ask(temperature=0)
    said = ask(seed=5)
    assert ask(seed=5, stop_token_ids=[said[3]], min_tokens=0) == said[: said.index(said[3]) + 1]
    assert len(ask(seed=5, stop_token_ids=[said[3]], min_tokens=12)) == 12


def test_a_stop_text_ends_generation(served: Served) -> None:
    bias = {str(ids(letter)[0]): 100.0 for letter in "z"}
    answer = served.openai.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=200, logit_bias=bias, stop="zzz"
    )
    assert answer.choices[0].text == "" and answer.usage is not None and answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].model_extra["stop_reason"] == "zzz"


async def storm(url: str, count: int, seed: int) -> Counter[str]:
    """Count what became of `count` requests at once; a third goes away at some time."""
    draw = random.Random(seed)
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(
        base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, limits=limits, timeout=600
    ) as client:

        async def one(stream: bool, stop: dict[str, Any], leave: float | None) -> str:
            body = {"prompt": PROMPT, "max_tokens": 40, "stream": stream, **stop}
            try:
                async with asyncio.timeout(leave):
                    answer = await client.post("/v1/completions", json=body)
                    return f"{answer.status_code}"
            except TimeoutError:
                return "left"

        conditions: tuple[dict[str, Any], ...] = (
            {},
            {"stop": ["1", "="]},
            {"ignore_eos": True},
            {"stop_token_ids": ids("a")},
            {"n": 3},
            {"max_tokens": 1},
        )
        asked = [
            one(
                draw.random() < 0.5,
                draw.choice(conditions),
                draw.uniform(0, 0.5) if draw.random() < 0.33 else None,
            )
            for _ in range(count)
        ]
        return Counter(await asyncio.gather(*asked))


def test_many_clients_some_of_whom_leave(served: Served) -> None:
    counts = asyncio.run(storm(served.url, 150, seed=0))
    assert set(counts) == {"200", "left"} and sum(counts.values()) == 150 and counts["200"] > 90
    served.wait_idle()
    (replica,) = served.service.client.replicas
    assert isinstance(replica, EngineReplica) and replica.load == replica.waiting == 0
    assert served.openai.completions.create(model="tiny", prompt=PROMPT, max_tokens=3).choices


@pytest.fixture
def command(model: Path) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "hybridflow.cli.main", "serve", str(model), "--port=0", "--device=cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env=environment)
    yield process
    process.kill()
    process.communicate()


def test_the_command_serves_until_it_is_told_to_end(command: subprocess.Popen[str]) -> None:
    assert command.stdout is not None
    url = re.fullmatch(r"serving tiny at (http://127\.0\.0\.1:\d+/v1)\n", command.stdout.readline())
    token = re.fullmatch(r"token of this run \(api_key of clients\): (\S{32,})\n", command.stdout.readline())
    assert url and token
    client = openai.OpenAI(base_url=url[1], api_key=token[1], max_retries=0)
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "3 + 4 = ?"}], max_tokens=4
    )
    assert answer.choices[0].message.content is not None
    command.send_signal(signal.SIGTERM)
    _, errors = command.communicate(timeout=600)
    assert command.returncode == 0, errors


def test_quantized_weights_are_served(model: Path) -> None:
    ask = SamplingParams(24, greedy=True)
    policy = build_policy(model, device="cpu")
    quantized = QuantizedCopy(policy, "int8")
    engine = NativeEngine(policy, eos_token_ids=[TOKENIZER.eos_token_id], quantized=quantized)
    (expected,) = engine.generate([GenerationRequest(0, Prompt(tuple(ids(PROMPT))), ask, 0)])
    settings = ServeSettings(str(model), "tiny", quantization="int8", max_num_seqs=4, max_model_len=256)
    service = build_service(settings)
    with serve_client(service.client, service.model) as server:
        extra = {"return_token_ids": True}
        said = server.openai.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, logprobs=0, extra_body=extra
        )
    assert said.choices[0].model_extra["token_ids"] == expected.token_ids
    assert said.choices[0].logprobs.token_logprobs == pytest.approx(expected.log_probs, abs=1e-4)
    assert quantized.nbytes > 0
    with pytest.raises(ConfigError, match="--quantization=int3: the native engine rounds to int8"):
        build_service(ServeSettings(str(model), "tiny", quantization="int3"))


def test_settings_that_do_not_fit_the_model(model: Path) -> None:
    with pytest.raises(ConfigError, match="--max-model-len 9999: the model has 4096 positions"):
        build_service(ServeSettings(str(model), "tiny", max_model_len=9999))
    with pytest.raises(
        ConfigError,
        match="--tool-call-parser owl: there is none of that name, only code_interpreter, deepseek",
    ):
        build_service(ServeSettings(str(model), "tiny", tool_parser="owl"))
    with pytest.raises(ConfigError, match="--chat-template"):
        build_service(ServeSettings(str(model), "tiny", chat_template=model / "none.jinja"))
