"""The model that a server serves, as requests are checked against it; and the text of its tokens as they
come: no character is split, and no stop text is shown.

token ids ──Detokenizer──► text ──StopCutter──► text up to the first stop text
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from hybridflow.data.tokenizer import Tokenizer, render_chat, text_of, without_special
from hybridflow.tools.parsers.response import OtherFormats
from hybridflow.tools.parsers.source import overlap

if TYPE_CHECKING:  # it needs the image processors of transformers, which a model of text has no use for
    from hybridflow.data.media import MediaReader

BROKEN = "\ufffd"
"""Character that a decoder writes for incomplete bytes of a character."""
MOST_PENDING = 3
"""Broken characters at the end that may still become others: a character lacks at most three bytes."""
MOST_PENDING_OF_RUNS = 64
"""The same for byte tokens of SentencePiece: they are decoded as one run, all broken while the last one is.
"""
TEXT_MODEL = "the model reads text only: leave the picture out, or use one that reads pictures"
PROBE = "Vbn3wC"
"""A text that no chat template writes by itself."""
CONTEXT = 6
"""Tokens before the response that are decoded with it: some tokenizers drop a space at the start of a text.
"""


@dataclass(frozen=True)
class ServedModel:
    """Name, tokenizer and limits of the served model."""

    name: str
    tokenizer: Tokenizer
    vocabulary: int
    """Number of token ids; all are below it."""
    max_model_len: int
    """Most tokens of prompt and response together."""
    tool_parser: str | None = None
    """Name in `TOOL_PARSERS` of the format in which the model writes calls."""
    chat_template: str | None = None
    """Template in place of the tokenizer's."""
    other_formats: OtherFormats = field(default_factory=OtherFormats)
    """Other formats in which the model was seen to write calls."""
    any_name: bool = False
    """Whether requests may ask for it by any name, as those of agents do that were written for another."""
    reader: MediaReader | None = None
    """Reads the pictures of requests; None: they are refused."""
    pictures_refused: str = TEXT_MODEL
    """Why they are refused without a reader."""

    @cached_property
    def takes_texts(self) -> bool:
        """Whether the chat template writes a content that is a text; that of SmolVLM takes parts alone."""
        message = {"role": "user", "content": PROBE}
        options = {"chat_template": self.chat_template} if self.chat_template else {}
        try:
            return PROBE in render_chat(self.tokenizer, [message], options, add_generation_prompt=True)
        except Exception:  # a program of the model's, which a request will hear of
            return True

    @cached_property
    def names(self) -> TokenNames:
        """Names of the tokenizer's tokens."""
        return TokenNames(self.tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the tokenizer's longest token; c characters are at least c / longest_token tokens."""
        return max((len(token) for token in self.tokenizer.get_vocab()), default=1)


class Detokenizer:
    """Decoder of one response; text that may still change when more tokens come is held back."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        keep: Set[str] = frozenset(),
    ) -> None:
        """Special tokens whose texts are in `keep` are written even where special tokens are skipped."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens and not keep
        self._keep = keep if skip_special_tokens else frozenset()
        self._most_pending = MOST_PENDING
        if "ByteFallback" in _decoder_of(tokenizer):
            self._most_pending = MOST_PENDING_OF_RUNS
        self._ids = list(prompt[-CONTEXT:])
        self._begin = 0
        self._given = len(self._decode(self._ids))  # characters of the window's text that were given out

    def add(self, token_ids: Iterable[int]) -> str:
        """Add tokens and return the text that has become certain."""
        read = len(self._ids)
        if self._keep:
            token_ids = without_special(self._tokenizer, list(token_ids), self._keep)
        self._ids += token_ids
        text = self._decode(self._ids[self._begin :])
        pending = len(text) - len(text.rstrip(BROKEN))
        certain = len(text) - min(pending, self._most_pending)
        new = text[self._given : certain]
        self._given = max(self._given, certain)
        if not pending and read > self._begin and new:  # the window is reset, so that its text stays short
            before = self._decode(self._ids[read:])
            if text.endswith(before):
                self._begin = read
                self._given = len(before)
        return new

    def end(self) -> str:
        """Return the held-back text: bytes that became no character."""
        text = self._decode(self._ids[self._begin :])
        new = text[self._given :]
        self._given = len(text)
        return new

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str), "one row of ids decodes to one text"
        return text


class StopCutter:
    """Filter that passes text on up to the first stop text, and holds back what may be its beginning."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None
        """Stop text that was found, or None."""

    def add(self, text: str) -> str:
        """Add text and return what can be shown now: nothing after a stop text."""
        if self.found is not None:
            return ""
        self._held += text
        places = [(place, -len(stop), stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            place, _, self.found = min(places)
            shown = self._held[:place]
            self._held = ""
            return shown
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        certain = len(self._held) - keep
        shown = self._held[:certain]
        self._held = self._held[certain:]
        return shown

    def end(self) -> str:
        """Return the text that was held back and became no stop text."""
        held = self._held
        self._held = ""
        return held


class TokenNames:
    """Names of single tokens in lists of log-probs: their text, and their bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_level = "ByteLevel" in _decoder_of(tokenizer)
        self._added = set(getattr(tokenizer, "added_tokens_decoder", {}))

    def text(self, token_id: int) -> str:
        """Return the text of one token alone, also of a special one."""
        return text_of(self._tokenizer, [token_id])

    def bytes(self, token_id: int) -> list[int]:
        """Return the bytes of a token; with byte-level tokenizers also of one that is part of a character."""
        written = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if self._byte_level and token_id not in self._added and all(letter in BYTE_OF for letter in written):
            return [BYTE_OF[letter] for letter in written]
        if len(written) == 6 and written.startswith("<0x") and written.endswith(">"):
            return [int(written[3:5], 16)]
        return list(text_of(self._tokenizer, [token_id]).encode())


def _decoder_of(tokenizer: Tokenizer) -> str:
    """Return the parts of the decoder, as the tokenizers library prints them."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return ""
    return str(backend.decoder)


def _byte_letters() -> dict[str, int]:
    """Return the letters that byte-level BPE (Radford et al. 2019) writes bytes with: printable bytes are
    themselves, the rest follow from 256.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(rest)}


BYTE_OF = _byte_letters()
