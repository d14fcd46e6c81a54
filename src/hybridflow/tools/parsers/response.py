"""Whole responses: their text, their calls, and the message to a model about calls that are not readable."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.tools.parsers import TOOL_PARSERS
from hybridflow.tools.parsers.base import THINKING, CallParser
from hybridflow.tools.parsers.calls import ToolCall, parameters_of
from hybridflow.tools.parsers.fenced_python import FencedPythonParser
from hybridflow.tools.parsers.llama3_json import Llama3JsonParser

logger = logging.getLogger(__name__)

PROMPT_END = 16
"""Number of tokens at the end of a prompt that show whether a response begins within thinking."""
MOST_TOLD = 3
"""Calls of one response that a message gives the reasons of."""


@dataclass(frozen=True)
class ReadResponse:
    """A response with its calls set apart."""

    text: str
    """What is no call, and the calls that could not be read."""
    calls: list[ToolCall]
    problems: list[str]
    """Why each of the others could not be read."""


def read_response(
    name: str, text: str, tools: Sequence[Any] = (), *, in_thinking: bool = False, cut: bool = False
) -> ReadResponse:
    """Read a whole response in the format `name`; `tools` are those that can be called, in OpenAI's form.

    `in_thinking` says that the prompt ends within thinking, `cut` that a limit has ended the response. Where
    a thought ends in the text that did not begin there, the text began within it too.
    """
    parser = TOOL_PARSERS[name](tools, in_thinking=in_thinking)
    parts = [*parser.feed(text), *parser.end(cut)]
    if parser.closes_thinking and not in_thinking:
        return read_response(name, text, tools, in_thinking=True, cut=cut)
    plain = "".join(part for part in parts if isinstance(part, str))
    calls = [part for part in parts if isinstance(part, ToolCall)]
    return ReadResponse(plain, calls, parser.problems)


def ends_in_thinking(prompt: str) -> bool:
    """Return whether a prompt, or the end of one, leaves a response to begin within thinking."""
    return prompt.rstrip().endswith(tuple(THINKING))


def leaves_thinking(answer: str) -> bool:
    """Return whether an answer that is to be continued leaves a thought open."""
    return any(answer.rfind(opening) > answer.rfind(end) for opening, end in THINKING.items())


def other_format(
    name: str, text: str, tools: Sequence[Any] = (), *, problems: bool = False, in_thinking: bool = False
) -> str | None:
    """Return the name of another format in which a response without calls has some, or None.

    With `problems` the format `name` has found calls that it could not read; then another format has to find
    one of a tool that there is. Without, its tags are enough, as no text has them by chance. A fenced block
    of Python and an object in JSON may as well be the answer.
    """
    known = parameters_of(tools)
    likely = None
    for other, kind in TOOL_PARSERS.items():
        if other == name or issubclass(kind, FencedPythonParser) or not _may_be(kind, text):
            continue
        read = read_response(other, text, tools, in_thinking=in_thinking)
        if any(call.name in known for call in read.calls):
            return other
        if not problems and kind is not Llama3JsonParser and (read.calls or read.problems):
            likely = likely or other
    return likely


def _may_be(kind: type[CallParser], text: str) -> bool:
    signs = kind.starts
    if kind is Llama3JsonParser:
        signs = (*signs, '"name"')
    return any(sign in text for sign in signs)


def unread_message(problems: Sequence[str], example: str) -> str:
    """Return the message to a model about calls that could not be read, and how to write one."""
    told = [f"The tool call could not be read: {problem}." for problem in problems[:MOST_TOLD]]
    if len(problems) > MOST_TOLD:
        told.append(f"{len(problems) - MOST_TOLD} more could not be read.")
    return "\n".join([*told, f"Write a call as {example}"])


class OtherFormats:
    """Warnings of a model that writes calls in another format than they are read in, each once."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()

    def warn(self, written: str, read: str) -> None:
        """Log a pair of formats where it is new."""
        if (written, read) in self._seen:
            return
        self._seen.add((written, read))
        logger.warning(
            "the model writes tool calls in the format %s, and they are read in the format %s, so that they "
            "are not made: set actor_rollout_ref.rollout.multi_turn.format=%s (hybridflow serve: "
            "--tool-call-parser %s), or train the model to write the other one",
            written,
            read,
            written,
            written,
        )
