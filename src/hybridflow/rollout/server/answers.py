"""The writer of answers, whole and as events of a stream, and its shapes for OpenAI's chat and completions.

pieces ──ChoicesAnswer──► choices          (chat, completions)
       ──BlocksAnswer───► texts and calls  (`responses.py`, `messages.py`)

The fields token_ids, stop_reason and prompt_token_ids are our own.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar
from uuid import uuid4

from hybridflow.rollout.server.errors import ApiError
from hybridflow.rollout.server.job import Job
from hybridflow.rollout.server.model import ServedModel
from hybridflow.rollout.server.reading import Piece
from hybridflow.tools.parsers import ToolCall

LEAST = -9999.0
"""Log-prob that is written for a probability of 0, as OpenAI does: JSON has no infinity."""


class AnswerWriter(ABC):
    """Writer of the answer to one job, whole or as events of a stream."""

    names_events: ClassVar[bool] = False
    """Whether each event of a stream has a line with its type; else the stream ends with `[DONE]`."""

    def __init__(self, job: Job, model: ServedModel) -> None:
        self.job = job
        self.model = model
        self.num_prompt_tokens = sum(len(prompt) for prompt in job.prompts)
        """Tokens of all prompts; a prompt counts once, whatever the number of its responses."""
        self.num_tokens = 0
        """Response tokens that were written so far."""

    @abstractmethod
    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        """Return the answer to a request without stream."""

    @abstractmethod
    def events(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yield the stream events of a piece; none where it has nothing that was asked for."""

    def last_events(self) -> Iterator[dict[str, Any]]:
        """Yield the events that end a stream in which nothing failed."""
        yield from ()

    def failure(self, error: ApiError) -> dict[str, Any]:
        """Return the event that reports an error after the stream has begun."""
        return error.body


class BlocksAnswer(AnswerWriter):
    """Answer with one response, whose texts and calls are blocks; each event has a type.

    A block is started, gets its text or its arguments, and is stopped.
    """

    names_events = True

    def __init__(self, job: Job, model: ServedModel) -> None:
        super().__init__(job, model)
        self._has_begun = False
        self.call: ToolCall | None = None
        """Call that is written now; None: a text."""
        self.text = ""
        """Text of the block that is open, which has some."""

    def events(self, piece: Piece) -> Iterator[dict[str, Any]]:
        if not self._has_begun:
            self._has_begun = True
            yield from self.begin()
        for part in piece.parts:
            if isinstance(part, ToolCall):
                yield from self._stop_text()
                self.call = part
                yield from self.start_block()
                yield self.delta(part.arguments)
                yield from self.stop_block()
                self.call = None
            elif self.text or part.strip():  # between calls there is white space
                if not self.text:
                    yield from self.start_block()
                self.text += part
                yield self.delta(part)
        self.num_tokens += len(piece.token_ids)
        if piece.finish_reason is not None:
            yield from self._stop_text()
            yield from self.end(piece)

    def _stop_text(self) -> Iterator[dict[str, Any]]:
        if self.text:
            yield from self.stop_block()
            self.text = ""

    @abstractmethod
    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield the events that begin a stream."""

    @abstractmethod
    def start_block(self) -> Iterator[dict[str, Any]]:
        """Yield the events that open the block of a call or of a text."""

    @abstractmethod
    def delta(self, text: str) -> dict[str, Any]:
        """Return the event that adds to the text or to the arguments of the call."""

    @abstractmethod
    def stop_block(self) -> Iterator[dict[str, Any]]:
        """Yield the events that close it."""

    @abstractmethod
    def end(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yield the events that end a stream; `piece` is the last one."""


