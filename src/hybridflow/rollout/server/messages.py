"""Anthropic's /v1/messages: content in blocks, in and out.

MessagesBody ──chat──► ChatBody ──► Job ──► pieces ──MessagesAnswer──► a message, or its events
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field

from hybridflow.rollout.server.answers import BlocksAnswer, call_id
from hybridflow.rollout.server.errors import ApiError, refuse
from hybridflow.rollout.server.job import Job
from hybridflow.rollout.server.model import ServedModel
from hybridflow.rollout.server.prompts import chat_content, joined_text
from hybridflow.rollout.server.reading import Piece
from hybridflow.rollout.server.schema import (
    MAX_ENTRIES,
    MAX_MESSAGES,
    MAX_NUMBER,
    ChatBody,
    FailFast,
    Parts,
    RequestBody,
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


class MessagesBody(RequestBody):
    """POST /v1/messages; requests of one `user_id` in the metadata go to one replica."""

    model: str
    messages: Annotated[list[Turn], FailFast()] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int = Field(ge=1, le=MAX_NUMBER)
    system: str | Parts | None = None
    tools: Annotated[list[ClientTool], FailFast()] | None = Field(None, max_length=MAX_ENTRIES)
    tool_choice: ToolChoice | None = None
    stop_sequences: StopTexts | None = None
    top_k: int | None = None
    thinking: dict[str, Any] | None = None

    def chat(self) -> ChatBody:
        """Return the same as a chat request; ApiError where it cannot be served."""
        if (self.thinking or {}).get("type", "disabled") != "disabled":
            raise refuse("thinking", "is not supported: what a model thinks is a part of its text")
        messages = []
        if self.system:
            messages.append({"role": "system", "content": joined_text(self.system, "system")})
        for place, turn in enumerate(self.messages):
            messages += _chat_messages(turn, f"messages[{place}].content")
        tools = [
            _named(tool.name, description=tool.description, parameters=tool.input_schema)
            for tool in self.tools or ()
        ]
        chosen = self.tool_choice or ToolChoice(type="auto")
        return ChatBody.model_validate(
            {
                "messages": messages,
                "tools": tools or None,
                "tool_choice": CHOICES.get(chosen.type, _named(chosen.name)),
                "parallel_tool_calls": not chosen.disable_parallel_tool_use,
                "stop": self.stop_sequences,
                "user": (self.metadata or {}).get("user_id"),
                **self.model_dump(include={"max_tokens", "temperature", "top_p", "top_k", "stream"}),
            }
        )


def _named(name: str | None, **more: Any) -> dict[str, Any]:
    """Return a function as chat writes it: one that may be called, is chosen, or was called."""
    return {"type": "function", "function": {"name": name, **more}}


def _chat_messages(turn: Turn, param: str) -> list[dict[str, Any]]:
    """Return a turn as messages of a chat: each result of a tool is a separate one."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    parts = []
    calls = []
    results = []
    for place, block in enumerate(turn.content):
        kind = block.get("type")
        if kind == "tool_use" and turn.role == "assistant":
            arguments = json.dumps(block.get("input"))
            calls.append({"id": block.get("id"), **_named(block.get("name"), arguments=arguments)})
        elif kind == "tool_result" and turn.role == "user":
            content = _content(block.get("content"), f"{param}[{place}].content")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        else:
            parts.append(block)
    messages: list[dict[str, Any]] = results
    said = {"role": turn.role, "content": _content(parts, param)}
    if calls:
        messages.append({**said, "tool_calls": calls})
    elif parts or not results:
        messages.append(said)
    return messages


def _content(content: str | list[dict[str, Any]] | None, param: str) -> str | list[dict[str, Any]]:
    """Return text and pictures as a content of chat."""
    return chat_content(content, param, "image", _url)


def _url(block: Mapping[str, Any]) -> Any:
    """Return the URL of a block with a picture; None where it has none."""
    source = block.get("source")
    if not isinstance(source, dict):
        return None
    if source.get("type") == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    return source.get("url")


class MessagesAnswer(BlocksAnswer):
    """Answer of /v1/messages."""

    def __init__(self, job: Job, model: ServedModel) -> None:
        super().__init__(job, model)
        self._head = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "model": model.name}
        self._num_blocks = 0

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        (piece,) = pieces
        self.num_tokens = len(piece.token_ids)
        blocks: list[dict[str, Any]] = []
        if piece.text.strip():
            blocks.append({"type": "text", "text": piece.whole_text})
        for call in piece.calls:
            blocks.append({**_use(call), "input": json.loads(call.arguments)})
        return {**self._head, "content": blocks, **_stop(piece), "usage": self._usage()}

    def begin(self) -> Iterator[dict[str, Any]]:
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": {**self._head, **nothing, "usage": self._usage()}}

    def start_block(self) -> Iterator[dict[str, Any]]:
        block: dict[str, Any] = {"type": "text", "text": ""}
        if self.call is not None:
            block = {**_use(self.call), "input": {}}
        yield self._block_event("start", content_block=block)

    def delta(self, text: str) -> dict[str, Any]:
        added = {"type": "text_delta", "text": text}
        if self.call is not None:
            added = {"type": "input_json_delta", "partial_json": text}
        return self._block_event("delta", delta=added)

    def stop_block(self) -> Iterator[dict[str, Any]]:
        yield self._block_event("stop")
        self._num_blocks += 1

    def end(self, piece: Piece) -> Iterator[dict[str, Any]]:
        yield {"type": "message_delta", "delta": _stop(piece), "usage": self._usage()}
        yield {"type": "message_stop"}

    def failure(self, error: ApiError) -> dict[str, Any]:
        return error.anthropic_body

    def _usage(self) -> dict[str, int]:
        return {"input_tokens": self.num_prompt_tokens, "output_tokens": self.num_tokens}

    def _block_event(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": f"content_block_{kind}", "index": self._num_blocks, **more}


def _use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id or call_id(), "name": call.name}


def _stop(piece: Piece) -> dict[str, Any]:
    sequence = piece.stop_reason if isinstance(piece.stop_reason, str) else None
    reason = STOP_REASONS.get(piece.finish_reason or "stop")
    if sequence is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": sequence}
