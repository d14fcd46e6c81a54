"""A server on a free port of this machine, in a thread, over fake sessions or any client."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
from fake_session import FakeSession

from hybridflow.models.tiny import create_tiny_tokenizer
from hybridflow.rollout.base import GenerationRequest
from hybridflow.rollout.client import EngineReplica, LLMClient
from hybridflow.rollout.server.model import ServedModel
from hybridflow.rollout.server.run import DrainingServer, listen
from hybridflow.rollout.server.service import ServerLimits, Service

TOKEN = "a-token-for-tests"
TOKENIZER = create_tiny_tokenizer()
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}T{{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments.a "
    "}}</tool_call>{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def echoes(request: GenerationRequest) -> list[int]:
    """Says its prompt again, backwards."""
    return list(reversed(request.prompt_token_ids))


@dataclass
class Served:
    """A running server and ways to ask it."""

    url: str
    service: Service
    server: DrainingServer
    thread: threading.Thread
    sessions: list[FakeSession]

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=600)

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=TOKEN, max_retries=0, timeout=600)

    def wait_idle(self, seconds: float = 600.0) -> None:
        """Until no response is in work anywhere."""
        ends = time.monotonic() + seconds
        while (
            self.service.open_choices
            or self.service.client.load
            or any(replica.load for replica in self.service.client.replicas)
        ):
            assert time.monotonic() < ends, f"{self.service.open_choices} responses are still open"
            time.sleep(0.005)


def tiny_model(**changes: Any) -> ServedModel:
    facts = {"tokenizer": TOKENIZER, "vocabulary": len(TOKENIZER), "max_model_len": 512}
    return ServedModel("tiny", **{**facts, **changes})


@contextmanager
def serve_client(
    client: LLMClient, model: ServedModel, limits: ServerLimits | None = None
) -> Iterator[Served]:
    """A server over any client; it and the replicas end with the block."""
    service = Service(client, model, limits or ServerLimits())
    bound = listen("127.0.0.1", 0)
    server = DrainingServer(service, token=TOKEN, grace_s=600)
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()
    ends = time.monotonic() + 600
    while not server.started:
        assert time.monotonic() < ends, "the server did not start"
        time.sleep(0.005)
    try:
        yield Served(f"http://127.0.0.1:{bound.getsockname()[1]}", service, server, thread, [])
    finally:
        server.should_exit = True
        thread.join(600)
        bound.close()
        for replica in client.replicas:
            replica.close()
        assert not thread.is_alive(), "the server did not end"


@contextmanager
def serve_script(
    script: Any = echoes,
    *,
    replicas: int = 1,
    limits: ServerLimits | None = None,
    model: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Served]:
    """A server over sessions that say what `script` says."""
    sessions = [FakeSession(script, end=TOKENIZER.eos_token_id, **options) for _ in range(replicas)]
    client = LLMClient([EngineReplica(own, name=f"native-{n}") for n, own in enumerate(sessions)])
    with serve_client(client, tiny_model(**(model or {})), limits) as served:
        served.sessions.extend(sessions)
        yield served