class ChoicesAnswer(AnswerWriter):
    """Answer with a list of choices."""

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    has_one_prompt: ClassVar[bool] = False
    """Whether the ids of the prompt stand beside the choices."""

    def __init__(self, job: Job, model: ServedModel) -> None:
        super().__init__(job, model)
        self._begun: set[int] = set()
        self.written: Counter[int] = Counter()
        """For each response, the calls (chat) or characters (completions) that were written so far."""
        self._head = {"id": f"{self.prefix}-{uuid4().hex}", "created": int(time.time()), "model": model.name}
        self._has_usage = job.body.stream_options is not None and job.body.stream_options.include_usage

    @abstractmethod
    def content(self, piece: Piece, *, streams: bool, is_first: bool) -> dict[str, Any]:
        """Return the fields of a choice for a whole response, or for the next (the first) part of one."""

    @abstractmethod
    def log_probs(self, piece: Piece) -> dict[str, Any]:
        """Return the log-probs of a piece, in nats."""

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        answer = {**self._head, "object": self.kind, **self._choices(pieces, streams=False)}
        return {**answer, "usage": self._usage()}

    def events(self, piece: Piece) -> Iterator[dict[str, Any]]:
        tells_tokens = piece.token_ids and (self.job.body.return_token_ids or self.job.log_probs)
        if piece.parts or piece.finish_reason or tells_tokens:
            chunk = {**self._head, "object": self.chunk_kind, **self._choices([piece], streams=True)}
            yield {**chunk, "usage": None} if self._has_usage else chunk

    def last_events(self) -> Iterator[dict[str, Any]]:
        if self._has_usage:
            yield {**self._head, "object": self.chunk_kind, "choices": [], "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_tokens,
        }

    def _choices(self, pieces: list[Piece], *, streams: bool) -> dict[str, Any]:
        """Return the choices of an answer or a chunk, and the fields beside them."""
        choices = []
        beside: dict[str, Any] = {}
        for piece in pieces:
            is_first = piece.choice not in self._begun
            self._begun.add(piece.choice)
            self.num_tokens += len(piece.token_ids)
            choice = {
                "index": piece.choice,
                **self.content(piece, streams=streams, is_first=is_first),
                "logprobs": self.log_probs(piece) if self.job.log_probs else None,
                "finish_reason": piece.finish_reason,
            }
            if piece.finish_reason is not None:
                choice["stop_reason"] = piece.stop_reason
            if self.job.body.return_token_ids:
                choice["token_ids"] = piece.token_ids
                if is_first:
                    place = beside if self.has_one_prompt else choice
                    place["prompt_token_ids"] = self.job.prompts[piece.choice // self.job.body.n].token_ids
            choices.append(choice)
        return {"choices": choices, **beside}

    def name_of(self, token_id: int) -> str:
        """Return the name of a token in lists of log-probs: its text or, where that was asked for, its id."""
        if self.job.body.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return self.model.names.text(token_id)


class ChatAnswer(ChoicesAnswer):
    """Answer of /v1/chat/completions."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    has_one_prompt = True

    def content(self, piece: Piece, *, streams: bool, is_first: bool) -> dict[str, Any]:
        if not streams:
            return {"message": {"refusal": None, **written_message(piece)}}
        delta: dict[str, Any] = {}
        if is_first:
            delta |= {"role": "assistant", "content": ""}
        if piece.text:
            delta["content"] = piece.text
        if piece.calls:
            place = self.written[piece.choice]
            delta["tool_calls"] = [
                {"index": index, **_written(call)} for index, call in enumerate(piece.calls, place)
            ]
            self.written[piece.choice] += len(piece.calls)
        return {"delta": delta}

    def log_probs(self, piece: Piece) -> dict[str, Any]:
        top = self.job.sampling[0].top_log_probs
        content = []
        for place, (token, value) in enumerate(zip(piece.token_ids, piece.log_probs, strict=True)):
            others = [] if piece.top_log_probs is None else piece.top_log_probs[place][:top]
            rivals = [self._named(other, each) for other, each in others]
            content.append({**self._named(token, value), "top_logprobs": rivals})
        return {"content": content, "refusal": None}

    def _named(self, token: int, value: float) -> dict[str, Any]:
        known_bytes = self.model.names.bytes(token)
        return {"token": self.name_of(token), "logprob": max(value, LEAST), "bytes": known_bytes}


class CompletionAnswer(ChoicesAnswer):
    """Answer of /v1/completions."""

    prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def content(self, piece: Piece, *, streams: bool, is_first: bool) -> dict[str, Any]:
        return {"text": piece.text}

    def log_probs(self, piece: Piece) -> dict[str, Any]:
        names = [self.name_of(token) for token in piece.token_ids]
        offsets = []
        for name in names:  # a repeated prompt and log-probs exclude each other
            offsets.append(self.written[piece.choice])
            self.written[piece.choice] += len(name)
        top = self.job.sampling[0].top_log_probs
        tops = None
        if top and piece.top_log_probs is not None:
            tops = [
                {self.name_of(token): max(value, LEAST) for token, value in reversed(place[:top])}
                for place in piece.top_log_probs
            ]
        return {
            "tokens": names,
            "token_logprobs": [max(value, LEAST) for value in piece.log_probs],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def written_message(piece: Piece) -> dict[str, Any]:
    """Return a whole response as a message of the assistant."""
    message: dict[str, Any] = {"role": "assistant", "content": piece.whole_text}
    if piece.calls:
        message["content"] = piece.whole_text or None
        message["tool_calls"] = [_written(call) for call in piece.calls]
    return message


def call_id() -> str:
    """Return a new name for a tool call, by which its result refers to it."""
    return f"call_{uuid4().hex[:24]}"


def _written(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id or call_id(),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
