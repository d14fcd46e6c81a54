"""Llama 3.1 and later: the whole response is `{"name": …, "parameters": {…}}`, maybe behind `<|python_tag|>`;
several calls by `;`.
"""

from __future__ import annotations

import json

from hybridflow.tools.parsers.base import NO_JSON, ToolCall, call_of

TAG = "<|python_tag|>"


class Llama3JsonParser:
    """Parser that holds a response back until it ends if it begins like a call; any other response is plain
    text from its first character.
    """

    needs_special_tokens = False

    def __init__(self) -> None:
        self.malformed = 0
        self._held = ""
        self._plain = False

    def opening(self, name: str | None) -> str:
        """Return the beginning of a call, up to the parameters where a tool is named."""
        return '{"name": ' + (f'{json.dumps(name)}, "parameters": ' if name else '"')

    def feed(self, text: str) -> list[str | ToolCall]:
        """Return text at once where the response is no call, else nothing before `end`."""
        self._held += text
        begun = self._held.lstrip()
        self._plain = self._plain or (
            bool(begun) and not (begun.startswith(("{", TAG)) or TAG.startswith(begun))
        )
        if not self._plain:
            return []
        held = self._held
        self._held = ""
        return [held] if held else []

    def end(self) -> list[str | ToolCall]:
        """Return all calls, or the text as it stands where one of them is not whole."""
        held = self._held
        self._held = ""
        if not held:
            return []
        calls = _read(held)
        if calls:
            return [*calls]
        # JSON that names nothing is an answer, and no call
        self.malformed = int(not self._plain and (held.lstrip().startswith(TAG) or '"name"' in held))
        return [held]


def _read(text: str) -> list[ToolCall] | None:
    """Return all calls, or None where one of them is not whole."""
    rest = text.strip().removeprefix(TAG).strip()
    calls = []
    decoder = json.JSONDecoder()
    while rest:
        try:
            value, size = decoder.raw_decode(rest)
        except NO_JSON:
            return None
        call = call_of(value, "parameters")
        if call is None:
            return None
        calls.append(call)
        rest = rest[size:].lstrip("; \n")
    return calls
