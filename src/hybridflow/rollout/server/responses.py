"""OpenAI's /v1/responses: items in, items out; nothing is stored.

ResponsesBody ──chat──► ChatBody ──► Job ──► pieces ──ResponsesAnswer──► a response, or its events
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field

from hybridflow.rollout.server.answers import BlocksAnswer, call_id
from hybridflow.rollout.server.errors import ApiError, refuse
from hybridflow.rollout.server.job import Job
from hybridflow.rollout.server.model import ServedModel
from hybridflow.rollout.server.prompts import joined_text
from hybridflow.rollout.server.reading import Piece
from hybridflow.rollout.server.schema import (
    MAX_ENTRIES,
    MAX_NUMBER,
    ChatBody,
    FailFast,
    Function,
    Parts,
    StreamOptions,
    StrictBody,
)
from hybridflow.tools.parsers import ToolCall

TEXT_PARTS = frozenset({"input_text", "output_text", "text"})


class FunctionTool(Function):
    """A function that the model may call; `strict`, which OpenAI's clients set unasked, has no effect."""

    type: Literal["function"]


class ChosenFunction(StrictBody):
    """The function that is to be called."""

    type: Literal["function"]
    name: str


class ResponsesBody(StrictBody):
    """POST /v1/responses."""

    input: str | Parts
    model: str | None = None
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], FailFast()] | None = Field(None, max_length=MAX_ENTRIES)
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_NUMBER)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    """Accepted, without effect: the last event has the usage."""
    reasoning: dict[str, Any] | None = None
    """Its `effort` goes to the chat template."""
    text: dict[str, Any] | None = None
    truncation: Literal["disabled", "auto"] | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    """Accepted, without effect: nothing is stored."""
    include: list[str] | None = None
    """Accepted, without effect: there is nothing that could be included."""
    prompt_cache_key: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None

    def chat(self) -> ChatBody:
        """Return the same as a chat request; ApiError where it cannot be served."""
        if self.previous_response_id is not None:
            raise refuse(
                "previous_response_id", "responses are not stored: send the whole conversation in input"
            )
        if self.background:
            raise refuse("background", "is not supported: the answer comes with the request")
        if self.truncation == "auto":
            raise refuse("truncation", "'auto' is not supported: a conversation that is too long is refused")
        tools = [
            {"type": "function", "function": tool.model_dump(exclude={"type", "strict"}, exclude_none=True)}
            for tool in self.tools or ()
        ]
        choice: Any = self.tool_choice
        if isinstance(choice, ChosenFunction):
            choice = {"type": "function", "function": {"name": choice.name}}
        return ChatBody.model_validate(
            {
                "messages": self._messages(),
                "tools": tools or None,
                "tool_choice": choice,
                "response_format": (self.text or {}).get("format"),
                "reasoning_effort": (self.reasoning or {}).get("effort"),
                "max_completion_tokens": self.max_output_tokens,
                "stream": bool(self.stream),
                **self.model_dump(
                    include={"parallel_tool_calls", "temperature", "top_p", "prompt_cache_key", "user"}
                ),
            }
        )

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for place, item in enumerate(self.input):
            new = _message(item, f"input[{place}]")
            both = [message["role"] for message in (*messages[-1:], new)]
            if both == ["assistant", "assistant"]:  # the items of one response
                messages[-1]["content"] += new["content"]
                messages[-1]["tool_calls"] += new["tool_calls"]
            else:
                messages.append(new)
        return messages


def _message(item: Mapping[str, Any], param: str) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "message":
        content = joined_text(item.get("content"), f"{param}.content", kinds=TEXT_PARTS)
        message = {"role": item.get("role"), "content": content}
        if message["role"] == "assistant":
            message["tool_calls"] = []
        return message
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        calls = [{"id": item.get("call_id"), "type": "function", "function": function}]
        return {"role": "assistant", "content": "", "tool_calls": calls}
    if kind == "function_call_output":
        output = joined_text(item.get("output"), f"{param}.output", kinds=TEXT_PARTS)
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    raise refuse(
        f"{param}.type",
        f"{kind!r} is not supported, only 'message', 'function_call' and 'function_call_output' are",
    )


