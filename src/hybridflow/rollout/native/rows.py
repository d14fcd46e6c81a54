"""The running rows as a table: one tensor per column, rows 0..count-1 in use, row i is row i of the cache.

    columns ──choose──► newest tokens, the next step's input ──Choice──► Responses, on the host
       ▲                             │                                        │
       ├─────────────────────────────┘ all on the device                      │
       └──take_back────── rows whose token may be wrong ◄─────────────────────┘

A decode step reads and writes whole columns: a handful of operations for any number of rows. Rows are moved
in all columns alike. A column that few requests need has no width until one of them comes.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridflow.distributed.transfers import HostCopy, to_device
from hybridflow.protocol.prompt import token_ids_of
from hybridflow.rollout.base import FinishReason, GenerationOutput, GenerationRequest, SamplingParams
from hybridflow.rollout.native import sampling
from hybridflow.rollout.native.responses import Choice, Responses, Row, StopTexts
from hybridflow.rollout.native.sampling import (
    ChosenTokens,
    Edit,
    RowSettings,
    SamplingPlan,
    most_probable,
    sample,
    stream_keys,
    uniforms,
)

SEED_BITS = (1 << 63) - 1
INTEGERS = ("prompt_length", "generated", "stream", "top_k", "min_tokens", "greedy", "shift")
REALS = ("temperature", "top_p", "min_p", "penalty")
"""Columns of numbers that a request brings, in the order of `RowNumbers`."""


class RowNumbers(NamedTuple):
    """A request as the columns hold it."""

    integers: Sequence[int]
    """In the order of `INTEGERS`; all fit into int64."""
    reals: Sequence[float]
    """In the order of `REALS`."""
    stops: tuple[int, ...]
    """Tokens that end the response, each once."""


def end_tokens(params: SamplingParams, eos_token_ids: Sequence[int], vocabulary: int) -> tuple[int, ...]:
    """Return the tokens that end a response: the request's own and, unless it ignores them, the model's.

    One of the model's that its vocabulary lacks never comes, and has no logit that `min_tokens` could lower.
    """
    ends = list(params.stop_token_ids)
    if not params.ignore_eos:
        ends += [token for token in eos_token_ids if token < vocabulary]
    return tuple(dict.fromkeys(ends))


def row_numbers(request: GenerationRequest, eos_token_ids: Sequence[int], vocabulary: int) -> RowNumbers:
    """Return a request as the columns hold it; OverflowError, TypeError where its values do not fit.

    Called when it joins, so that its own values fail it alone, and again when it enters.
    """
    params = request.sampling
    array("q", request.prompt_token_ids)  # raises where a token is no 64-bit integer
    array("q", [params.max_tokens])
    array("q", [token for token, _ in params.logit_bias])
    temperature = 1.0 if params.takes_argmax else params.temperature
    kept = (params.top_p, params.min_p) if params.limits_tokens else (1.0, 0.0)
    top_k = vocabulary
    if params.limits_tokens and params.top_k > 0:
        top_k = min(params.top_k, vocabulary)
    integers = (
        len(request.prompt_token_ids),
        len(request.partial_response),
        request.seed & SEED_BITS,
        top_k,
        params.min_tokens,
        params.takes_argmax,
        sum(medium.shift for medium in request.prompt.media),
    )
    reals = (temperature, *kept, params.repetition_penalty)
    stops = array("q", end_tokens(params, eos_token_ids, vocabulary))
    return RowNumbers(array("q", integers), array("d", reals), tuple(stops))


_PLACES = itertools.count()
LOOSE = 4
"""A column that is more than this many times as wide as its rows need is narrowed."""
FILLING = {"stops": -1}
"""Filling of the empty places of a column where it is not 0."""


class RowTable:
    """State of the rows. `stop_texts` finds the texts that end responses."""

    def __init__(
        self,
        vocabulary: int,
        eos_token_ids: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        stop_texts: StopTexts | None = None,
    ) -> None:
        """`eos_token_ids`: tokens that end the rows, unless a request ignores them."""

        def column(*shape: int, kind: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(0, *shape, dtype=kind, device=device)

        self.vocabulary = vocabulary
        self.eos_token_ids = eos_token_ids
        self.device = device
        self.rows: list[Row] = []
        self.num_entered = 0
        self.partial = False
        """Whether the last row's prompt is in chunked prefill, so that it does not decode."""
        self.responses = Responses(dtype, stop_texts)
        self.place = next(_PLACES)
        """Number that no table had before; another one whenever other rows stand in it, or elsewhere."""
        self._slots: NDArray[np.int64] | None = None  # of the responses of all rows, in order
        self._plans: dict[tuple[int | None, int | None], SamplingPlan] = {}
        self.length = column()  # tokens whose keys and values are in the cache
        self.last_token = column()  # newest token, not in the cache yet
        self.generated = column()  # response tokens so far
        self.stream = column()  # where the row's random numbers start
        self.temperature = column(kind=dtype)  # 1 for greedy rows
        self.top_k = column()
        self.top_p = column(kind=dtype)
        self.min_p = column(kind=dtype)
        self.greedy = column(kind=torch.bool)
        self.stops = column(0)  # token ids that end the row, filled up with -1
        self.min_tokens = column()
        self.penalty = column(kind=dtype)  # for tokens that are in the prompt or the response
        self.history = column(0)  # those tokens, once a request has such a penalty
        self.prompt_length = column()
        self.shift = column()  # how much further positions are than places, behind media
        self.bias_token = column(0)  # filled up with token 0, whose bias there is 0
        self.bias = column(0, kind=dtype)

    @property
    def count(self) -> int:
        """Number of rows in use."""
        return len(self.rows)

    @property
    def decoding(self) -> int:
        """Number of rows that get a token in each step: all but one whose prompt is in chunked prefill."""
        return len(self.rows) - int(self.partial)

    @property
    def _columns(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def _grow(self, num_rows: int, width: int) -> None:
        """Allocate at least `num_rows` rows of `width` response tokens; rows in use keep what they have."""
        self.responses.grow(num_rows, width)
        if num_rows > len(self.length):
            for name, column in self._columns.items():
                more = column.new_full((num_rows - len(column), *column.shape[1:]), FILLING.get(name, 0))
                setattr(self, name, torch.cat([column, more]))

    def _fit(self, name: str, width: int) -> None:
        """Give a column the `width` that its rows need: more at once, less where it has far too much.

        Without the latter one wide row would slow down every later step.
        """
        column: Tensor = getattr(self, name)
        if width > column.shape[1]:
            more = column.new_full((len(column), width - column.shape[1]), FILLING.get(name, 0))
            setattr(self, name, torch.cat([column, more], 1))
        elif column.shape[1] > LOOSE * max(width, 1):
            setattr(self, name, column[:, :width].clone())

    def add(self, requests: Sequence[GenerationRequest], num_slots: int = 0) -> None:
        """Append rows for requests and their contexts; memory is taken for at least `num_slots` rows."""
        rows = slice(self.count, self.count + len(requests))
        numbers = [row_numbers(request, self.eos_token_ids, self.vocabulary) for request in requests]
        most = max(request.sampling.max_tokens for request in requests)
        self._grow(max(rows.stop, num_slots), most)
        integers, reals, stops = zip(*numbers)
        for names, values in ((INTEGERS, integers), (REALS, reals)):
            columns = to_device(torch.from_numpy(np.array(values)), self.device)
            for name, column in zip(names, columns.unbind(1), strict=True):
                getattr(self, name)[rows] = column
        self.length[rows] = self.prompt_length[rows] + self.generated[rows]
        self.stream[rows] = stream_keys(self.stream[rows])
        for request, ends in zip(requests, stops):
            top = list(request.partial_response.top_log_probs or ())
            needs = sampling.needs_of(request.sampling)
            self.rows.append(Row(request, self.num_entered, needs, ends, self.responses.add(request), top))
            self.num_entered += 1
        self._changed()
        self._fit("stops", max(len(row.stops) for row in self.rows))
        self.stops[rows] = _padded(stops, self.stops, FILLING["stops"])
        self._fill_edits(rows)

    def _changed(self) -> None:
        """Invalidate the cached facts about the rows together."""
        self.place = next(_PLACES)
        self._slots = None
        self._plans.clear()

    def _slots_of(self, rows: slice | NDArray[np.intp]) -> NDArray[np.int64]:
        if self._slots is None:
            self._slots = np.array([row.slot for row in self.rows], np.int64)
        return self._slots[rows]

    @property
    def exhausted(self) -> bool:
        """Whether all decoding rows have as many tokens as they may have, those that are on their way too."""
        slots = self._slots_of(slice(0, self.decoding))
        return bool((self.responses.sampled[slots] >= self.responses.limit[slots]).all())

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens that each decoding row has in the cache."""
        slots = self._slots_of(slice(0, self.decoding))
        found: NDArray[np.int64] = self.responses.prompt[slots] + self.responses.sampled[slots] - 1
        return found

    @property
    def longest(self) -> int:
        """Most tokens that a decoding row has in the cache."""
        return int(self.lengths.max(initial=0))

    @property
    def tokens_left(self) -> NDArray[np.int64]:
        """Tokens that each decoding row may still get."""
        slots = self._slots_of(slice(0, self.decoding))
        left: NDArray[np.int64] = self.responses.limit[slots] - self.responses.sampled[slots]
        return left

    def outputs(self, rows: Sequence[int], reason: FinishReason | None = None) -> list[GenerationOutput]:
        """Return the outputs of rows; `reason` is why they ended, left out: their last token shows it."""
        return [self.responses.output(self.rows[row], reason) for row in rows]

    def _fill_edits(self, rows: slice) -> None:
        """Fill the columns of what changes the logits of new rows, where they or others ask for it."""
        plan = self._plan(slice(None))
        new = [row.request.sampling for row in self.rows[rows]]
        if any(one.repetition_penalty != 1.0 for one in new):
            asking = plan.rows(sampling.REPETITION)
            # the last place is for a token that a row gets before the host sees that it has ended
            self._fit("history", 1 + max(self.rows[row].request.most_tokens for row in asking))
            for row in (row for row in asking if row >= rows.start):
                known = token_ids_of(self.rows[row].request.context)
                self.history[row, : len(known)] = to_device(known, self.device)
        if any(one.logit_bias for one in new):
            asking = plan.rows(sampling.LOGIT_BIAS)
            widest = max(len(self.rows[row].request.sampling.logit_bias) for row in asking)
            self._fit("bias_token", widest)
            self._fit("bias", widest)
        if self.bias.shape[1]:
            tokens = [[token for token, _ in one.logit_bias] for one in new]
            self.bias_token[rows] = _padded(tokens, self.bias_token, 0)
            self.bias[rows] = _padded([[bias for _, bias in one.logit_bias] for one in new], self.bias, 0)

    @property
    def plan(self) -> SamplingPlan:
        """What all decoding rows need."""
        return self._plan(slice(0, self.decoding))

    def choose(self, start: int, logits: Tensor, version: int, *, ahead: bool = False) -> Choice:
        """Sample one token for each decoding row from `start` on, of logits [n, V].

        It is their newest token at once, for the next step; `take` appends it to their responses. `ahead` is
        that of `sample`.
        """
        rows = slice(start, self.decoding)
        plan = self._plan(rows)
        asking = [self.rows[start + row] for row in plan.rows(sampling.TOP_LOG_PROBS)]
        settings, edit = self._drawing(plan, rows, self.generated[rows])
        chosen = sample(logits, plan, settings, edit, ahead=ahead)
        columns = self._facts(logits, chosen, plan, rows, asking)
        self._record(rows, chosen.tokens, plan)
        return self._choice(start, plan, asking, columns, version)

    def verify(
        self, tokens: Tensor, drafts: Sequence[Sequence[int]], logits: Tensor, version: int
    ) -> list[Choice]:
        """Sample behind the newest token of each decoding row and behind each drafted one: `tokens` [N], row
        after row, and logits [N, V]. A draft is right as long as it is what is sampled.

        Returns the choices of one place after the other: the first has a token of each row, the next ones
        those of rows whose draft was right up to there. All are the rows' tokens at once, as in `choose`.
        """
        counts = np.array([1 + len(draft) for draft in drafts])
        first = counts.cumsum() - counts
        row_of = np.arange(len(counts)).repeat(counts)
        steps = np.arange(len(row_of)) - first.repeat(counts)
        index, ahead = to_device(torch.from_numpy(np.stack([row_of, steps])), self.device)
        plan = SamplingPlan([self.rows[row].needs for row in row_of])
        generated = self.generated[index] + ahead
        if plan.any(sampling.REPETITION):  # what is drafted counts for what comes behind it
            own = plan.index(self.device, sampling.REPETITION)
            places = self.prompt_length[index[own]] + generated[own] - 1
            self.history[index[own], places] = tokens[own]
        asking = plan.rows(sampling.TOP_LOG_PROBS)
        settings, edit = self._drawing(plan, index, generated)
        chosen = sample(logits, plan, settings, edit)
        columns = self._facts(logits, chosen, plan, index, [self.rows[row_of[one]] for one in asking])
        facts, *top = HostCopy(columns).tensors()
        sampled = facts[:, 0].tolist()
        right = [_common(draft, sampled[start:]) for draft, start in zip(drafts, first.tolist())]
        taken = to_device(torch.from_numpy(np.stack([first + right, 1 + np.array(right)])), self.device)
        rows = slice(0, len(counts))
        self.length[rows] += taken[1]
        self.generated[rows] += taken[1] - 1
        self._record(rows, chosen.tokens[taken[0]], self.plan)
        place_of = {one: place for place, one in enumerate(asking)}
        choices = []
        for step in range(1 + max(right)):
            members = [row for row, count in enumerate(right) if count >= step]
            places = [int(first[row]) + step for row in members]
            asked = [place_of[place] for place in places if place in place_of]
            own_columns = [facts[places], *(column[asked] for column in top)]
            asking_rows = [self.rows[row_of[asking[one]]] for one in asked]
            slots = self._slots_of(np.array(members))
            slot_places = self.responses.sampled[slots]
            self.responses.sampled[slots] += 1
            member_rows = [self.rows[row] for row in members]
            copy = HostCopy(own_columns)
            choices.append(Choice(member_rows, slots, slot_places, version, self.plan, asking_rows, copy))
        return choices

    def _drawing(
        self, plan: SamplingPlan, rows: slice | Tensor, generated: Tensor
    ) -> tuple[RowSettings, Edit | None]:
        """Return how tokens of `rows` are drawn, each behind `generated` [n] tokens of its response."""
        uniform = None
        if plan.any(sampling.DRAWN):
            uniform = uniforms(self.stream[rows], generated, self.temperature.dtype)
        columns = (self.temperature, self.top_k, self.top_p, self.min_p, self.greedy)
        settings = RowSettings(uniform, *(column[rows] for column in columns))

        def edit(logits: Tensor, part: slice) -> Tensor:
            if isinstance(rows, slice):
                own: slice | Tensor = slice(rows.start + part.start, rows.start + part.stop)
            else:
                own = rows[part]
            return self._edited(logits, own, generated[part], plan)

        return settings, edit if plan.any(sampling.EDITS) else None

    def _facts(
        self,
        logits: Tensor,
        chosen: ChosenTokens,
        plan: SamplingPlan,
        rows: slice | Tensor,
        asking: Sequence[Row],
    ) -> list[Tensor]:
        """Return what the host has to know of tokens of `rows`: `ChosenTokens.facts` and, for rows that are
        `asking` for the most probable tokens, these and their log-probs.
        """
        columns = [chosen.facts(self.stops[rows])]
        if asking:
            index = plan.index(self.device, sampling.TOP_LOG_PROBS)
            most = max(row.request.sampling.top_log_probs for row in asking)
            temperature = self.temperature[rows][index]
            columns += most_probable(logits[index], temperature, chosen.normalizer[index], most)
        return columns

    def chosen(self, facts: Tensor, version: int) -> Choice:
        """Do as `choose`, with facts [n, 3 or 4] that were sampled already, for all decoding rows."""
        rows = slice(0, self.decoding)
        plan = self._plan(rows)
        self._record(rows, facts[:, 0], plan)
        return self._choice(0, plan, [], [facts], version)

    def _choice(
        self, start: int, plan: SamplingPlan, asking: list[Row], columns: Sequence[Tensor], version: int
    ) -> Choice:
        settled = [self.rows[start + row].settle() for row in plan.rows(sampling.WHOLE)]
        if any(settled):
            self._plans.clear()
        rows = slice(start, self.decoding)
        slots = self._slots_of(rows)
        places = self.responses.sampled[slots]
        self.responses.sampled[slots] += 1
        return Choice(self.rows[rows], slots, places, version, plan, asking, HostCopy(columns))

    def take_back(self, rows: Sequence[Row]) -> tuple[list[int], list[int]]:
        """Set rows back to the tokens that the host knows; their next token is drawn of the whole vocabulary.

        Returns their places, and by how many tokens each was ahead.
        """
        places = [self.rows.index(row) for row in rows]
        slots = np.array([row.slot for row in rows], np.int64)
        known = self.responses.known[slots]
        ahead = self.responses.sampled[slots] - known
        self.responses.sampled[slots] = known
        newest = self.responses.tokens[slots, known - 1]
        index, back, tokens = to_device(torch.from_numpy(np.stack([places, ahead, newest])), self.device)
        self.last_token.index_copy_(0, index, tokens)
        self.length.index_add_(0, index, back, alpha=-1)
        self.generated.index_add_(0, index, back, alpha=-1)
        for row in rows:
            row.needs |= sampling.WHOLE
            row.num_taken_back += 1
        self._plans.clear()
        return places, ahead.tolist()

    def _plan(self, rows: slice) -> SamplingPlan:
        plan = self._plans.get((rows.start, rows.stop))
        if plan is None:
            plan = SamplingPlan([row.needs for row in self.rows[rows]])
            self._plans[(rows.start, rows.stop)] = plan
        return plan

    def _edited(self, logits: Tensor, rows: slice | Tensor, generated: Tensor, plan: SamplingPlan) -> Tensor:
        """Return a copy of logits [n, V] with biases, then penalties, then -inf for ends that are early.

        They belong to `rows`, and each follows `generated` [n] tokens of a response.
        """
        edited = logits.clone()
        if plan.any(sampling.LOGIT_BIAS):
            edited.scatter_add_(1, self.bias_token[rows], self.bias[rows])
        if plan.any(sampling.REPETITION):
            known = self.prompt_length[rows] + generated
            places = torch.arange(self.history.shape[1], device=self.device)
            # one token several times is set to one value several times
            tokens = torch.where(places < known[:, None], self.history[rows], self.history[rows, :1])
            values = edited.gather(1, tokens)
            penalty = self.penalty[rows][:, None]
            edited.scatter_(1, tokens, torch.where(values > 0, values / penalty, values * penalty))
        if plan.any(sampling.MIN_TOKENS):
            stops = self.stops[rows]
            forbidden = (generated < self.min_tokens[rows])[:, None] & (stops >= 0)
            nothing = torch.zeros(stops.shape, dtype=edited.dtype, device=self.device)
            edited.scatter_add_(1, stops.clamp(min=0), nothing.masked_fill_(forbidden, -float("inf")))
        return edited

    def _record(self, rows: slice, tokens: Tensor, plan: SamplingPlan) -> None:
        """Note a new token of each of `rows`."""
        generated = self.generated[rows]
        self.last_token[rows] = tokens
        generated += 1
        if plan.any(sampling.REPETITION):
            asking = plan.index(self.device, sampling.REPETITION)
            own = asking + rows.start
            self.history[own, self.prompt_length[own] + generated[asking] - 1] = tokens[asking]

    def move_to_end(self, row: int) -> None:
        """Make a row the last one; those behind it move up."""
        self.rows.append(self.rows.pop(row))
        self._changed()
        source = to_device([*range(row + 1, self.count), row], self.device)
        for column in self._columns.values():
            column[row : self.count] = column.index_select(0, source)

    def remove(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Remove rows; the last ones move into the holes. Returns source and destination of the moves.

        A row in chunked prefill stays the last one.
        """
        leaving = set(rows)
        last = self.count - 1
        kept = self.count - len(leaving)
        holes = sorted(row for row in leaving if row < kept)
        tail = [row for row in range(kept, self.count) if row not in leaving]
        assert len(holes) == len(tail), f"{len(holes)} holes for {len(tail)} rows"
        self.partial = self.partial and last not in leaving
        self.responses.free += [self.rows[row].slot for row in leaving]
        if self.partial and holes and holes[-1] != kept - 1:
            tail[-1:] = [kept - 1, last]
            holes.append(kept - 1)
        moved = [self.rows[row] for row in tail]
        for hole, row in zip(holes, moved):
            self.rows[hole] = row
        del self.rows[kept:]
        self._changed()
        if holes:
            source, destination = to_device([tail, holes], self.device)
            for column in self._columns.values():
                column.index_copy_(0, destination, column.index_select(0, source))
        if self.rows:
            self._fit("stops", max(len(row.stops) for row in self.rows))
        return tail, holes


def _common(draft: Sequence[int], sampled: Sequence[int]) -> int:
    """Return how many tokens of a draft are those that were sampled."""
    pairs = zip(draft, sampled)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), len(draft))


def _padded(rows: Sequence[Sequence[float]], column: Tensor, filling: int) -> Tensor:
    """Return rows of numbers as a tensor of a column's width, dtype and device, filled up at their ends."""
    kind = np.float64 if column.dtype.is_floating_point else np.int64
    padded = np.full((len(rows), column.shape[1]), filling, dtype=kind)
    for row, numbers in enumerate(rows):
        padded[row, : len(numbers)] = numbers
    return to_device(torch.from_numpy(padded), column.device).to(column.dtype)
