"""OpenAI's /v1/responses: items in, items out; nothing is stored.

ResponsesBody ──chat──► ChatBody ──► Job ──► pieces ──ResponsesAnswer──► a response, or its events
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field

from hybridflow.rollout.server.answers import BlocksAnswer, call_id
from hybridflow.rollout.server.errors import ApiError, refuse
from hybridflow.rollout.server.job import Job
from hybridflow.rollout.server.model import ServedModel
from hybridflow.rollout.server.prompts import Content, chat_content, joined_text
from hybridflow.rollout.server.reading import Piece
from hybridflow.rollout.server.schema import (
    MAX_ENTRIES,
    MAX_NUMBER,
    ChatBody,
    FailFast,
    Function,
    OpenAIBody,
    Parts,
    StrictBody,
)

TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
SAME_IN_CHAT = {"parallel_tool_calls", "temperature", "top_p", "stream", "prompt_cache_key", "user"}


class FunctionTool(Function):
    """A function that the model may call; `strict`, which OpenAI's clients set unasked, has no effect."""

    type: Literal["function"]


class ChosenFunction(StrictBody):
    """The function that is to be called."""

    type: Literal["function"]
    name: str


class ResponsesBody(OpenAIBody):
    """POST /v1/responses; the options of a stream have no effect, since its last event has the usage."""

    input: str | Parts
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], FailFast()] | None = Field(None, max_length=MAX_ENTRIES)
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_NUMBER)
    reasoning: dict[str, Any] | None = None
    """Its `effort` goes to the chat template."""
    text: dict[str, Any] | None = None
    truncation: Literal["disabled", "auto"] | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None
    """Accepted, without effect: there is nothing that could be included."""

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
                **self.model_dump(include=SAME_IN_CHAT),
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
        if item.get("role") == "assistant":
            content = joined_text(item.get("content"), f"{param}.content", kinds=TEXT_PARTS)
            return {"role": "assistant", "content": content, "tool_calls": []}
        return {"role": item.get("role"), "content": _content(item.get("content"), f"{param}.content")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        calls = [{"id": item.get("call_id"), "type": "function", "function": function}]
        return {"role": "assistant", "content": "", "tool_calls": calls}
    if kind == "function_call_output":
        output = _content(item.get("output"), f"{param}.output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    raise refuse(
        f"{param}.type",
        f"{kind!r} is not supported, only 'message', 'function_call' and 'function_call_output' are",
    )


def _content(content: Content, param: str) -> str | list[dict[str, Any]]:
    """Return text and pictures as a content of chat."""
    return chat_content(content, param, "input_image", lambda part: part.get("image_url"), kinds=TEXT_PARTS)


class ResponsesAnswer(BlocksAnswer):
    """Answer of /v1/responses."""

    def __init__(self, job: Job, model: ServedModel, body: ResponsesBody) -> None:
        super().__init__(job, model)
        self._body = body
        self._id = f"resp_{uuid4().hex}"
        self._created = time.time()
        self._items: list[dict[str, Any]] = []
        self._item: dict[str, Any] = {}
        """Item of the block that is open, as it will be in the end but for a text."""
        self._num_events = 0

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        (piece,) = pieces
        *_, last = self.events(replace(piece, parts=[piece.whole_text, *piece.calls]))
        response: dict[str, Any] = last["response"]
        return response

    def begin(self) -> Iterator[dict[str, Any]]:
        response = self._response("in_progress")
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=response)

    def start_block(self) -> Iterator[dict[str, Any]]:
        added = "response.output_item.added"
        if self.call is not None:
            self._item = {
                "id": f"fc_{uuid4().hex}",
                "type": "function_call",
                "status": "completed",
                "call_id": self.call.id or call_id(),
                "name": self.call.name,
                "arguments": self.call.arguments,
            }
            yield self._item_event(added, item={**self._item, "status": "in_progress", "arguments": ""})
            return
        self._item = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant"}
        yield self._item_event(added, item={**self._item, "status": "in_progress", "content": []})
        yield self._part_event("content_part.added", part=_text_part(""))

    def delta(self, text: str) -> dict[str, Any]:
        if self.call is not None:
            return self._part_event("function_call_arguments.delta", delta=text)
        return self._part_event("output_text.delta", delta=text, logprobs=[])

    def stop_block(self) -> Iterator[dict[str, Any]]:
        if self.call is not None:
            done = {"name": self.call.name, "arguments": self.call.arguments}
            yield self._part_event("function_call_arguments.done", **done)
        else:
            part = _text_part(self.text)
            yield self._part_event("output_text.done", text=self.text, logprobs=[])
            yield self._part_event("content_part.done", part=part)
            self._item |= {"status": "completed", "content": [part]}
        yield self._item_event("response.output_item.done", item=self._item)
        self._items.append(self._item)

    def end(self, piece: Piece) -> Iterator[dict[str, Any]]:
        status = "incomplete" if piece.finish_reason == "length" else "completed"
        yield self._event(f"response.{status}", response=self._response(status))

    def failure(self, error: ApiError) -> dict[str, Any]:
        told = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response={**self._response("failed"), "error": told})

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        event = {"type": kind, "sequence_number": self._num_events, **more}
        self._num_events += 1
        return event

    def _item_event(self, kind: str, **more: Any) -> dict[str, Any]:
        return self._event(kind, output_index=len(self._items), **more)

    def _part_event(self, kind: str, **more: Any) -> dict[str, Any]:
        if self.call is None:
            more["content_index"] = 0
        return self._item_event(f"response.{kind}", item_id=self._item["id"], **more)

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
            "model": self.model.name,
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


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
