"""The responses of running rows, on the host: the tokens of each, and whether it has ended, also by a stop
text that the newest token completes.

    RowTable.choose ──Choice, on its way from the device──► take ──► rows that end ──► outputs
                                                              └────► rows that fell short, to be taken back

A choice may be taken while the device is at the next step already. A row that ended with it has got one token
more by then, which is forgotten: it is in no response. So is the token of a row that fell short (its leaders
did not suffice), and what it got after it.

newest token ──could its text hold the last character of a stop text?──► no: nothing is decoded
                 └──► the last few tokens as text, with and without the newest ──► the text it completed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from hybridflow.distributed.transfers import HostCopy
from hybridflow.rollout.base import (
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    PartialOutput,
    TopTokens,
)
from hybridflow.rollout.native.prefixes import Prefix
from hybridflow.rollout.native.sampling import STOP_TEXTS, TOP_LOG_PROBS, WHOLE, SamplingPlan, needs_of

Decode = Callable[[Sequence[int]], str]
"""Token ids to text; a character cut in two gives U+FFFD, as all tokenizers do."""

CUT = "\ufffd"
MARGIN = 4
"""Characters at the start of a text that may be wrong: the rest of one, or a space, is in earlier tokens."""
MAX_REMEMBERED = 1024
"""Sets of stop texts for which the tokens that may complete one are remembered."""
COLUMNS = ("tokens", "log_probs", "versions")
COUNTS = ("prompt", "sampled", "known", "limit")
SELDOM = 32
"""A row that falls short more often than once in this many of the tokens that it may have, and eight times,
has its whole vocabulary sorted from then on.
"""


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


@dataclass(eq=False)
class Row:
    """The facts of one row that the host needs."""

    request: GenerationRequest
    number: int
    """How many rows entered before it."""
    needs: int
    """What it asks for, as a sum of the bits of `sampling`."""
    stops: tuple[int, ...]
    """Tokens that end it."""
    slot: int
    """Place of its response in the host's arrays."""
    top: list[TopTokens]
    """Most probable tokens at each place, where asked for."""
    stopped: bool = False
    """Whether its last token is one that ends it."""
    ended_by: str | None = None
    """Stop text that its newest token completed."""
    broken: bool = False
    """Whether the logits of its last token were not finite."""
    hit: Prefix | None = None
    """Prefix hit that it entered with."""
    prefix: Prefix | None = None
    """Its own context, which later prompts may share."""
    num_taken_back: int = 0
    """How often it fell short."""

    def settle(self) -> bool:
        """Note that a token was drawn from the whole vocabulary; return whether the next ones need not be."""
        sampling = self.request.sampling
        if needs_of(sampling) & WHOLE or self.num_taken_back > 8 + sampling.max_tokens // SELDOM:
            return False
        self.needs &= ~WHOLE
        return True


@dataclass(eq=False)
class Choice:
    """Tokens sampled for some rows in one step, on their way to the host."""

    rows: list[Row]
    slots: NDArray[np.int64]
    places: NDArray[np.int64]
    """Place of the token in each row's response."""
    version: int
    plan: SamplingPlan
    asking: list[Row]
    """Rows that asked for the most probable tokens."""
    copy: HostCopy
    """`Sampled.facts`; of `asking`, tokens and log-probs [n, K] too."""
    index: NDArray[np.intp] | None = None
    """Places of `rows` among those that got a token; None: they are all of them."""
    short: list[Row] = field(default_factory=list)
    """Rows without a token, once it is taken: their leaders did not suffice."""

    def forget(self, leaving: set[Row]) -> None:
        """Drop the tokens of rows that have left, which ended one token earlier, or are taken back."""
        kept = np.array([place for place, row in enumerate(self.rows) if row not in leaving], dtype=np.intp)
        self.rows = [self.rows[place] for place in kept]
        self.slots = self.slots[kept]
        self.places = self.places[kept]
        self.index = kept if self.index is None else self.index[kept]


