"""Speculation without a second model: drafts are what followed the newest tokens of a row when they came
before, in its own prompt and response or in another response to the same prompt.

    newest 4, 3 or 2 tokens ──came before?──► what followed ──Drafter.propose──► drafts ──one pass──► tokens
                                                              ▲ how many                               │
                                                              └── share that was right ◄──learn────────┘

A pass samples behind each drafted token with the row's own random number of that place, and a draft is right
where it is what is sampled: tokens and log-probs are those without drafts. A pass over few tokens mostly
reads the weights, so that one token more costs little; over many tokens it costs as much as a token of
another row. A token is therefore drafted as long as it is right more often than it costs. All of this follows
from tokens alone, never from a clock, so that a run that is repeated makes the same passes, and ranks that
generate together agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakValueDictionary

from hybridflow.distributed.accelerators import is_accelerator
from hybridflow.protocol.prompt import Units
from hybridflow.rollout.native.responses import Responses, Row

SIZES = (4, 3, 2)
"""Numbers of tokens that are looked up, the most telling first."""
FEWEST_RIGHT = 0.1
"""A token is not drafted that is right less often than this."""
AT_FIRST = 0.5
"""Share of drafted tokens that is thought to be right before any was verified."""
LEARNED = 0.1
"""By which part of its distance to what was found that share moves with each token."""
FORGIVEN = 0.0005
"""By how much it rises with each draft that was not tried, so that it is tried again some day."""
COST_ON_CPU = 0.05
"""Time that one token more adds to a pass, as a part of the time of a pass over one token; 64 tokens take
about four times as long as one (`benchmarks/results/speculation.md`).
"""
COST_ON_ACCELERATORS = 0.004
"""The same, for weights in half precision, by the data sheets of GPUs and not measured: one reads them in the
time in which it multiplies about 250 tokens by them.
"""

NGram = tuple[int, ...]


@dataclass(frozen=True)
class DraftSettings:
    """How much is drafted."""

    num_draft_tokens: int = 8
    """Most tokens that are drafted for a row in one pass."""
    max_tokens: int | None = None
    """Drafts are added to passes of up to so many tokens; None: to passes of any size, where they pay."""


class NGrams(dict[NGram, tuple[list[int], int]]):
    """Where n-grams of a prompt came last, and those of its responses first: tokens, and the place behind."""


@dataclass
class DraftSource:
    """The tokens of one row, and where each n-gram of its response was last."""

    tokens: list[int]
    group: NGrams
    right: float
    """Share of drafted tokens that are right, as far as is known."""
    read: int
    """Tokens before this one are in the index."""
    own: dict[NGram, int] = field(default_factory=dict)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens of the response, and index the n-grams that they complete, but for the newest one."""
        self.tokens += tokens
        for place in range(max(self.read, SIZES[-1]), len(self.tokens)):
            for size in SIZES:
                if size <= place:
                    ngram = tuple(self.tokens[place - size : place])
                    self.own[ngram] = place
                    self.group.setdefault(ngram, (self.tokens, place))
        self.read = len(self.tokens)

    def draft(self, most: int) -> list[int]:
        """Return up to `most` tokens that followed the newest ones when they came before; often none."""
        for size in SIZES:
            ngram = tuple(self.tokens[-size:])
            source, place = self.tokens, self.own.get(ngram, 0)
            if not place:
                source, place = self.group.get(ngram, (source, 0))
            if place and place < len(source):
                drafted = source[place : place + most]
                if source is self.tokens:  # what repeats goes on repeating
                    while len(drafted) < most:
                        drafted.append(drafted[place + len(drafted) - len(source)])
                return drafted
        return []


class Drafter:
    """Drafts for the rows of one session."""

    def __init__(self, settings: DraftSettings, device: str) -> None:
        """`device` is the type of the device that verifies."""
        self.most = settings.num_draft_tokens
        self.max_tokens = settings.max_tokens
        self.cost = COST_ON_ACCELERATORS if is_accelerator(device) else COST_ON_CPU
        self.right = AT_FIRST
        """Share of all drafted tokens that are right, with which new rows begin."""
        self._groups: WeakValueDictionary[Units, NGrams] = WeakValueDictionary()
        self._sources: WeakKeyDictionary[Row, DraftSource] = WeakKeyDictionary()

    def propose(
        self, rows: Sequence[Row], responses: Responses, room: Sequence[int], plain: int, least: int
    ) -> list[list[int]]:
        """Return the drafts of rows, most of them empty; row i has `room[i]` places behind its newest token.

        A pass without drafts computes `plain` tokens, and one with drafts at least `least`.
        """
        is_full = self.max_tokens is not None and len(rows) >= self.max_tokens
        if is_full or (len(rows) >= least and self.right * self._time(len(rows)) < self.cost * len(rows)):
            return []  # a token of the usual quality would not pay, so that none is looked up
        drafts = []
        chances = []
        for number, row in enumerate(rows):
            source = self._source(row, responses)
            drafts.append(source.draft(min(self.most, room[number])) if room[number] > 0 else [])
            chance = 1.0
            for place in range(len(drafts[-1])):
                chance *= source.right
                if chance < FEWEST_RIGHT:
                    if not place:
                        source.right += FORGIVEN
                    break
                chances.append((-chance, number))
        counts = self._worth(sorted(chances), len(rows), plain, least)
        return [draft[: counts[number]] for number, draft in enumerate(drafts)]

    def _worth(self, chances: Sequence[tuple[float, int]], rows: int, plain: int, least: int) -> Counter[int]:
        """Return how many tokens of each row's draft pay, of (-chance to be right, row), best first.

        None do where a pass without drafts gives more tokens for its time.
        """
        counts: Counter[int] = Counter()
        tokens = rows
        gained = float(rows)
        for chance, number in chances[: None if self.max_tokens is None else self.max_tokens - rows]:
            if tokens >= least and -chance * self._time(tokens) < self.cost * gained:
                break
            counts[number] += 1
            tokens += 1
            gained -= chance
        if gained * self._time(plain) <= rows * self._time(max(tokens, least)):
            return Counter()
        return counts

    def _time(self, tokens: int) -> float:
        """Return the time of a pass, in times of one over a single token."""
        return 1 + self.cost * (tokens - 1)

    def learn(self, row: Row, drafted: int, right: int) -> None:
        """Note how many tokens of a row's draft were `right`; those behind a wrong one say nothing."""
        source = self._sources[row]
        for place in range(min(right + 1, drafted)):
            found = float(place < right)
            source.right += LEARNED * (found - source.right)
            self.right += LEARNED * (found - self.right)

    def _source(self, row: Row, responses: Responses) -> DraftSource:
        """Return the source of a row's drafts, with all tokens that the host knows."""
        source = self._sources.get(row)
        prompt = row.request.prompt
        if source is None:
            group = self._groups.get(prompt.key)
            if group is None:
                group = self._groups[prompt.key] = NGrams()
                whole = DraftSource(list(prompt.token_ids), group, self.right, 0)
                whole.extend(())
                group.update({ngram: (whole.tokens, place) for ngram, place in whole.own.items()})
            # n-grams of the prompt are the group's; those that reach into the response are the row's own
            source = DraftSource(list(prompt.token_ids), group, self.right, len(prompt.token_ids))
            self._sources[row] = source
        start = len(source.tokens) - len(prompt.token_ids)
        known = int(responses.known[row.slot])
        source.extend(responses.tokens[row.slot, start:known].tolist())
        return source
