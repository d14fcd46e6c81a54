"""gpt-oss: a message of the assistant to a function,
`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`.

The recipient stands in the head of a message, before or behind its channel; a message to a function is a call
on any channel. What stands in the message itself is no recipient. All other messages are plain text, marks
included; what the model thinks is a message on the channel `analysis`, without a recipient.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from hybridflow.tools.parsers.base import LONGEST_HEAD, CallParser
from hybridflow.tools.parsers.calls import made_call
from hybridflow.tools.parsers.source import SPACE, Pausing, Tags, Unreadable

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
CALL = "<|call|>"
ENDS = ("<|end|>", "<|return|>", CALL)
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")
FUNCTIONS = "functions."


class GptOssParser(CallParser):
    """Parser of messages, whose heads name their recipients."""

    starts = (f"to={FUNCTIONS}",)
    inner = (START, CHANNEL, "<|constrain|>", MESSAGE, *ENDS)
    stops = (CALL,)
    example = f"{START}assistant{CHANNEL}commentary to={FUNCTIONS}NAME <|constrain|>json{MESSAGE}{{…}}{CALL}"
    thinking: ClassVar[Mapping[str, str]] = {f"{CHANNEL}analysis{MESSAGE}": "<|end|>"}
    _next_is_head = True

    def opening(self, name: str | None) -> str:
        """Return the beginning of a call, up to the arguments where a tool is named."""
        return f" to={FUNCTIONS}" + (f"{name}{CHANNEL}commentary <|constrain|>json{MESSAGE}" if name else "")

    def _read(self) -> Pausing[None]:
        """Read messages; the first begins in its head, since the prompt ends with the assistant's role."""
        source = self._source
        marks = Tags(START, CHANNEL, CALL)
        if self.in_thinking:
            yield from self._think()
        while True:
            tag = ""
            if self._next_is_head:
                self._say((yield from source.run(SPACE)))
                tag = yield from source.at(Tags("to="))
            self._next_is_head = False
            tag = tag or (yield from source.until(marks, self._say))
            if tag == CALL:
                self._say(tag)
                self._next_is_head = True
            elif tag:
                yield from self._message(tag)
            else:
                return

    def _message(self, tag: str) -> Pausing[None]:
        """Read a message whose head begins with `tag`: whole if it is a call, else up to its text."""
        source = self._source
        source.note(tag)
        parts = [tag]
        try:
            end = yield from source.until(Tags(MESSAGE, *ENDS, START), parts.append, LONGEST_HEAD)
        except Unreadable:  # plain text, which may be of any length
            end = ""
        if end in (START, CALL):
            source.give_back(end)
        head = "".join(parts)
        recipient = RECIPIENT.search(head)
        name = recipient[1] if recipient else ""
        if recipient is None or not (name.startswith(FUNCTIONS) or name in self._parameters):
            self._say(source.noted())
            if end == MESSAGE and self._thinking and ANALYSIS.search(head):
                yield from self._think()
            return
        try:
            if not name.startswith(FUNCTIONS):
                raise Unreadable(f"its recipient is {name}, wanted {FUNCTIONS}{name}")
            if end != MESSAGE:
                raise Unreadable(f"its head is not followed by {MESSAGE}")
            yield from source.run(SPACE)
            call = made_call(name.removeprefix(FUNCTIONS), (yield from self._json_value()))
            end = yield from self._behind(*ENDS, json_is_whole=True)
        except Unreadable as error:
            self._fail(tag, error)
            return
        source.noted()
        self._say(head[: recipient.start()])
        self._hand_out([call])
        self._next_is_head = end == CALL

    def _think(self) -> Pausing[None]:
        """Hand a thought out as plain text, to the end of its message."""
        thought: list[str] = []
        end = yield from self._source.until(Tags(*ENDS, START), self._giving_to(thought))
        if end in (START, CALL):
            self._source.give_back(end)
        else:
            self._say(end)
        if end in ("", CALL):
            self._check_open_thought("".join(thought))
