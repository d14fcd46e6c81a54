"""Prompts: token ids and the media that stand in for some of them, with the one identity of both.

token ids, media ──► key: one unit for each token ──► prompts with equal keys are grouped, dealt and shared
                 │                                └──► prefixes are shared as far as their units are equal
                 └─► make_position_ids: the place of each token for the rotary embedding
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from hybridflow.errors import DataError

Unit = int | tuple[int, str, int]
"""Identity of one place of a prompt: the token id or, at a placeholder, (token id, digest of its medium,
place inside of it).
"""
Units = tuple[Unit, ...]


MediumKind = Literal["image", "video"]
MEDIA = "media"
"""The object column of the media of each row, a tuple of `Medium`; rows of one prompt share those of it."""


@dataclass(frozen=True)
class Medium:
    """A picture, a part of one, or a part of a video, whose placeholder tokens are neighbours in the prompt.

    Example: a picture of 4 × 4 patches, of which each 2 × 2 become one token, has 4 placeholders. In a model
    with three positions for each token they are `[[0 0 0 0] [0 0 1 1] [0 1 0 1]]` (time, row, column), and
    the next token is 2 further on: `advance=2`.
    """

    start: int
    """Place of its first placeholder in the token ids of its prompt, or of its row."""
    length: int
    """Number of its placeholders."""
    digest: str
    """Digest of what the model reads; media with equal digests are taken for equal."""
    values: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)
    """What the model reads besides the placeholders, as its processor made it."""
    kind: MediumKind = "image"
    positions: Tensor | None = field(default=None, compare=False, repr=False)
    """[3, length] int64: positions of the placeholders, counted from that of the first, where the model gives
    each token three (M-RoPE); None: its placeholders are counted like other tokens.
    """
    advance: int | None = None
    """Positions from its first placeholder to the next token after it; None: `length`."""
    shown: bytes = field(default=b"", compare=False, repr=False)
    """A small PNG or JPEG of it, for people who read samples; empty: none, or another part has it."""

    @property
    def shift(self) -> int:
        """How much further the positions of later tokens are than their places; mostly below 0."""
        if self.advance is None:
            return 0
        return self.advance - self.length


@dataclass(frozen=True)
class Prompt:
    """Tokens and media that a response continues; two prompts are equal where their keys are.

    DataError where a medium has no placeholder or no digest, lies outside of the token ids, or overlaps
    another.
    """

    token_ids: tuple[int, ...] = field(compare=False)
    media: tuple[Medium, ...] = field(default=(), compare=False)
    """In the order of their placeholders."""
    key: Units = field(init=False, repr=False)
    """One unit for each token, so that prefixes of keys are the identities of prefixes of prompts. Without
    media it is the token ids.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", _units(self.token_ids, self.media))

    def __len__(self) -> int:
        return len(self.token_ids)


def make_position_ids(length: int, media: Sequence[Medium]) -> Tensor:
    """Return the positions of a row of `length` tokens with these media.

    They are [length] int64, or [3, length] where a medium has three for each token.
    """
    places = torch.arange(length)
    if all(medium.positions is None for medium in media):
        return places
    positions = places.repeat(3, 1)
    shift = 0
    for medium in media:
        stop = medium.start + medium.length
        if medium.positions is not None:
            positions[:, medium.start : stop] = medium.start + shift + medium.positions
        shift += medium.shift
        positions[:, stop:] = places[stop:] + shift
    return positions


def token_ids_of(units: Iterable[Unit]) -> list[int]:
    """Return the token ids of some units."""
    return [unit if isinstance(unit, int) else unit[0] for unit in units]


def _units(token_ids: tuple[int, ...], media: Sequence[Medium]) -> Units:
    if not media:
        return token_ids
    units: list[Unit] = list(token_ids)
    free_from = 0
    for number, medium in enumerate(media):
        stop = medium.start + medium.length
        if medium.length < 1 or not medium.digest:
            raise DataError(
                f"medium {number} has {medium.length} placeholders and the digest {medium.digest!r}: it "
                "needs at least one placeholder, and a digest that identifies it"
            )
        if not free_from <= medium.start < stop <= len(token_ids):
            raise DataError(
                f"medium {number} takes places {medium.start} to {stop - 1} of a prompt of {len(token_ids)} "
                f"tokens, and those before {free_from} belong to other media: give the media in the order "
                "of their placeholders, each inside of the prompt"
            )
        for offset in range(medium.length):
            place = medium.start + offset
            units[place] = (token_ids[place], medium.digest, offset)
        free_from = stop
    return tuple(units)
