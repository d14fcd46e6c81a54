"""Answers to chat and completions in OpenAI's shape, whole and as chunks of a stream. The fields token_ids,
stop_reason and prompt_token_ids are our own. `responses.py` and `messages.py` have those of the other paths.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from typing import Any, ClassVar
from uuid import uuid4

from hybridflow.rollout.server.errors import ApiError
from hybridflow.rollout.server.job import Job
from hybridflow.rollout.server.model import ServedModel
from hybridflow.rollout.server.reading import Piece
from hybridflow.rollout.server.text import NumberedNames, TokenNames
from hybridflow.tools.parsers import ToolCall

LEAST = -9999.0
"""Log-prob that is written for a probability of 0, as OpenAI does: JSON has no infinity."""


class Answer(ABC):
    """Writer of the answer to one job, whole or as events of a stream."""

    names_events: ClassVar[bool] = False
    """Whether each event of a stream has a line with its type; else the stream ends with `[DONE]`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.num_tokens = 0
        """Response tokens that were written so far."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts; a prompt counts once, whatever the number of its responses."""
        return sum(len(prompt) for prompt in self.job.prompts)

    @abstractmethod
    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        """Return the answer to a request without stream."""

    @abstractmethod
    def events(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the events of a stream that tell a piece."""

    def last_events(self) -> list[dict[str, Any]]:
        """Return the events that end a stream in which nothing failed."""
        return []

    def failure(self, error: ApiError) -> dict[str, Any]:
        """Return the event that tells of an error after the stream has begun."""
        return error.body


class BlocksAnswer(Answer):
    """Answer with one response, whose texts and calls are blocks; each event has a type."""

    names_events = True

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._begun = False
        self._text = ""
        """Text of the block that is open."""

    def events(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the events that open, fill and close the piece's blocks."""
        events: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            events += self.begin()
        for part in piece.parts:
            if isinstance(part, ToolCall):
                events += self._end_text()
                events += self.call(part)
            elif self._text or part.strip():  # between calls there is white space
                if not self._text:
                    events += self.begin_text()
                self._text += part
                events.append(self.text(part))
        self.num_tokens += len(piece.token_ids)
        if piece.finish_reason is not None:
            events += self._end_text()
            events += self.end(piece)
        return events

    def _end_text(self) -> list[dict[str, Any]]:
        if not self._text:
            return []
        text = self._text
        self._text = ""
        return self.end_text(text)

    @abstractmethod
    def begin(self) -> list[dict[str, Any]]:
        """Return the events that begin a stream."""

    @abstractmethod
    def begin_text(self) -> list[dict[str, Any]]:
        """Return the events that open a block of text."""

    @abstractmethod
    def text(self, delta: str) -> dict[str, Any]:
        """Return the event that adds to it."""

    @abstractmethod
    def end_text(self, text: str) -> list[dict[str, Any]]:
        """Return the events that close it."""

    @abstractmethod
    def call(self, call: ToolCall) -> list[dict[str, Any]]:
        """Return the events of a call."""

    @abstractmethod
    def end(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the events that end a stream; `piece` is the last one."""


class ChoicesAnswer(Answer):
    """Answer with a list of choices."""

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, job: Job, model: ServedModel) -> None:
        super().__init__(job)
        self.names = model.names
        if job.names_are_ids:
            self.names = NumberedNames(model.tokenizer)
        self._begun: set[int] = set()
        self._written: Counter[int] = Counter()
        """For each response, the calls (chat) or characters (completions) that were written so far."""
        self._head = {"id": f"{self.prefix}-{uuid4().hex}", "created": int(time.time()), "model": model.name}

    @abstractmethod
    def chunk(self, piece: Piece) -> dict[str, Any]:
        """Return the chunk that tells a piece."""

    def events(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the piece's chunk; none where it has nothing that the client asked for."""
        tells_tokens = piece.token_ids and (self.job.return_token_ids or self.job.log_probs)
        if piece.parts or piece.finish_reason or tells_tokens:
            return [self.chunk(piece)]
        return []

    def usage(self) -> dict[str, int]:
        """Return the counts of tokens."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_tokens,
        }

    def last_events(self) -> list[dict[str, Any]]:
        """Return a chunk with the counts of tokens where the client asked for it."""
        if not self.job.include_usage:
            return []
        return [{**self._head, "object": self.chunk_kind, "choices": [], "usage": self.usage()}]

    def _chunk(self, choice: dict[str, Any], piece: Piece) -> dict[str, Any]:
        self._finish(choice, piece)
        if piece.finish_reason is None:
            del choice["stop_reason"]
        chunk = {**self._head, "object": self.chunk_kind, "choices": [choice]}
        if self.job.include_usage:
            chunk["usage"] = None
        return chunk

    def _whole(self, choices: list[dict[str, Any]], pieces: list[Piece]) -> dict[str, Any]:
        for choice, piece in zip(choices, pieces, strict=True):
            self._finish(choice, piece)
        return {**self._head, "object": self.kind, "choices": choices, "usage": self.usage()}

    def _finish(self, choice: dict[str, Any], piece: Piece) -> None:
        self.num_tokens += len(piece.token_ids)
        choice |= {
            "index": piece.choice,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self.job.return_token_ids:
            choice["token_ids"] = piece.token_ids

    def _begins(self, piece: Piece) -> bool:
        """Return True for the first chunk of a response."""
        first = piece.choice not in self._begun
        self._begun.add(piece.choice)
        return first


class ChatAnswer(ChoicesAnswer):
    """Answer of /v1/chat/completions."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        choices = []
        for piece in pieces:
            message = {"refusal": None, **written_message(piece)}
            choices.append({"message": message, "logprobs": self._log_probs(piece)})
        answer = self._whole(choices, pieces)
        if self.job.return_token_ids:
            answer["prompt_token_ids"] = self.job.prompts[0]
        return answer

    def chunk(self, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        first = self._begins(piece)
        if first:
            delta |= {"role": "assistant", "content": ""}
        if piece.text:
            delta["content"] = piece.text
        if piece.calls:
            delta["tool_calls"] = [
                {"index": place, **_written(call)}
                for place, call in enumerate(piece.calls, self._written[piece.choice])
            ]
            self._written[piece.choice] += len(piece.calls)
        chunk = self._chunk({"delta": delta, "logprobs": self._log_probs(piece)}, piece)
        if first and self.job.return_token_ids:
            chunk["prompt_token_ids"] = self.job.prompts[0]
        return chunk

    def _log_probs(self, piece: Piece) -> dict[str, Any] | None:
        if not self.job.log_probs:
            return None
        return chat_log_probs(piece, self.names, self.job.sampling[0].top_log_probs)


class CompletionAnswer(ChoicesAnswer):
    """Answer of /v1/completions."""

    prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        return self._whole([self._choice(piece) for piece in pieces], pieces)

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return self._chunk(self._choice(piece), piece)

    def _choice(self, piece: Piece) -> dict[str, Any]:
        prompt = piece.choice // self.job.n
        written = None
        if self.job.log_probs:  # they and a repeated prompt exclude each other
            offset = self._written[piece.choice]
            written = completion_log_probs(piece, self.names, self.job.sampling[prompt].top_log_probs, offset)
            self._written[piece.choice] += sum(len(text) for text in written["tokens"])
        choice: dict[str, Any] = {"text": piece.text, "logprobs": written}
        if self._begins(piece) and self.job.return_token_ids:
            choice["prompt_token_ids"] = self.job.prompts[prompt]
        return choice


def written_message(piece: Piece) -> dict[str, Any]:
    """Return a whole response as a message of the assistant."""
    message: dict[str, Any] = {"role": "assistant", "content": piece.text}
    if piece.calls:
        message["content"] = piece.text.strip() or None
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


def chat_log_probs(piece: Piece, names: TokenNames, top: int) -> dict[str, Any]:
    """Return {"content": one entry for each token of the piece}, its log-prob in nats."""
    content = []
    for place, (token, value) in enumerate(zip(piece.token_ids, piece.log_probs, strict=True)):
        others = [] if piece.top_log_probs is None else piece.top_log_probs[place][:top]
        content.append(
            {
                **_named(names, token, value),
                "top_logprobs": [_named(names, other, each) for other, each in others],
            }
        )
    return {"content": content, "refusal": None}


def completion_log_probs(piece: Piece, names: TokenNames, top: int, offset: int) -> dict[str, Any]:
    """Return parallel lists; `offset` is the place in the text at which the first token begins."""
    texts = [names.text(token) for token in piece.token_ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    tops = None
    if top and piece.top_log_probs is not None:
        tops = [
            {names.text(token): max(value, LEAST) for token, value in reversed(place[:top])}
            for place in piece.top_log_probs
        ]
    return {
        "tokens": texts,
        "token_logprobs": [max(value, LEAST) for value in piece.log_probs],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _named(names: TokenNames, token: int, value: float) -> dict[str, Any]:
    return {"token": names.text(token), "logprob": max(value, LEAST), "bytes": names.bytes(token)}
