"""The prompt of a request: token ids, with the media that stand under its placeholders."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """What the policy reads before it writes."""

    token_ids: tuple[int, ...]
    media: tuple[Hashable, ...] = ()
    """Digests of pictures, video and audio, in the order of their placeholders."""

    @property
    def key(self) -> Hashable:
        """The one identity by which prompts are shared, grouped and dealt: token ids and digests."""
        return self.token_ids, self.media
