"""Llama 3.1 and later: the whole response is `{"name": …, "parameters": {…}}`, maybe behind `<|python_tag|>`;
several calls by `;`.
"""

from __future__ import annotations

import json

from hybridflow.tools.parsers.base import NO_JSON, ToolCall, call_of

TAG = "<|python_tag|>"


class Llama3JsonParser:
    """A response that begins like a call is held back until it ends; any other is plain text from its first
    character.
    """

    def __init__(self) -> None:
        self._held = ""
        self._plain = False

    def opening(self, name: str | None) -> str:
        """As far as the parameters, where a tool is named."""
        return '{"name": ' + (f'{json.dumps(name)}, "parameters": ' if name else '"')

    def feed(self, text: str) -> list[str | ToolCall]:
        """Text at once where the response is none of calls, else nothing before `end`."""
        self._held += text
        begun = self._held.lstrip()
        self._plain = self._plain or (
            bool(begun) and not (begun.startswith(("{", TAG)) or TAG.startswith(begun))
        )
        if not self._plain:
            return []
        held, self._held = self._held, ""
        return [held] if held else []

    def end(self) -> list[str | ToolCall]:
        """All calls, or the text as it stands where one of them is not whole."""
        held, self._held = self._held, ""
        if not held:
            return []
        rest, calls, decoder = held.strip().removeprefix(TAG).strip(), [], json.JSONDecoder()
        while rest:
            try:
                value, size = decoder.raw_decode(rest)
            except NO_JSON:
                return [held]
            call = call_of(value, "parameters")
            if call is None:
                return [held]
            calls.append(call)
            rest = rest[size:].lstrip("; \n")
        return [*calls] or [held]
