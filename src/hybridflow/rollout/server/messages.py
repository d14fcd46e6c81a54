"""Anthropic's /v1/messages: content in blocks, in and out.

MessagesBody ──chat──► ChatBody ──► Job ──► pieces ──MessagesAnswer──► a message, or its events
"""

from __future__ import annotations

import json
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
    MAX_MESSAGES,
    MAX_NUMBER,
    ChatBody,
    FailFast,
    Parts,
    StopTexts,
    StrictBody,
    ToolName,
)
from hybridflow.tools.parsers import ToolCall

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Values of `tool_choice.type`, as chat calls them."""
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Turn(StrictBody):
    """One turn."""

    role: Literal["user", "assistant"]
    content: str | Parts


class ClientTool(StrictBody):
    """A tool that the model may use."""

    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: dict[str, Any] | None = None
    """Accepted, without effect."""


class ToolChoice(StrictBody):
    """The tool that is to be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class MessagesBody(StrictBody):
    """POST /v1/messages."""

    model: str
    messages: Annotated[list[Turn], FailFast()] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int = Field(ge=1, le=MAX_NUMBER)
    system: str | Parts | None = None
    tools: Annotated[list[ClientTool], FailFast()] | None = Field(None, max_length=MAX_ENTRIES)
    tool_choice: ToolChoice | None = None
    stop_sequences: StopTexts | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    thinking: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    """Requests of one `user_id` go to one replica."""
    service_tier: str | None = None
    """Accepted, without effect."""

    def chat(self) -> ChatBody:
        """Return the same as a chat request; ApiError where it cannot be served."""
        if (self.thinking or {}).get("type", "disabled") != "disabled":
            raise refuse("thinking", "is not supported: what a model thinks is a part of its text")
        messages = []
        if self.system:
            messages.append({"role": "system", "content": joined_text(self.system, "system")})
        for place, turn in enumerate(self.messages):
            messages += _chat_messages(turn, f"messages[{place}].content")
        tools = []
        for tool in self.tools or ():
            function = {"name": tool.name, "parameters": tool.input_schema}
            if tool.description is not None:
                function["description"] = tool.description
            tools.append({"type": "function", "function": function})
        parallel = None
        choice: Any = None
        if self.tool_choice is not None:
            parallel = False if self.tool_choice.disable_parallel_tool_use else None
            named = {"type": "function", "function": {"name": self.tool_choice.name}}
            choice = CHOICES.get(self.tool_choice.type, named)
        return ChatBody.model_validate(
            {
                "messages": messages,
                "tools": tools or None,
                "tool_choice": choice,
                "parallel_tool_calls": parallel,
                "stop": self.stop_sequences,
                "stream": bool(self.stream),
                "user": (self.metadata or {}).get("user_id"),
                **self.model_dump(include={"max_tokens", "temperature", "top_p", "top_k"}),
            }
        )


def _chat_messages(turn: Turn, param: str) -> list[dict[str, Any]]:
    """Return a turn as messages of a chat: each result of a tool is one of its own."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    texts = []
    calls = []
    results = []
    for place, block in enumerate(turn.content):
        kind = block.get("type")
        if kind == "tool_use" and turn.role == "assistant":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"))}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and turn.role == "user":
            results.append(_result(block, f"{param}[{place}].content"))
        else:
            texts.append(joined_text([block], f"{param}[{place}]"))
    messages = results
    if calls:
        messages.append({"role": "assistant", "content": "".join(texts), "tool_calls": calls})
    elif texts or not results:
        messages.append({"role": turn.role, "content": "".join(texts)})
    return messages


def _result(block: Mapping[str, Any], param: str) -> dict[str, Any]:
    content = joined_text(block.get("content"), param)
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}


class MessagesAnswer(BlocksAnswer):
    """Answer of /v1/messages."""

    def __init__(self, job: Job, model: ServedModel) -> None:
        super().__init__(job)
        self._head = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "model": model.name}
        self._num_blocks = 0

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        """Return the message."""
        (piece,) = pieces
        self.num_tokens = len(piece.token_ids)
        blocks: list[dict[str, Any]] = []
        if piece.text.strip():
            blocks.append({"type": "text", "text": piece.text.strip() if piece.calls else piece.text})
        for call in piece.calls:
            blocks.append({**_use(call), "input": json.loads(call.arguments)})
        return {**self._head, "content": blocks, **_stop(piece), "usage": self._usage()}

    def begin(self) -> list[dict[str, Any]]:
        """Return the event that begins a stream."""
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        return [{"type": "message_start", "message": {**self._head, **nothing, "usage": self._usage()}}]

    def begin_text(self) -> list[dict[str, Any]]:
        """Return the event that opens a block of text."""
        return [self._block_event("start", content_block={"type": "text", "text": ""})]

    def text(self, delta: str) -> dict[str, Any]:
        """Return the event that adds to it."""
        return self._block_event("delta", delta={"type": "text_delta", "text": delta})

    def end_text(self, text: str) -> list[dict[str, Any]]:
        """Return the event that closes it."""
        return [self._end_block()]

    def call(self, call: ToolCall) -> list[dict[str, Any]]:
        """Return the events of a call."""
        return [
            self._block_event("start", content_block={**_use(call), "input": {}}),
            self._block_event("delta", delta={"type": "input_json_delta", "partial_json": call.arguments}),
            self._end_block(),
        ]

    def end(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the events that end a stream."""
        return [
            {"type": "message_delta", "delta": _stop(piece), "usage": self._usage()},
            {"type": "message_stop"},
        ]

    def failure(self, error: ApiError) -> dict[str, Any]:
        """Return the event that tells of an error."""
        return error.anthropic_body

    def _usage(self) -> dict[str, int]:
        return {"input_tokens": self.num_prompt_tokens, "output_tokens": self.num_tokens}

    def _block_event(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": f"content_block_{kind}", "index": self._num_blocks, **more}

    def _end_block(self) -> dict[str, Any]:
        event = self._block_event("stop")
        self._num_blocks += 1
        return event


def _use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id or call_id(), "name": call.name}


def _stop(piece: Piece) -> dict[str, Any]:
    sequence = piece.stop_reason if isinstance(piece.stop_reason, str) else None
    reason = STOP_REASONS.get(piece.finish_reason or "stop")
    if sequence is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": sequence}
