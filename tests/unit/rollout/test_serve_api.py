"""The OpenAI client drives the server: chat, completions, streams, log-probs, token ids, tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serving import TOKENIZER, TOOL_TEMPLATE, Served, ids, serve_script

from hybridflow.rollout.base import GenerationRequest

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
HELLO: list[Any] = [{"role": "user", "content": "say hello"}]
CALL_IT: list[Any] = [{"role": "user", "content": "call it"}]
HERMES = {"tool_parser": "hermes", "chat_template": TOOL_TEMPLATE}


def says(request: GenerationRequest) -> list[int]:
    """The reply to what the prompt asks for."""
    prompt = TOKENIZER.decode(request.prompt_token_ids)
    if "tool_call>\n" in prompt:  # the beginning of a call stands in the prompt
        return ids(
            '{"name": "add", "arguments": {"a": 2}}</tool_call>'
            if prompt.endswith("\n")
            else '{"a": 3}}</tool_call>'
        )
    if "call it" in prompt:
        return ids(f"I call. {CALL}{CALL}")
    return ids("hello world")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve_script(says, model=HERMES, seconds=0.001) as server:
        yield server
        server.wait_idle()
        assert server.sessions[0].idle


def chat(served: Served, messages: Any = HELLO, **fields: Any) -> Any:
    return served.openai.chat.completions.create(model="tiny", messages=messages, **fields)


def complete(served: Served, prompt: Any = "ab", **fields: Any) -> Any:
    return served.openai.completions.create(model="tiny", prompt=prompt, **fields)


def choices_of(stream: Any) -> list[Any]:
    return [choice for chunk in stream for choice in chunk.choices]


def test_chat(served: Served) -> None:
    answer = chat(served, n=2, seed=1)
    assert [choice.message.content for choice in answer.choices] == ["hello world"] * 2
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert [c.index for c in answer.choices] == [0, 1]
    prompt = len(ids("u:say hello;a:"))
    size = 2 * (len(ids("hello world")) + 1)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, size, prompt + size)


def test_chat_streams_what_it_answers(served: Served) -> None:
    chunks = list(chat(served, n=2, stream=True, stream_options={"include_usage": True}, logprobs=True))
    size = len(ids("hello world")) + 1
    for index in (0, 1):
        own = [choice for choice in choices_of(chunks) if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in own) == "hello world"
        assert [choice.finish_reason for choice in own if choice.finish_reason] == ["stop"]
        assert sum(len(choice.logprobs.content or []) for choice in own if choice.logprobs) == size
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 2 * size


def test_content_in_parts_and_older_turns(served: Served) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 5}'}}
    brief = [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]
    messages: list[Any] = [
        {"role": "developer", "content": brief},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "6"},
    ]
    answer = chat(served, messages, extra_body={"return_token_ids": True})
    prompt = TOKENIZER.decode(answer.model_extra["prompt_token_ids"])
    assert prompt == "s:be brief;u:x;a:<tool_call>f 5</tool_call>;t:6;a:"
    assert answer.choices[0].model_extra["token_ids"] == [*ids("hello world"), TOKENIZER.eos_token_id]


def test_log_probs_name_tokens_and_their_rivals(served: Served) -> None:
    listed = chat(served, logprobs=True, top_logprobs=1).choices[0].logprobs.content
    assert "".join(entry.token for entry in listed) == "hello world<|im_end|>"
    assert all(bytes(entry.bytes).decode() == entry.token and entry.logprob == -0.5 for entry in listed)
    assert all([rival.token for rival in entry.top_logprobs] == [entry.token] for entry in listed)


def test_rivals_come_with_their_tokens(served: Served) -> None:
    choices = choices_of(chat(served, logprobs=True, top_logprobs=2, stream=True))
    parts = [choice.logprobs.content for choice in choices if choice.logprobs and choice.logprobs.content]
    assert len(parts) > 3 and all(len(entry.top_logprobs) == 2 for part in parts for entry in part)
    (whole,) = chat(served, logprobs=True, top_logprobs=2).choices
    assert [entry for part in parts for entry in part] == whole.logprobs.content


def test_tokens_can_be_named_by_their_ids(served: Served) -> None:
    extra = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = complete(served, logprobs=2, max_tokens=4, extra_body=extra).choices[0]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in ids("hell")] and choice.text == "hell"
    assert [len(place) for place in choice.logprobs.top_logprobs] == [2] * 4
    first = chat(served, logprobs=True, extra_body=extra).choices[0].logprobs.content[0]
    assert (first.token, bytes(first.bytes)) == (f"token_id:{ids('h')[0]}", b"h")


def test_completions_of_texts_and_token_ids(served: Served) -> None:
    answer = complete(served, ["ab", "cd"], n=2, max_tokens=4, echo=True)
    assert [choice.text for choice in answer.choices] == ["abhell", "abhell", "cdhell", "cdhell"]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 16)
    extra = {"return_token_ids": True}
    choice = complete(served, ids("ab"), logprobs=2, max_tokens=4, extra_body=extra).choices[0]
    own = {"stop_reason": None, "prompt_token_ids": ids("ab"), "token_ids": ids("hell")}
    assert choice.text == "hell" and choice.model_extra == own
    assert choice.logprobs.tokens == list("hell") and choice.logprobs.text_offset == [0, 1, 2, 3]
    assert [list(place)[-1] for place in choice.logprobs.top_logprobs] == list("hell")
    several = complete(served, [ids("ab"), ids("c")], max_tokens=2)
    assert [choice.text for choice in several.choices] == ["he", "he"]


def test_completions_stream_with_token_ids(served: Served) -> None:
    choices = choices_of(complete(served, stream=True, logprobs=0, extra_body={"return_token_ids": True}))
    assert "".join(choice.text for choice in choices) == "hello world" and choices[-1].finish_reason == "stop"
    said = [token for choice in choices for token in choice.model_extra["token_ids"]]
    assert said == [*ids("hello world"), TOKENIZER.eos_token_id]
    assert [place for choice in choices for place in choice.logprobs.text_offset] == list(range(12))
    repeated = choices_of(complete(served, stream=True, echo=True))
    assert "".join(choice.text for choice in repeated) == "abhello world"


def test_stop_texts_are_cut_off_and_never_shown(served: Served) -> None:
    for stop, text in ((["o w", "zz"], "hell"), ("wor", "hello "), ("ld!", "hello world")):
        parts = choices_of(complete(served, stop=stop, stream=True))
        assert "".join(choice.text for choice in parts) == text
        assert complete(served, stop=stop).choices[0].text == text
    choice = complete(served, extra_body={"stop_token_ids": ids("w")}).choices[0]
    assert choice.text == "hello " and choice.model_extra["stop_reason"] == ids("w")[0]


def test_tool_calls(served: Served) -> None:
    choice = chat(served, CALL_IT, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I call."
    calls = [call.function for call in choice.message.tool_calls]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("add", {"a": 1})] * 2
    choices = choices_of(chat(served, CALL_IT, tools=TOOLS, stream=True))
    assert "".join(choice.delta.content or "" for choice in choices) == "I call. "
    assert choices[-1].finish_reason == "tool_calls"
    streamed = [call for choice in choices for call in choice.delta.tool_calls or []]
    told = [(call.index, call.function.name, call.function.arguments) for call in streamed]
    assert told == [(0, "add", '{"a": 1}'), (1, "add", '{"a": 1}')] and streamed[0].id != streamed[1].id
    assert CALL in chat(served, CALL_IT, tools=TOOLS, tool_choice="none").choices[0].message.content


def test_nulls_say_nothing_and_answers_come_back_as_history(served: Served) -> None:
    """What the client's own objects hold, sent as they are: most of it is null."""
    unset: dict[str, Any] = dict.fromkeys(("n", "stream", "logprobs", "top_logprobs", "stop", "audio"))
    first = chat(served, CALL_IT, tools=TOOLS, extra_body=unset)
    message = first.choices[0].message
    said = message.model_dump()
    assert said["tool_calls"] and {"annotations", "audio", "function_call", "refusal"} <= said.keys()
    result = {"role": "tool", "content": "6", "name": None, "tool_call_id": message.tool_calls[0].id}
    again = chat(served, [*CALL_IT, {**said, "annotations": []}, result, *HELLO])
    # the script calls again, since the words of the first turn are in the prompt
    assert again.choices[0].message.content.startswith("I call.")
    assert again.usage.prompt_tokens > first.usage.prompt_tokens


