"""The model that a server serves, as requests are checked against it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from hybridflow.data.tokenizer import Tokenizer
from hybridflow.rollout.server.text import TokenNames
from hybridflow.tools.parsers.response import OtherFormats


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

    @cached_property
    def names(self) -> TokenNames:
        """Names of the tokenizer's tokens."""
        return TokenNames(self.tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the tokenizer's longest token; c characters are at least c / longest_token tokens."""
        return max((len(token) for token in self.tokenizer.get_vocab()), default=1)
