"""Prefix cache: kept keys and values, so that a prompt that begins with the same units reuses them.

    finished rows, prompts that requests wait for ──keep──► PrefixStore ──find──► start of a new row's slot
    rows that run now ──────────────────────────────────────────────▲

All of it is valid for one state of the weights, and dropped with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from hybridflow.models.kv_cache import RowCopy
from hybridflow.protocol.prompt import Units

LEAST = 16
"""Fewest common tokens that are reused: computing fewer again costs hardly more than a copy."""
MOST_COMPARED = 64
"""Of prefixes that share as many blocks of LEAST tokens with a prompt, as many of the newest are compared."""
MOST_KEPT = 1024
"""Most prefixes kept at once; a small model's memory holds many more, which are seldom asked for again."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """Prefix hit: the first `length` tokens of a prompt, in a running row's slot or kept."""

    length: int
    slot: int | None = None
    kept: Kept | None = None
    state: Tensor | None = None
    """The last hidden state [1, H], where it is the whole prompt: nothing is left to compute."""


@dataclass(eq=False)
class Kept:
    """Keys and values of tokens outside of the slots."""

    tokens: Units
    copy: RowCopy
    state: Tensor | None
    pinned: bool
    """Requests of this very prompt wait."""


class PrefixStore:
    """Kept prefixes, the least recently used first; counts tokens, for the bound that they share with the
    slots.

    A look-up takes as long as the prompt, whatever the number of prefixes: each is listed under every whole
    block of LEAST tokens that it begins with, so the blocks of a prompt lead to those that share most of it.
    """

    def __init__(self, *, reuse: bool, most: int = MOST_KEPT) -> None:
        """`reuse`: prompts may share a part, and not only the whole. `most`: prefixes kept at once."""
        self.reuse = reuse
        self.most = most
        self.num_tokens = 0
        self._kept: dict[Units, Kept] = {}
        self._by_blocks: dict[int, dict[Kept, None]] = {}
        # of each list of blocks, how many prefixes have no further block
        self._ends: Counter[int] = Counter()

    def holds(self, prompt: Units) -> bool:
        """Return whether all of this prompt is kept, so that nothing of it is left to compute."""
        return prompt in self._kept and self._kept[prompt].state is not None

    def keep(
        self, tokens: Units, copy: RowCopy, state: Tensor | None = None, *, pinned: bool = False
    ) -> None:
        """Keep these tokens; a kept prefix that is the beginning of them is no longer needed."""
        blocks = _blocks(tokens)
        for kept in self._beginnings(tokens, blocks):
            if not kept.pinned:
                self._drop(kept)
        if tokens in self._kept:
            if state is None:  # what is there says as much
                return
            self._drop(self._kept[tokens])
        new = self._kept[tokens] = Kept(tokens, copy, state, pinned)
        self.num_tokens += len(tokens)
        for block in blocks:
            self._by_blocks.setdefault(block, {})[new] = None
        self._ends[blocks[-1] if blocks else 0] += 1
        self._shrink_to(self.num_tokens, self.most, pinned=(False,))

    def release(self, tokens: Units) -> None:
        """Unpin a prompt that no request waits for; it stays only where prompts may share a part."""
        kept = self._kept.get(tokens)
        if kept is not None:
            kept.pinned = False
            if not self.reuse:
                self._drop(kept)

    def find(self, prompt: Units, running: Mapping[Units, int]) -> Prefix | None:
        """Return the longest prefix hit of `prompt`: a kept one, or a `running` row's prompt, by its slot.

        Of a prompt without its hidden state the last token is left to compute.
        """
        whole = self._kept.get(prompt)
        if whole is not None and whole.state is not None:
            self._kept[prompt] = self._kept.pop(prompt)
            return Prefix(len(prompt), kept=whole, state=whole.state)
        if not self.reuse or len(prompt) <= LEAST:
            return None
        begin = prompt[:LEAST]
        best: Prefix | None = None
        for tokens in [tokens for tokens in running if tokens[:LEAST] == begin][-MOST_COMPARED:]:
            length = min(common_length(prompt, tokens), len(prompt) - 1)
            if best is None or length > best.length:
                best = Prefix(length, slot=running[tokens])
        for kept in self._nearest(prompt):
            length = min(common_length(prompt, kept.tokens), len(prompt) - 1)
            if best is None or length > best.length:
                best = Prefix(length, kept=kept)
        if best is None or best.length < LEAST:
            return None
        if best.kept is not None:
            self._kept[best.kept.tokens] = self._kept.pop(best.kept.tokens)
        return best

    def shrink(self, num_tokens: int) -> None:
        """Evict until `num_tokens` tokens are kept: least recently used first, waiting requests' last."""
        self._shrink_to(num_tokens, len(self._kept), pinned=(False, True))

    def drop_one(self) -> bool:
        """Evict the least recently used prefix, those of waiting requests last; False: there is none."""
        had = bool(self._kept)
        self._shrink_to(self.num_tokens, len(self._kept) - 1, pinned=(False, True))
        return had

    def clear(self) -> None:
        """Evict all prefixes."""
        self._kept.clear()
        self._by_blocks.clear()
        self._ends.clear()
        self.num_tokens = 0

    def _shrink_to(self, num_tokens: int, most: int, *, pinned: Sequence[bool]) -> None:
        for kind in pinned:
            tokens = self.num_tokens
            number = len(self._kept)
            going = []
            for kept in self._kept.values():
                if tokens <= num_tokens and number <= most:
                    break
                if kept.pinned == kind:
                    going.append(kept)
                    tokens -= len(kept.tokens)
                    number -= 1
            for kept in going:
                self._drop(kept)

    def _nearest(self, prompt: Units) -> list[Kept]:
        """Some of the newest of those that share most whole blocks with the prompt."""
        nearest: dict[Kept, None] = {}
        for block in _blocks(prompt):
            if block not in self._by_blocks:
                break
            nearest = self._by_blocks[block]
        return list(islice(reversed(nearest), MOST_COMPARED))

    def _beginnings(self, tokens: Units, blocks: Sequence[int]) -> list[Kept]:
        """Kept prefixes that `tokens` begin with, themselves aside."""
        found = []
        for number, block in enumerate((0, *blocks)):
            if self._ends[block]:
                lengths = range(number * LEAST, min(len(tokens), (number + 1) * LEAST))
                found += [self._kept[tokens[:length]] for length in lengths if tokens[:length] in self._kept]
        return found

    def _drop(self, kept: Kept) -> None:
        del self._kept[kept.tokens]
        self.num_tokens -= len(kept.tokens)
        blocks = _blocks(kept.tokens)
        self._ends[blocks[-1] if blocks else 0] -= 1
        for block in blocks:
            listed = self._by_blocks[block]
            del listed[kept]
            if not listed:
                del self._by_blocks[block], self._ends[block]


def _blocks(tokens: Units) -> list[int]:
    """Return a number for each beginning of whole blocks, the shortest first; equal ones are equal."""
    numbers = []
    number = 0
    for start in range(0, len(tokens) - LEAST + 1, LEAST):
        number = hash((number, tokens[start : start + LEAST]))
        numbers.append(number)
    return numbers


def common_length(first: Units, second: Units) -> int:
    """How many tokens two sequences begin with in common; by halving, since slices compare fast."""
    low = 0
    high = min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
