"""Answers of the two endpoints in OpenAI's shape, whole and as chunks of a stream. The fields token_ids,
stop_reason and prompt_token_ids are our own.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from typing import Any, ClassVar
from uuid import uuid4

from hybridflow.rollout.server.job import Job
from hybridflow.rollout.server.model import ServedModel
from hybridflow.rollout.server.reading import Piece
from hybridflow.rollout.server.text import NumberedNames, TokenNames
from hybridflow.tools.parsers import ToolCall

LEAST = -9999.0
"""Log-prob that is written for a probability of 0, as OpenAI does: JSON has no infinity."""


class Answer(ABC):
    """Writer of the answer to one job, whole or as chunks of a stream."""

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, job: Job, model: ServedModel, names: TokenNames) -> None:
        self.job = job
        self.names = names
        if job.names_are_ids:
            self.names = NumberedNames(model.tokenizer)
        self.num_tokens = 0
        """Response tokens that were written so far."""
        self._begun: set[int] = set()
        self._written: Counter[int] = Counter()
        """For each response, the calls (chat) or characters (completions) that were written so far."""
        self._head = {"id": f"{self.prefix}-{uuid4().hex}", "created": int(time.time()), "model": model.name}

    @abstractmethod
    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        """Return the answer to a request without stream."""

    @abstractmethod
    def chunk(self, piece: Piece) -> dict[str, Any]:
        """Return one event of a stream."""

    def usage(self) -> dict[str, int]:
        """Return the counts of tokens; a prompt counts once, whatever the number of its responses."""
        prompt = sum(len(prompt) for prompt in self.job.prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.num_tokens,
            "total_tokens": prompt + self.num_tokens,
        }

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream whose client asked for usage."""
        return {**self._head, "object": self.chunk_kind, "choices": [], "usage": self.usage()}

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


class ChatAnswer(Answer):
    """Answer of /v1/chat/completions."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        choices = []
        for piece in pieces:
            message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
            if piece.calls:
                message |= {
                    "content": piece.text.strip() or None,
                    "tool_calls": [_written(call) for call in piece.calls],
                }
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


class CompletionAnswer(Answer):
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


def _written(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id or f"call_{uuid4().hex[:24]}",
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
