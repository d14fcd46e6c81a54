"""Stop texts: find the token that completes one.

newest token ──could its text hold the last character of a stop text?──► no: nothing is decoded
                 └──► the last few tokens as text, with and without the newest ──► the text it completed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids to text; a character cut in two gives U+FFFD, as all tokenizers do."""

CUT = "\ufffd"
MARGIN = 4
"""Characters at the start of a text that may be wrong: the rest of one, or a space, is in earlier tokens."""
MAX_REMEMBERED = 1024
"""Sets of stop texts for which the tokens that may complete one are remembered."""


class StopTexts:
    """Search for stop texts in responses; remembers which tokens may complete one."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._texts: dict[int, str] = {}
        self._suspects: dict[tuple[str, ...], dict[int, bool]] = {}

    def may_complete(self, token: int, stop: tuple[str, ...]) -> bool:
        """Return whether a text of `stop` may end in this token, so that the response has to be decoded."""
        if stop not in self._suspects and len(self._suspects) >= MAX_REMEMBERED:
            self._suspects.clear()
        known = self._suspects.setdefault(stop, {})
        if token not in known:
            text = self._texts.get(token)
            if text is None:
                # twice: the first token of a text may lose its leading space
                text = self._texts[token] = self._decode([token, token])
            known[token] = CUT in text or any(one[-1] in text for one in stop)
        return known[token]

    def completed(self, tokens: Sequence[int], stop: tuple[str, ...]) -> str | None:
        """Return the text of `stop` that the last of `tokens` completed, of several the first to end."""
        longest = max(len(text) for text in stop)
        width = 1 + max(len(text.encode()) for text in stop)
        while True:
            tail = list(tokens[-width:])
            before = self._decode(tail[:-1]).rstrip(CUT)
            if len(tail) == len(tokens) or len(before) >= longest + MARGIN:
                break
            width *= 2
        whole = self._decode(tail)
        found = []
        for order, text in enumerate(stop):
            place = whole.find(text, max(0, len(before) - len(text) + 1))
            if place >= 0:
                found.append((place + len(text), order, text))
        return min(found)[2] if found else None
