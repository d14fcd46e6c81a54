"""Unmodified clients at the recorded endpoint: the ids are those of the engine, and a history that comes back
is one row with what follows.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from endpoint_scene import END, SAMPLING, TOKENIZER, endpoint, ids, nothing_is_left, policy_of, text
from spoken_engine import FakeSession, client_of

from hybridflow.agent.endpoint import Endpoint, Recording
from hybridflow.agent.episode import LengthReached, TrajectoryFailed
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.protocol.trajectory import Lineage, rows_of
from hybridflow.rollout.base import GenerationRequest
from hybridflow.rollout.server.run import LoopServer

CALL = '<tool_call>{"arguments" :{"b":[1, 2],"a":3},  "name":"add"}</tool_call>'
"""Written as no template writes it."""
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "strict": True}}]
USER: dict[str, Any] = {"role": "user", "content": "add them"}


def says(request: GenerationRequest) -> list[int]:
    """A call where there is no result yet, then the answer."""
    prompt = text(request.prompt_token_ids)
    return ids("It is 6" if "tool\n" in prompt else f"I add. {CALL}" if "Tadd" in prompt else " hello ")


class Scene:
    """A trajectory at the endpoint, and what was recorded of it."""

    def __init__(
        self,
        play: Callable[[Recording], Awaitable[None]],
        script: Callable[[GenerationRequest], Sequence[int]] = says,
        **session: Any,
    ) -> None:
        self.requests: list[GenerationRequest] = []
        self.session = FakeSession(self._noted(script), end=END, **session)
        asyncio.run(self._run(play))
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{self.recording.url}/v1/models")

    def _noted(self, script: Callable[[GenerationRequest], Sequence[int]]) -> Any:
        def say(request: GenerationRequest) -> Sequence[int]:
            if request not in self.requests:
                self.requests.append(request)
            return script(request)

        return say

    async def _run(self, play: Callable[[Recording], Awaitable[None]]) -> None:
        with client_of(self.session) as client:
            self.policy = policy_of(client)
            async with endpoint().record(self.policy) as self.recording:
                await play(self.recording)
            assert client.load == 0, "a request is left behind"
            await nothing_is_left(self.recording._endpoint)

    @property
    def rows(self) -> tuple[Lineage, ...]:
        """The rows; that they hold what the engine sampled is checked on the way."""
        for call, request in zip(self.policy.calls, self.requests, strict=True):
            assert call.prompt == request.prompt
            assert call.output.token_ids == [*self.session.script(request), END]
        return rows_of(self.policy.calls)


def openai_of(recording: Recording) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{recording.url}/v1", api_key="none", max_retries=0, timeout=600)


def test_a_conversation_with_a_tool_is_one_row_however_the_client_writes_its_history() -> None:
    async def play(recording: Recording) -> None:
        async with openai_of(recording) as client:
            ask = client.chat.completions.create
            first = await ask(model="gpt-4o", messages=[USER], tools=TOOLS)
            message = first.choices[0].message
            assert message.content == "I add." and first.choices[0].finish_reason == "tool_calls"
            called = message.tool_calls[0]
            again = {"name": "add", "arguments": json.dumps(json.loads(called.function.arguments), indent=1)}
            history = [
                USER,
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": "I add. "}],
                    "tool_calls": [{"id": called.id, "type": "function", "function": again}],
                },
                {"role": "tool", "tool_call_id": called.id, "content": "6"},
            ]
            second = await ask(model="gpt-4o", messages=history, tools=TOOLS)
            assert second.choices[0].message.content == "It is 6"

    scene = Scene(play)
    (row,) = scene.rows
    assert text(row.prompt.token_ids) == "Tadd <|im_start|>user\nadd them<|im_end|>\n<|im_start|>assistant\n"
    assert [text(segment.token_ids) for segment in row.segments] == [
        f"I add. {CALL}<|im_end|>",
        "\n<|im_start|>tool\n6<|im_end|>\n<|im_start|>assistant\n",
        "It is 6<|im_end|>",
    ]
    assert [message["role"] for message in scene.recording.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]


def test_a_conversation_by_responses_is_one_row() -> None:
    async def play(recording: Recording) -> None:
        tools: list[Any] = [{"type": "function", "name": "add", "parameters": {}, "strict": True}]
        items: list[Any] = [USER]
        async with openai_of(recording) as client:
            first = await client.responses.create(model="m", input=items, tools=tools)
            items += [item.to_dict() for item in first.output]
            result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "6"}
            second = await client.responses.create(model="m", input=[*items, result], tools=tools)
        assert second.output_text == "It is 6" and second.temperature == SAMPLING.temperature

    (row,) = Scene(play).rows
    assert [segment.sampled for segment in row.segments] == [True, False, True]


def test_a_conversation_by_messages_is_one_row() -> None:
    async def play(recording: Recording) -> None:
        go = {"model": "m", "max_tokens": 90, "tools": [{"name": "add", "input_schema": {}}]}
        history: list[Any] = [USER]
        async with httpx.AsyncClient(timeout=600) as client:
            for _ in range(2):
                answer = await client.post(f"{recording.url}/v1/messages", json={**go, "messages": history})
                content = answer.json()["content"]
                used = [block["id"] for block in content if block["type"] == "tool_use"]
                results = [{"type": "tool_result", "tool_use_id": name, "content": "6"} for name in used]
                history += [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
        assert content == [{"type": "text", "text": "It is 6"}]

    (row,) = Scene(play).rows
    assert [segment.sampled for segment in row.segments] == [True, False, True]


@pytest.mark.parametrize("edited, num_rows", [("hello", 1), ("hallo", 2)])
def test_a_history_that_was_changed_is_a_row_of_its_own(edited: str, num_rows: int) -> None:
    async def play(recording: Recording) -> None:
        async with openai_of(recording) as client:
            first = {"role": "user", "content": "hi"}
            await client.chat.completions.create(model="m", messages=[first])
            history: list[Any] = [
                first,
                {"role": "assistant", "content": edited},
                {"role": "user", "content": "and now?"},
            ]
            await client.chat.completions.create(model="m", messages=history)

    rows = Scene(play).rows
    assert len(rows) == num_rows
    wanted = f"<|im_start|>assistant\n{' hello ' if num_rows == 1 else edited}<|im_end|>\n"
    assert wanted in text([*rows[-1].prompt.token_ids, *rows[-1].response_ids])


def test_a_stream_is_recorded_and_goes_on() -> None:
    async def play(recording: Recording) -> None:
        async with openai_of(recording) as client:
            history: list[Any] = [{"role": "user", "content": "hi"}]
            for _ in range(3):
                stream = await client.chat.completions.create(model="m", messages=history, stream=True)
                said = ""
                async for chunk in stream:
                    said += chunk.choices[0].delta.content or ""
                assert said == " hello "
                history += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]

    (row,) = Scene(play).rows
    assert sum(segment.sampled for segment in row.segments) == 3


def test_requests_side_by_side_go_on_each_for_itself() -> None:
    async def play(recording: Recording) -> None:
        async with openai_of(recording) as client:

            async def talk(name: str) -> None:
                history: list[Any] = [{"role": "user", "content": name}]
                for _ in range(2):
                    answer = await client.chat.completions.create(model="m", messages=history)
                    history += [answer.choices[0].message, {"role": "user", "content": "more"}]

            await asyncio.gather(*(talk(name) for name in "abcd"))

    scene = Scene(play, max_rows=2)
    rows = rows_of(scene.policy.calls)
    assert len(scene.policy.calls) == 8 and len(rows) == 4
    assert {sum(segment.sampled for segment in row.segments) for row in rows} == {2}


def test_log_probs_and_ids_and_several_responses() -> None:
    async def play(recording: Recording) -> None:
        async with openai_of(recording) as client:
            answer = await client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "hi"}],
                n=2,
                logprobs=True,
                extra_body={"return_token_ids": True},
            )
            for choice in answer.choices:
                assert choice.model_extra["token_ids"] == [*ids(" hello "), END]
                assert [entry.logprob for entry in choice.logprobs.content] == [-0.5] * 8
            plain = await client.completions.create(model="m", prompt=[5, 6, 7], max_tokens=3)
            assert plain.usage.completion_tokens == 3

    scene = Scene(play, lambda request: ids(" hello "))
    assert [len(call.output.token_ids) for call in scene.policy.calls] == [8, 8, 3]
    assert scene.policy.calls[2].prompt.token_ids == (5, 6, 7)


def test_the_sampling_of_the_run_is_in_force_but_for_limits_and_stops(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def play(recording: Recording) -> None:
        async with openai_of(recording) as client:
            for limit in (4, 500):
                await client.chat.completions.create(
                    model="m",
                    messages=[{"role": "user", "content": "hi"}],
                    temperature=0.1,
                    seed=3,
                    stop=["x"],
                    max_tokens=limit,
                )

    with caplog.at_level(logging.WARNING, "hybridflow.agent"):
        scene = Scene(play)
    assert [request.sampling for request in scene.requests] == [
        replace(SAMPLING, max_tokens=4, stop=("x",)),
        replace(SAMPLING, stop=("x",)),
    ]
    (warning,) = [record.message for record in caplog.records]
    assert "temperature, seed" in warning


def test_a_request_in_flight_ends_with_its_trajectory() -> None:
    answers: list[asyncio.Task[httpx.Response]] = []

    async def play(recording: Recording) -> None:
        client = httpx.AsyncClient(timeout=600)
        body = {"messages": [{"role": "user", "content": "hi"}]}
        for stream in (False, True):
            request = client.post(f"{recording.url}/v1/chat/completions", json={**body, "stream": stream})
            answers.append(asyncio.create_task(request))
        while len(recording._running) < 2:
            await asyncio.sleep(0.01)
        await recording.end()
        for answer in await asyncio.gather(*answers):
            assert answer.status_code == 410 and answer.json()["error"]["code"] == "trajectory_ended"
        late = await client.post(f"{recording.url}/v1/chat/completions", json=body)
        assert late.status_code == 410
        await client.aclose()

    scene = Scene(play, lambda request: range(5, 100), seconds=0.05)
    assert scene.policy.calls == []


def test_a_url_belongs_to_one_trajectory() -> None:
    async def play(recording: Recording) -> None:
        async with httpx.AsyncClient(timeout=600) as client:
            assert (await client.get(f"{recording.url}/v1/models")).status_code == 200
            wrong = recording.url[:-1] + ("0" if recording.url[-1] != "0" else "1")
            assert (await client.get(f"{wrong}/v1/models")).status_code == 404
            assert (await client.get(f"{recording._endpoint._server.address}/v1/models")).status_code == 404
            async with recording._endpoint.record(recording._policy) as other:
                assert (await client.get(f"{other.url}/v1/models")).status_code == 200
            assert (await client.get(f"{other.url}/v1/models")).status_code == 410

    Scene(play)


def test_trajectories_one_after_the_other_and_of_the_next_step_find_a_fixed_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = Endpoint(endpoint().model, ChatTemplate(TOKENIZER), port=port)

    async def step() -> None:
        with client_of(FakeSession(says, end=END)) as client:
            async with httpx.AsyncClient(timeout=600) as http:
                for _ in range(2):
                    async with server.record(policy_of(client)) as recording:
                        assert (await http.get(f"{recording.url}/v1/models")).status_code == 200

    asyncio.run(step())
    asyncio.run(step())


@pytest.mark.parametrize(
    "host, told", [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", socket.gethostname()), ("::1", "[::1]")]
)
def test_agents_are_told_an_address_that_they_can_use(host: str, told: str) -> None:
    async def address() -> str:
        return LoopServer(endpoint(), host, 0).address

    assert asyncio.run(address()).rpartition(":")[0] == f"http://{told}"


def test_a_conversation_without_room_is_told_as_that() -> None:
    async def play(recording: Recording) -> None:
        async with openai_of(recording) as client:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
            for length in (420, 4_000_000):
                with pytest.raises(openai.BadRequestError, match="tokens") as caught:
                    long = {"role": "user", "content": "a" * length}
                    await client.chat.completions.create(model="m", messages=[long])
                assert caught.value.code == "context_length_exceeded"
            assert isinstance(recording.failure, LengthReached)
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "short"}])
        assert recording.failure is None, "the agent has gone on with a shorter one"

    assert len(Scene(play).rows) == 2


def test_a_limit_of_the_run_truncates_and_one_of_the_client_does_not() -> None:
    async def play(recording: Recording) -> None:
        async with openai_of(recording) as client:
            for limit, kind in ((4, "finished"), (None, "truncated"), (500, "truncated")):
                answer = await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=limit
                )
                assert answer.choices[0].finish_reason == "length" and recording.outcome.kind == kind

    Scene(play, lambda request: range(5, 110))


def test_a_response_that_the_context_cuts_is_truncated_whatever_the_clients_limit() -> None:
    async def play(recording: Recording) -> None:
        async with openai_of(recording) as client:
            ask = client.chat.completions.create
            history: list[Any] = [{"role": "user", "content": "a" * 100}]
            for content in ("a" * 200, None):
                answer = await ask(model="m", messages=history, max_tokens=60)
                said = {"role": "assistant", "content": answer.choices[0].message.content}
                history += [said, {"role": "user", "content": content}]
            assert answer.choices[0].finish_reason == "length" and recording.outcome.kind == "truncated"

    scene = Scene(play, lambda request: range(5, 110))
    last = scene.policy.calls[-1]
    assert len(last.output.token_ids) < 60 and len(last.prompt) + len(last.output.token_ids) == 400


def test_a_trajectory_that_failed_takes_no_further_requests() -> None:
    async def play(recording: Recording) -> None:
        async with openai_of(recording) as client:
            ask = client.chat.completions.create
            for error, status in ((openai.InternalServerError, 503), (openai.APIStatusError, 410)):
                with pytest.raises(error) as caught:
                    await ask(model="m", messages=[{"role": "user", "content": "hi"}])
                assert caught.value.status_code == status
        assert isinstance(recording.failure, TrajectoryFailed)
        assert recording.failure.cause == "infrastructure"

    Scene(play, dies_at=1)