class ResponsesAnswer(BlocksAnswer):
    """Answer of /v1/responses."""

    def __init__(self, job: Job, model: ServedModel, body: ResponsesBody) -> None:
        super().__init__(job)
        self._name = model.name
        self._body = body
        self._id = f"resp_{uuid4().hex}"
        self._created = time.time()
        self._items: list[dict[str, Any]] = []
        self._item_id = ""
        self._num_events = 0

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        """Return the response."""
        (piece,) = pieces
        self.num_tokens = len(piece.token_ids)
        if piece.text.strip():
            self._items.append(_message_item(_item_id(), piece.text.strip() if piece.calls else piece.text))
        self._items += [_call_item(call) for call in piece.calls]
        return self._response(_status(piece))

    def begin(self) -> list[dict[str, Any]]:
        """Return the events that begin a stream."""
        response = self._response("in_progress")
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def begin_text(self) -> list[dict[str, Any]]:
        """Return the events that open a message and its text."""
        self._item_id = _item_id()
        item = {**_message_item(self._item_id, ""), "status": "in_progress", "content": []}
        return [
            self._item_event("response.output_item.added", item=item),
            self._part_event("response.content_part.added", part=_text_part("")),
        ]

    def text(self, delta: str) -> dict[str, Any]:
        """Return the event that adds to the text."""
        return self._part_event("response.output_text.delta", delta=delta, logprobs=[])

    def end_text(self, text: str) -> list[dict[str, Any]]:
        """Return the events that close the text and its message."""
        item = _message_item(self._item_id, text)
        events = [
            self._part_event("response.output_text.done", text=text, logprobs=[]),
            self._part_event("response.content_part.done", part=_text_part(text)),
            self._item_event("response.output_item.done", item=item),
        ]
        self._items.append(item)
        return events

    def call(self, call: ToolCall) -> list[dict[str, Any]]:
        """Return the events of a call."""
        item = _call_item(call)
        begun = {**item, "status": "in_progress", "arguments": ""}
        arguments = "response.function_call_arguments"
        events = [
            self._item_event("response.output_item.added", item=begun),
            self._item_event(f"{arguments}.delta", item_id=item["id"], delta=call.arguments),
            self._item_event(
                f"{arguments}.done", item_id=item["id"], name=call.name, arguments=call.arguments
            ),
            self._item_event("response.output_item.done", item=item),
        ]
        self._items.append(item)
        return events

    def end(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the event that ends a stream."""
        status = _status(piece)
        return [self._event(f"response.{status}", response=self._response(status))]

    def failure(self, error: ApiError) -> dict[str, Any]:
        """Return the event that tells of an error."""
        told = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response={**self._response("failed"), "error": told})

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._num_events, **more}
        self._num_events += 1
        return event

    def _item_event(self, kind: str, **more: Any) -> dict[str, Any]:
        return self._event(kind, output_index=len(self._items), **more)

    def _part_event(self, kind: str, **more: Any) -> dict[str, Any]:
        return self._item_event(kind, item_id=self._item_id, content_index=0, **more)

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        usage = None
        if status != "in_progress":
            usage = {
                "input_tokens": self.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": self.num_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.num_prompt_tokens + self.num_tokens,
            }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._name,
            "output": list(self._items),
            "usage": usage,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "tool_choice": body.model_dump()["tool_choice"] or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": self.job.sampling[0].temperature,
            "top_p": self.job.sampling[0].top_p,
            "max_output_tokens": body.max_output_tokens,
            "previous_response_id": None,
            "store": False,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "metadata": body.metadata or {},
        }


def _status(piece: Piece) -> str:
    return "incomplete" if piece.finish_reason == "length" else "completed"


def _item_id() -> str:
    return f"msg_{uuid4().hex}"


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message_item(item_id: str, text: str) -> dict[str, Any]:
    content = [_text_part(text)]
    return {"id": item_id, "type": "message", "role": "assistant", "status": "completed", "content": content}


def _call_item(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"fc_{uuid4().hex}",
        "type": "function_call",
        "status": "completed",
        "call_id": call.id or call_id(),
        "name": call.name,
        "arguments": call.arguments,
    }