@pytest.mark.parametrize(
    ("choice", "number"), [("required", 2), ({"type": "function", "function": {"name": "add"}}, 3)]
)
def test_a_call_that_is_asked_for_is_begun_for_the_model(served: Served, choice: Any, number: int) -> None:
    message = chat(served, tools=TOOLS, tool_choice=choice).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": number})
    assert message.content is None


def test_one_call_where_one_is_wanted(served: Served) -> None:
    choice = chat(served, CALL_IT, tools=TOOLS, parallel_tool_calls=False).choices[0]
    assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1
    choices = choices_of(chat(served, CALL_IT, tools=TOOLS, parallel_tool_calls=False, stream=True))
    assert sum(len(choice.delta.tool_calls or []) for choice in choices) == 1
    assert choices[-1].finish_reason == "tool_calls"
    served.wait_idle()  # the rest of the response is not generated


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reply", "told", "status"),
    [
        ('{"name": "add"', "did not complete the call that it had to begin .ask again", 500),
        ('{"name": "sub"}</tool_call>', "the model called 'sub'", 500),
        ("x" * 99, "raise max_tokens", 400),
    ],
)
def test_what_has_to_be_a_call_is_one_or_an_error(reply: str, told: str, status: int, stream: bool) -> None:
    with serve_script(lambda request: ids(reply), model=HERMES) as server:
        with pytest.raises(openai.APIError, match=told) as caught:
            list(chat(server, tools=TOOLS, tool_choice="required", max_tokens=50, stream=stream))
        if isinstance(caught.value, openai.APIStatusError):  # a stream has begun with 200
            assert caught.value.status_code == status
        server.wait_idle()


def test_models_health_version_metrics(served: Served) -> None:
    assert [model.id for model in served.openai.models.list()] == ["tiny"]
    assert served.openai.models.retrieve("tiny").model_extra["max_model_len"] == 512
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        served.openai.models.retrieve("other")
    complete(served, max_tokens=2)
    assert served.http.get("/health").json() == {"status": "ok"}
    assert "version" in served.http.get("/version").json()
    lines = [line for line in served.http.get("/metrics").text.splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
    assert values['hybridflow_http_answers_total{model="tiny",path="/v1/completions",status="200"}'] >= 1
    assert values['hybridflow_generated_tokens_total{model="tiny"}'] >= 2
    assert values['hybridflow_replicas_alive{model="tiny"}'] == 1
    assert values['vllm:generation_tokens_total{model_name="tiny"}'] >= 2
    assert values['vllm:num_requests_running{model_name="tiny"}'] == 0
    counted = values['hybridflow_request_seconds_count{model="tiny"}']
    assert values['hybridflow_request_seconds_bucket{le="+Inf",model="tiny"}'] == counted >= 1
