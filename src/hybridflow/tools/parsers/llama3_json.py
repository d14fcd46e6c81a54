"""Llama 3.1 and later: a response that begins with `{"name": …, "parameters": {…}}`, maybe behind
`<|python_tag|>`; several calls by `;`.

Without the tag an object may as well be the answer. It is a call where its name is that of a tool, or where
it has a name and arguments and nothing else.
"""

from __future__ import annotations

import json
from typing import Any

from hybridflow.tools.parsers.base import TaggedParser
from hybridflow.tools.parsers.calls import ARGUMENTS, KEYS, ToolCall, call_of, read_json
from hybridflow.tools.parsers.source import SPACE, Pausing, Unreadable


class Llama3JsonParser(TaggedParser):
    """Parser of JSON at the beginning of a response, or behind a tag; all other text is plain."""

    starts = ("<|python_tag|>",)
    example = '{"name": NAME, "parameters": {…}}'

    def opening(self, name: str | None) -> str:
        """Return the beginning of a call, up to the parameters where a tool is named."""
        return '{"name": ' + (f'{json.dumps(name)}, "parameters": ' if name else '"')

    def block(self, tag: str) -> Pausing[list[ToolCall]]:
        """Read the objects behind the tag."""
        calls = []
        yield from self._source.run(SPACE)
        tag = ""
        while True:
            calls.append(call_of((yield from self._json_value(tag))))
            tag = yield from self._behind(";", "{", json_is_whole=True)
            if tag == ";":
                tag = yield from self._behind("{")
            if not tag:
                return calls

    def _beginning(self) -> Pausing[None]:
        source = self._source
        while True:
            try:
                text = yield from self._bare_object()
                if not text:
                    return
                value = read_json(text)
                if not self._is_call(value):
                    self._say(source.noted())
                    return
                call = call_of(value)
                yield from self._behind(";", json_is_whole=True)
            except Unreadable as error:
                text = source.noted()
                self._say(text)
                names = (*ARGUMENTS, *self._parameters)
                if '"name"' in text and any(json.dumps(name) in text for name in names):
                    self.problems.append(str(error))
                return
            source.noted()
            self._hand_out([call])

    def _is_call(self, value: dict[str, Any]) -> bool:
        """Return whether an object is a call, and not an answer in JSON."""
        written = value.get("function", value)
        if not isinstance(written, dict) or not isinstance(written.get("name"), str):
            return False
        has_arguments = any(key in written for key in ARGUMENTS)
        return written["name"] in self._parameters or (has_arguments and written.keys() <= KEYS)
