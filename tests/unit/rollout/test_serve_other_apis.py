"""OpenAI's responses and Anthropic's messages: unmodified clients, whole and streamed, with tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

import httpx
import openai
import pytest
from serving import TOKEN, TOKENIZER, TOOL_TEMPLATE, Served, ids, serve_script

from hybridflow.rollout.base import GenerationRequest

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {}}}
TOOLS: list[Any] = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}]
IMAGE = [{"role": "user", "content": [{"type": "image"}]}]
CLIENT_TOOLS: list[Any] = [{"name": "add", "input_schema": SCHEMA}]


def says(request: GenerationRequest) -> list[int]:
    """Two calls where there is a tool and no result, else what the prompt was."""
    prompt = TOKENIZER.decode(request.prompt_token_ids)
    if "Tadd" in prompt and "t:" not in prompt:
        return ids(f"I call. {CALL}\n{CALL}")
    return ids(f"read {prompt}")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve_script(says, model={"tool_parser": "hermes", "chat_template": TOOL_TEMPLATE}) as server:
        yield server
        server.wait_idle()


def test_responses_in_two_turns_with_a_tool(served: Served) -> None:
    create = served.openai.responses.create
    items: list[Any] = [{"role": "user", "content": "go"}]
    first = create(model="tiny", instructions="be brief", input=items, tools=TOOLS)
    assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
    assert first.output_text == "I call." and json.loads(first.output[1].arguments) == {"a": 1}
    assert first.status == "completed"
    assert first.usage.output_tokens == len(ids(f"I call. {CALL}\n{CALL}")) + 1
    items += [item.model_dump() for item in first.output]  # with all nulls
    for call in first.output[1:]:
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "6"})
    second = create(model="tiny", instructions="be brief", input=items, tools=TOOLS)
    calls = "<tool_call>1</tool_call>".replace("1", "add 1") * 2
    assert second.output_text == f"read Tadd s:be brief;u:go;a:I call.{calls};t:6;t:6;a:"


def test_responses_stream_their_events_in_order(served: Served) -> None:
    with served.openai.responses.stream(model="tiny", input="go", tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    order = [
        kind for place, kind in enumerate(kinds) if kind != "output_text.delta" or kinds[place - 1] != kind
    ]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    items = [["output_item.added", *inside, "output_item.done"] for inside in (text, call, call)]
    assert order == ["created", "in_progress", *chain(*items), "completed"]
    assert final.output_text == "I call. " and len(final.output) == 3 and final.usage.output_tokens > 0


def test_a_response_that_was_cut_is_incomplete(served: Served) -> None:
    answer = served.openai.responses.create(model="tiny", input="go", max_output_tokens=3)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    events = [e.type for e in served.openai.responses.create(input="go", max_output_tokens=3, stream=True)]
    assert events[-1] == "response.incomplete"


@pytest.mark.parametrize(
    "field, value",
    [
        ("previous_response_id", "resp_1"),
        ("background", True),
        ("truncation", "auto"),
        ("input", [{"type": "reasoning", "summary": []}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        ("input", []),
        ("conversation", "conv_1"),
        ("text", {"format": {"type": "json_schema", "name": "x", "schema": {}}}),
    ],
)
def test_what_responses_cannot_do_is_refused(served: Served, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        served.openai.responses.create(model="tiny", input="go", extra_body={field: value})
    wanted = {"input": ("input", "messages"), "text": ("response_format",)}.get(field, (field,))
    assert caught.value.body["message"].startswith(wanted)  # type: ignore[index]


def test_the_models_own_names_of_calls_are_those_that_clients_see() -> None:
    call = '<|tool_call_begin|>functions.add:3<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
    said = f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"
    model = {"tool_parser": "kimi", "chat_template": TOOL_TEMPLATE}
    with serve_script(lambda request: ids(said), model=model) as server:
        response = server.openai.responses.create(model="tiny", input="go", tools=TOOLS)
        message = ask(server, tools=CLIENT_TOOLS).json()
        server.wait_idle()
    assert [response.output[-1].call_id, message["content"][-1]["id"]] == ["functions.add:3"] * 2


def ask(served: Served, key: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    headers = {"x-api-key": TOKEN} if key is None else key
    body = {"model": "tiny", "max_tokens": 300, "messages": [{"role": "user", "content": "go"}], **body}
    return httpx.post(f"{served.url}/v1/messages", json=body, headers=headers, timeout=600)


def test_messages_in_two_turns_with_a_tool(served: Served) -> None:
    first = ask(served, system=[{"type": "text", "text": "be brief"}], tools=CLIENT_TOOLS).json()
    assert [block["type"] for block in first["content"]] == ["text", "tool_use", "tool_use"]
    assert first["stop_reason"] == "tool_use" and first["content"][1]["input"] == {"a": 1}
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "6"}]}
        for block in first["content"][1:]
    ]
    history = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [*results, {"type": "text", "text": "so?"}]},
    ]
    second = ask(served, system="be brief", tools=CLIENT_TOOLS, messages=history).json()
    calls = "<tool_call>add 1</tool_call>" * 2
    assert second["content"] == [
        {"type": "text", "text": f"read Tadd s:be brief;u:go;a:I call.{calls};t:6;t:6;u:so?;a:"}
    ]
    assert second["stop_reason"] == "end_turn" and second["usage"]["input_tokens"] > 0


def test_messages_stream_their_events_in_order(served: Served) -> None:
    answer = ask(served, tools=CLIENT_TOOLS, stream=True)
    lines = [line for line in answer.text.splitlines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [line.removeprefix("event: ") for line in lines[::2]] == [event["type"] for event in events]
    order = [event["type"].removeprefix("content_block_") for event in events]
    once = [kind for place, kind in enumerate(order) if kind != "delta" or order[place - 1] != kind]
    assert once == ["message_start", *["start", "delta", "stop"] * 3, "message_delta", "message_stop"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_messages_end_by_a_stop_sequence_or_a_limit(served: Served) -> None:
    stopped = ask(served, stop_sequences=["u:"]).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "u:")
    assert ask(served, max_tokens=2).json()["stop_reason"] == "max_tokens"
    forced = ask(served, tools=CLIENT_TOOLS, tool_choice={"type": "tool", "name": "sub"})
    assert forced.status_code == 400 and "there is no tool 'sub'" in forced.json()["error"]["message"]


@pytest.mark.parametrize(
    "key, body, status, kind",
    [
        ({"x-api-key": "wrong"}, {}, 401, "authentication_error"),
        ({"Authorization": f"Bearer {TOKEN}"}, {"max_tokens": None}, 400, "invalid_request_error"),
        (None, {"model": "other"}, 404, "not_found_error"),
        (None, {"thinking": {"type": "enabled", "budget_tokens": 9}}, 400, "invalid_request_error"),
        (None, {"messages": IMAGE}, 400, "invalid_request_error"),
        (None, {"max_tokens": 10**6}, 400, "invalid_request_error"),
    ],
)
def test_errors_of_messages_have_anthropics_shape(
    served: Served, key: dict[str, str] | None, body: Any, status: int, kind: str
) -> None:
    answer = ask(served, key, **body)
    assert answer.status_code == status, answer.text
    assert answer.json()["type"] == "error" and answer.json()["error"]["type"] == kind


def test_the_client_of_anthropic(served: Served) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=served.url, api_key=TOKEN, max_retries=0, timeout=600)
    go = [{"role": "user", "content": "go"}]
    with client.messages.stream(model="tiny", max_tokens=300, messages=go, tools=CLIENT_TOOLS) as stream:
        said = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert said == "I call. "
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    assert message.content[2].input == {"a": 1} and message.stop_reason == "tool_use"
    with pytest.raises(anthropic.BadRequestError, match="context"):
        client.messages.create(model="tiny", max_tokens=10**6, messages=go)
