"""Tokens whose keys and values are at hand, so that a prompt that begins with them does not compute them again.

    finished rows, prompts of which requests wait ──keep──► PrefixStore ──find──► the longest common beginning ──► a new row's slot
    rows that run now ─────────────────────────────────────────▲

All of it is valid for one state of the weights, and dropped with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hybridflow.models.kv_cache import SlotCopy

LEAST = 16
"""Fewer common tokens are computed again: a copy would hardly be cheaper."""
MOST_COMPARED = 64
"""Of the prefixes that begin with the same LEAST tokens, so many of the newest are compared with a prompt."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """The first `length` tokens of a prompt are in a running row's slot, or kept."""

    length: int
    slot: int | None = None
    kept: Kept | None = None

    @property
    def state(self) -> Tensor | None:
        """The last hidden state [1, H], where the whole prompt is kept with it: nothing is left to compute."""
        return None if self.kept is None or self.length < len(self.kept.tokens) else self.kept.state


@dataclass(eq=False)
class Kept:
    """Keys and values of tokens outside of the slots."""

    tokens: tuple[int, ...]
    copy: SlotCopy
    state: Tensor | None
    pinned: bool
    """Requests of this very prompt wait."""


class PrefixStore:
    """Kept prefixes, the least recently used first; counts tokens, for the bound that they share with the slots."""

    def __init__(self, *, reuse: bool) -> None:
        """`reuse`: prompts may share a part; else only requests of one prompt share it, whole."""
        self.reuse = reuse
        self.num_tokens = 0
        self._kept: dict[tuple[int, ...], Kept] = {}

    def holds(self, prompt: tuple[int, ...]) -> bool:
        """Whether nothing of this prompt is left to compute."""
        return prompt in self._kept and self._kept[prompt].state is not None

    def keep(self, tokens: tuple[int, ...], copy: SlotCopy, state: Tensor | None = None, *, pinned: bool = False) -> None:
        """Keep these tokens; a kept prefix that is the beginning of them is no longer needed."""
        for other in [other for other in self._kept if other == tokens[: len(other)] and not self._kept[other].pinned]:
            self._drop(other)
        if tokens in self._kept:
            if state is None:  # what is there says as much
                return
            self._drop(tokens)
        self._kept[tokens] = Kept(tokens, copy, state, pinned)
        self.num_tokens += len(tokens)

    def release(self, tokens: tuple[int, ...]) -> None:
        """No request of this prompt waits any longer; it stays only where prompts may share a part."""
        kept = self._kept.get(tokens)
        if kept is not None:
            kept.pinned = False
            if not self.reuse:
                self._drop(tokens)

    def find(self, prompt: tuple[int, ...], running: Mapping[tuple[int, ...], int]) -> Prefix | None:
        """The longest beginning of `prompt` that is at hand: kept, or the prompt of a `running` row, by its slot.

        Of a prompt without its hidden state the last token is left to compute.
        """
        whole = self._kept.get(prompt)
        if whole is not None and whole.state is not None:
            self._kept[prompt] = self._kept.pop(prompt)
            return Prefix(len(prompt), kept=whole)
        if not self.reuse or len(prompt) <= LEAST:
            return None
        begin = prompt[:LEAST]
        best: Prefix | None = None
        for tokens in [tokens for tokens in running if tokens[:LEAST] == begin][-MOST_COMPARED:]:
            length = min(common_length(prompt, tokens), len(prompt) - 1)
            if best is None or length > best.length:
                best = Prefix(length, slot=running[tokens])
        for kept in [kept for kept in self._kept.values() if kept.tokens[:LEAST] == begin][-MOST_COMPARED:]:
            length = min(common_length(prompt, kept.tokens), len(prompt) - 1)
            if best is None or length > best.length:
                best = Prefix(length, kept=kept)
        if best is None or best.length < LEAST:
            return None
        if best.kept is not None:
            self._kept[best.kept.tokens] = self._kept.pop(best.kept.tokens)
        return best

    def shrink(self, num_tokens: int) -> None:
        """Drop until at most so many tokens are kept, the least recently used first and those that are waited for last."""
        for pinned in (False, True):
            for tokens in [tokens for tokens, kept in self._kept.items() if kept.pinned == pinned]:
                if self.num_tokens <= num_tokens:
                    return
                self._drop(tokens)

    def clear(self) -> None:
        """Drop all."""
        self._kept.clear()
        self.num_tokens = 0

    def _drop(self, tokens: tuple[int, ...]) -> None:
        del self._kept[tokens]
        self.num_tokens -= len(tokens)


def common_length(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """How many tokens two sequences begin with in common; by halving, since slices compare fast."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