class Responses:
    """Responses by slot; a row has the same slot as long as it runs, wherever it stands among the rows."""

    def __init__(self, dtype: torch.dtype, stop_texts: StopTexts | None) -> None:
        self.stop_texts = stop_texts
        self.free: list[int] = []
        """Slots that no row has."""
        self.tokens = np.zeros((0, 0), np.int64)
        self.log_probs = np.zeros((0, 0), np.float64 if dtype == torch.float64 else np.float32)
        self.versions = np.zeros((0, 0), np.int32)
        self.prompt = np.zeros(0, np.int64)  # tokens of the prompt
        self.sampled = np.zeros(0, np.int64)  # tokens of the response
        self.known = np.zeros(0, np.int64)  # those of them that have come to the host
        self.limit = np.zeros(0, np.int64)  # most of them

    def grow(self, num_slots: int, width: int) -> None:
        """Allocate at least `num_slots` slots of `width` tokens; slots in use keep what they have."""
        size = (max(num_slots, len(self.tokens)), max(width, self.tokens.shape[1]))
        if size == self.tokens.shape:
            return
        self.free += range(len(self.tokens), size[0])
        for name in (*COLUMNS, *COUNTS):
            old = getattr(self, name)
            new = np.zeros(size[: old.ndim], old.dtype)
            new[tuple(map(slice, old.shape))] = old
            setattr(self, name, new)

    def add(self, request: GenerationRequest) -> int:
        """Take a slot for a request, with the part of its response that was generated before."""
        slot = self.free.pop()
        begun = request.partial_response
        size = len(begun)
        for name, values in zip(COLUMNS, (begun.token_ids, begun.log_probs, begun.policy_versions)):
            getattr(self, name)[slot, :size] = values
        self.prompt[slot] = len(request.prompt_token_ids)
        self.sampled[slot] = size
        self.known[slot] = size
        self.limit[slot] = request.sampling.max_tokens
        return slot

    def newest(self, row: Row) -> int:
        """Return the newest token of a row that the host knows."""
        return int(self.tokens[row.slot, self.known[row.slot] - 1])

    def take(self, choice: Choice) -> list[Row]:
        """Append tokens to the responses, as soon as they have come to the host; return the rows that end."""
        first, *top = choice.copy.arrays()
        facts = first.astype(np.int64, copy=False)
        own = facts if choice.index is None else facts[choice.index]
        if own.shape[1] > 3 and own[:, 3].any():
            choice.short = [choice.rows[place] for place in own[:, 3].nonzero()[0]]
            choice.forget(set(choice.short))
            own = own[own[:, 3] == 0]
        if choice.asking:
            _keep_top(choice, top)
        tokens = own[:, 0]
        log_probs = own[:, 1].copy().view(np.float64)
        stopped = own[:, 2].astype(bool)
        newest = (choice.slots, choice.places)
        self.tokens[newest] = tokens
        self.log_probs[newest] = log_probs
        self.versions[newest] = choice.version
        known = choice.places + 1
        self.known[choice.slots] = known
        broken = ~np.isfinite(log_probs)
        ended = stopped | broken | (known >= self.limit[choice.slots])
        if choice.plan.any(STOP_TEXTS):
            self._find_texts(choice.rows, ended)
        places = ended.nonzero()[0].tolist()
        for place in places:
            choice.rows[place].stopped = bool(stopped[place])
            choice.rows[place].broken = bool(broken[place])
        return [choice.rows[place] for place in places]

    def _find_texts(self, rows: Sequence[Row], ended: NDArray[np.bool_]) -> None:
        """Mark as ended the rows whose newest token completed a stop text of theirs."""
        assert self.stop_texts is not None, "a request with stop texts is refused where nothing can decode"
        for place, row in enumerate(rows):
            params = row.request.sampling
            if not row.needs & STOP_TEXTS:
                continue
            length = int(self.known[row.slot])
            newest = int(self.tokens[row.slot, length - 1])
            if length <= params.min_tokens or not self.stop_texts.may_complete(newest, params.stop):
                continue
            row.ended_by = self.stop_texts.completed(self.tokens[row.slot, :length].tolist(), params.stop)
            ended[place] |= row.ended_by is not None

    def output(self, row: Row, reason: FinishReason | None) -> GenerationOutput:
        """Return the output of a row; `reason` is why it ended, left out: its last token shows it."""
        request_id = row.request.request_id
        length = int(self.known[row.slot])
        by_stop = row.stopped or row.ended_by is not None
        ended: FinishReason = reason or ("stop" if by_stop else "length")
        error = None
        if row.broken:
            length -= 1
            ended = "error"
            error = (
                f"request {request_id}: the model's logits are not finite at response token {length}; "
                "its weights may have diverged"
            )
        tokens, log_probs, versions = (getattr(self, name)[row.slot, :length].tolist() for name in COLUMNS)
        stop_reason = None
        if ended == "stop":
            stop_reason = tokens[-1] if row.stopped else row.ended_by
        top = None
        if row.needs & TOP_LOG_PROBS:
            top = row.top[:length]
        return GenerationOutput(request_id, tokens, log_probs, ended, versions, error, stop_reason, top)

    def new_tokens(self, row: Row, start: int) -> PartialOutput:
        """Return the tokens of a row after its first `start` ones, as far as the host knows."""
        part = slice(start, int(self.known[row.slot]))
        top = None
        if row.needs & TOP_LOG_PROBS:
            top = row.top[part]
        tokens = self.tokens[row.slot, part].tolist()
        log_probs = self.log_probs[row.slot, part].tolist()
        return PartialOutput(row.request.request_id, start, tokens, log_probs, top)


def begun_beyond(request: GenerationRequest, start: int) -> PartialOutput:
    """Return the response of a waiting request after its first `start` tokens."""
    begun = request.partial_response
    top = None
    if begun.top_log_probs is not None:
        top = list(begun.top_log_probs[start:])
    return PartialOutput(
        request.request_id, start, list(begun.token_ids[start:]), list(begun.log_probs[start:]), top
    )


def _keep_top(choice: Choice, columns: Sequence[NDArray[np.generic]]) -> None:
    """Append the most probable tokens of the rows that asked for them."""
    there = set(choice.rows)
    for row, tokens, log_probs in zip(choice.asking, *(column.tolist() for column in columns), strict=True):
        if row in there:
            pairs = sorted(zip(tokens, log_probs), key=lambda pair: (-pair[1], pair[0]))
            row.top.append(pairs[: row.request.sampling.top_log_probs])
