"""The prefix cache: a prompt that shares a prefix with another row computes only the tokens behind it.

    a running row's context, or a kept copy ──add──► chained hashes ◄──find── the next prompt ──► prefix hit

Every whole block of PREFIX_BLOCK units has a hash of itself and of all blocks before it, so equal hashes mean
equal beginnings; a unit is a token or a place of a medium. All of it is valid for one state of the weights,
and dropped with it. At least one token of a prompt is always computed, for its hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from hybridflow.models.cache.kv_cache import RowCopy
from hybridflow.protocol.prompt import Units

PREFIX_BLOCK = 16
"""Units of a block, and the fewest common ones that are looked for, except in equal prompts."""
MOST_COMPARED = 64
"""Of prefixes that share as many blocks with a prompt, as many of the newest are compared."""
MOST_KEPT = 1024
"""Most copies kept at once; a small model's memory holds many more, which are seldom asked for again."""


@dataclass(eq=False)
class Prefix:
    """Tokens whose keys and values are in a running row or, with a `copy`, apart from the rows."""

    units: Units
    hashes: list[int]
    copy: RowCopy | None
    rows: int
    """Number of running rows that have them."""


class PrefixCache:
    """Running rows and kept copies by their hashes; it counts the tokens of copies, which take memory.

    A look-up takes as long as the prompt, whatever the number of prefixes.
    """

    def __init__(self, *, share_parts: bool, most: int = MOST_KEPT) -> None:
        """`share_parts`: prompts may share a beginning; else only equal ones share. `most`: copies kept."""
        self.share_parts = share_parts
        self.most = most
        self.num_tokens = 0
        self._by_hash: dict[int, dict[Prefix, None]] = {}
        self._copies: dict[Prefix, None] = {}  # the least recently used first

    def add(self, units: Units, copy: RowCopy | None = None, *, rows: int = 0) -> Prefix:
        """Add what a kept copy or running rows have; the oldest copy goes where there are too many."""
        prefix = Prefix(units, self._hashes(units), copy, rows)
        for number in prefix.hashes:
            self._by_hash.setdefault(number, {})[prefix] = None
        if copy is not None:
            self._copies[prefix] = None
            self.num_tokens += len(units)
            if len(self._copies) > self.most:
                self.evict()
        return prefix

    def release(self, prefix: Prefix | None) -> bool:
        """Count one running row less that has a prefix; False where it is not valid any longer, or None."""
        if prefix is None or prefix not in self._by_hash.get(prefix.hashes[-1], ()):
            return False
        prefix.rows -= 1
        if prefix.rows == 0:
            self.remove(prefix)
        return True

    def remove(self, prefix: Prefix) -> None:
        """Remove a prefix; one that is already gone is ignored."""
        if prefix not in self._by_hash.get(prefix.hashes[-1], ()):
            return
        for number in prefix.hashes:
            listed = self._by_hash[number]
            del listed[prefix]
            if not listed:
                del self._by_hash[number]
        if prefix in self._copies:
            del self._copies[prefix]
            self.num_tokens -= len(prefix.units)
            prefix.copy = None  # its memory is free, even if the prefix is still referenced

    def find(self, prompt: Units) -> tuple[Prefix | None, int]:
        """Return the prefix that shares most with the prompt, its last token aside, and how many units.

        Hashes only nominate; the units themselves decide how many are shared.
        """
        nearest: dict[Prefix, None] = {}
        for number in self._hashes(prompt):
            if number not in self._by_hash:
                break
            nearest = self._by_hash[number]
        best = None
        shared = 0
        for prefix in islice(reversed(nearest), MOST_COMPARED):
            length = min(common_length(prompt, prefix.units), len(prompt) - 1)
            if length > shared:
                best, shared = prefix, length
        if best is not None and best in self._copies:
            self._copies[best] = self._copies.pop(best)
        return best, shared

    def evict(self) -> bool:
        """Evict the least recently used copy; False where there is none."""
        oldest = next(iter(self._copies), None)
        if oldest is None:
            return False
        self.remove(oldest)
        return True

    def clear(self) -> None:
        """Drop all prefixes, those of running rows too."""
        while self.evict():  # each gives up its copy
            pass
        self._by_hash.clear()

    def _hashes(self, units: Units) -> list[int]:
        """Return a hash of each beginning of whole blocks, and one of all units for equal prompts."""
        hashes = []
        beginning = 0
        stop = 0
        if self.share_parts:
            for stop in range(PREFIX_BLOCK, len(units) + 1, PREFIX_BLOCK):
                beginning = hash((beginning, units[stop - PREFIX_BLOCK : stop]))
                hashes.append(beginning)
        return [*hashes, hash((beginning, len(units), units[stop:]))]


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """How many units two sequences begin with in common; by halving, since slices compare fast."""
    low = 0
    high = min(len(first), len(second))
    while low < high:  # the first `low` units are equal, and those beyond `high` are not all
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
