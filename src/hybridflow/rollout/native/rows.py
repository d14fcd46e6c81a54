"""The running rows as a table: one tensor per column, rows 0..count-1 in use, row i is row i of the cache.

A decode step reads and writes whole columns: a handful of tensor operations for any number of rows. Rows are
moved in all columns alike. A column that few requests need has no width until one of them comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridflow.protocol.prompt import token_ids_of
from hybridflow.rollout.base import (
    Begun,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    PartialOutput,
    TopTokens,
)
from hybridflow.rollout.native import sampling
from hybridflow.rollout.native.prefixes import Prefix
from hybridflow.rollout.native.random_numbers import stream_keys, uniforms
from hybridflow.rollout.native.row_numbers import INTEGERS, REALS, row_numbers
from hybridflow.rollout.native.sampling import RowSettings, Sampled, SamplingPlan, most_probable, sample
from hybridflow.rollout.native.stop_text import StopTexts

LOOSE = 4
"""A column that is more than this many times as wide as its rows need is narrowed."""
TOKEN_COLUMNS = ("tokens", "log_probs", "versions")
FILLING = {"stops": -1}
"""Filling of the empty places of a column where it is not 0."""


@dataclass(eq=False)
class Row:
    """The facts of one row that the host needs."""

    request: GenerationRequest
    number: int
    """How many rows entered before it."""
    needs: int
    """What it asks for, as a sum of the bits of `sampling`."""
    num_stops: int
    """Number of tokens that end it."""
    top: list[TopTokens]
    """Most probable tokens at each place, where asked for."""
    ended_by: str | None = None
    """Stop text that its newest token completed."""
    hit: Prefix | None = None
    """Prefix hit that it entered with."""
    prefix: Prefix | None = None
    """Its own context, which later prompts may share."""


class RowTable:
    """State of at most `num_rows` rows, each with room for `width` tokens and `num_stops` ending tokens.

    `stop_texts` finds the texts that end responses; without it no request may have any.
    """

    def __init__(
        self,
        num_rows: int,
        width: int,
        num_stops: int,
        vocabulary: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        stop_texts: StopTexts | None = None,
    ) -> None:
        def column(*shape: int, kind: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(num_rows, *shape, dtype=kind, device=device)

        self.vocabulary = vocabulary
        self.device = device
        self.stop_texts = stop_texts
        self.rows: list[Row] = []
        self.num_entered = 0
        self.partial = (
            False  # whether the last row's prompt is in chunked prefill, so that it does not decode
        )
        self.length = column()  # tokens whose keys and values are in the cache
        self.last_token = column()  # newest token, not in the cache yet
        self.generated = column()  # response tokens so far
        self.limit = column()  # of response tokens
        self.stream = column()  # where the row's random numbers start
        self.temperature = column(kind=dtype)  # 1 for greedy rows
        self.top_k = column()
        self.top_p = column(kind=dtype)
        self.min_p = column(kind=dtype)
        self.greedy = column(kind=torch.bool)
        self.stops = column(num_stops).fill_(-1)  # token ids that end the row, filled up with -1
        self.min_tokens = column()
        self.penalty = column(kind=dtype)  # for tokens that are in the prompt or the response
        self.history = column(0)  # those tokens, once a request has such a penalty
        self.prompt_length = column()
        self.bias_token = column(0)  # filled up with token 0, whose bias there is 0
        self.bias = column(0, kind=dtype)
        self.tokens = column(width)
        self.log_probs = column(width, kind=dtype)
        self.versions = column(width, kind=torch.int32)

    @property
    def count(self) -> int:
        """Number of rows in use."""
        return len(self.rows)

    @property
    def decoding(self) -> int:
        """Number of rows that get a token in each step: all but one whose prompt is in chunked prefill."""
        return len(self.rows) - int(self.partial)

    @property
    def width(self) -> int:
        """Number of response tokens that a row can hold."""
        return self.tokens.shape[1]

    @property
    def _columns(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def grow(self, num_rows: int, width: int) -> None:
        """Allocate at least `num_rows` rows of `width` response tokens; rows in use keep what they have."""
        for name in TOKEN_COLUMNS:
            self._widen(name, width)
        if num_rows > len(self.length):
            for name, column in self._columns.items():
                more = column.new_full((num_rows - len(column), *column.shape[1:]), FILLING.get(name, 0))
                setattr(self, name, torch.cat([column, more]))

    def _widen(self, name: str, width: int) -> None:
        """Make a column at least `width` entries wide."""
        column: Tensor = getattr(self, name)
        if width > column.shape[1]:
            more = column.new_full((len(column), width - column.shape[1]), FILLING.get(name, 0))
            setattr(self, name, torch.cat([column, more], 1))

    def _fit(self, name: str, width: int) -> None:
        """Give a column the `width` that its rows need: more at once, less where it has far too much.

        Without the latter one wide row would slow down every later step.
        """
        self._widen(name, width)
        column: Tensor = getattr(self, name)
        if column.shape[1] > LOOSE * max(width, 1):
            setattr(self, name, column[:, :width].clone())

    def add(self, requests: Sequence[GenerationRequest], stops: Sequence[Sequence[int]]) -> None:
        """Append rows for requests and their contexts; `stops` are the ending tokens of each."""
        rows = slice(self.count, self.count + len(requests))
        numbers = [row_numbers(*one, self.vocabulary) for one in zip(requests, stops, strict=True)]
        self.grow(rows.stop, max(request.sampling.max_tokens for request in requests))
        integers = torch.from_numpy(np.array([one.integers for one in numbers])).to(self.device)
        for name, values in zip(INTEGERS, integers.unbind(1), strict=True):
            getattr(self, name)[rows] = values
        self.length[rows] = self.prompt_length[rows]
        self.stream[rows] = stream_keys(self.stream[rows])
        reals = torch.from_numpy(np.array([one.reals for one in numbers])).to(self.device)
        for name, values in zip(REALS, reals.unbind(1), strict=True):
            getattr(self, name)[rows] = values
        self.greedy[rows] = torch.tensor([one.greedy for one in numbers], device=self.device)
        self.generated[rows] = 0
        for request, one in zip(requests, numbers):
            top = list(request.begun.top_log_probs or ())
            self.rows.append(Row(request, self.num_entered, one.needs, len(one.stops), top))
            self.num_entered += 1
        self._fit("stops", max(row.num_stops for row in self.rows))
        self.stops[rows] = _padded([one.stops for one in numbers], self.stops, FILLING["stops"])
        self._fill_edits(rows)
        for row, request in enumerate(requests, rows.start):
            if request.begun:
                self._fill_begun(row, request.begun)

    def _fill_begun(self, row: int, begun: Begun) -> None:
        """Give a new row the part of its response that was generated before, which is in its context."""
        size = len(begun)
        for name, values in zip(TOKEN_COLUMNS, (begun.token_ids, begun.log_probs, begun.policy_versions)):
            column: Tensor = getattr(self, name)
            column[row, :size] = torch.tensor(values, dtype=column.dtype, device=self.device)
        self.generated[row] = size
        self.length[row] += size

    def _fill_edits(self, rows: slice) -> None:
        """Fill the columns of what changes the logits of new rows, where they or others ask for it."""
        plan = self._plan(slice(None))
        new = [row.request.sampling for row in self.rows[rows]]
        if any(one.repetition_penalty != 1.0 for one in new):
            asking = plan.rows(sampling.REPETITION)
            self._fit("history", max(self.rows[row].request.most_tokens for row in asking))
            for row in (row for row in asking if row >= rows.start):
                known = token_ids_of(self.rows[row].request.context)
                self.history[row, : len(known)] = torch.tensor(known, device=self.device)
        if any(one.logit_bias for one in new):
            asking = plan.rows(sampling.LOGIT_BIAS)
            widest = max(len(self.rows[row].request.sampling.logit_bias) for row in asking)
            self._fit("bias_token", widest)
            self._fit("bias", widest)
        if self.bias.shape[1]:
            tokens = [[token for token, _ in one.logit_bias] for one in new]
            self.bias_token[rows] = _padded(tokens, self.bias_token, 0)
            self.bias[rows] = _padded([[bias for _, bias in one.logit_bias] for one in new], self.bias, 0)

    def choose(self, start: int, logits: Tensor, version: int) -> Tensor:
        """Sample one token for each decoding row from `start` on, of logits [n, V], and append it.

        Returns [n] bool, true for rows that are finished by it.
        """
        rows = slice(start, self.decoding)
        plan = self._plan(rows)
        settings = RowSettings(
            uniforms(self.stream[rows], self.generated[rows], self.log_probs.dtype)
            if plan.any(sampling.DRAWN)
            else None,
            *(column[rows] for column in (self.temperature, self.top_k, self.top_p, self.min_p, self.greedy)),
        )

        def edit(logits: Tensor, part: slice) -> Tensor:
            return self._edited(logits, slice(start + part.start, start + part.stop), plan)

        chosen = sample(logits, plan, settings, edit if plan.any(sampling.EDITS) else None)
        if asking := plan.rows(sampling.TOP_LOG_PROBS):
            self._keep_top(start, asking, logits, settings, chosen)
        finished = self._record(rows, chosen, version, plan)
        if watched := plan.rows(sampling.STOP_TEXTS):
            self._find_texts(start, watched, finished)
        return finished

    def _plan(self, rows: slice) -> SamplingPlan:
        return SamplingPlan([row.needs for row in self.rows[rows]])

    def _edited(self, logits: Tensor, rows: slice, plan: SamplingPlan) -> Tensor:
        """Return a copy of logits [n, V] with biases, then penalties, then -inf for ends that are early."""
        edited = logits.clone()
        if plan.any(sampling.LOGIT_BIAS):
            edited.scatter_add_(1, self.bias_token[rows], self.bias[rows])
        if plan.any(sampling.REPETITION):
            known = self.prompt_length[rows] + self.generated[rows]
            places = torch.arange(self.history.shape[1], device=self.device)
            # one token several times is set to one value several times
            tokens = torch.where(places < known[:, None], self.history[rows], self.history[rows, :1])
            values = edited.gather(1, tokens)
            penalty = self.penalty[rows, None]
            edited.scatter_(1, tokens, torch.where(values > 0, values / penalty, values * penalty))
        if plan.any(sampling.MIN_TOKENS):
            stops = self.stops[rows]
            forbidden = (self.generated[rows] < self.min_tokens[rows])[:, None] & (stops >= 0)
            nothing = torch.zeros(stops.shape, dtype=edited.dtype, device=self.device)
            edited.scatter_add_(1, stops.clamp(min=0), nothing.masked_fill_(forbidden, -float("inf")))
        return edited

    def _keep_top(
        self, start: int, asking: list[int], logits: Tensor, settings: RowSettings, chosen: Sampled
    ) -> None:
        """Keep the most probable tokens of the rows start + `asking`."""
        wanted = [self.rows[start + row].request.sampling.top_log_probs for row in asking]
        index = torch.tensor(asking, device=self.device)
        best = most_probable(
            logits[index], settings.temperature[index], chosen.normalizer[index], max(wanted)
        )
        for row, count, tokens, log_probs in zip(
            asking, wanted, *(column.tolist() for column in best), strict=True
        ):
            pairs = sorted(zip(tokens, log_probs), key=lambda pair: (-pair[1], pair[0]))
            self.rows[start + row].top.append(pairs[:count])

    def _record(self, rows: slice, chosen: Sampled, version: int, plan: SamplingPlan) -> Tensor:
        """Append one token to each of `rows`; [n] bool of those that are finished by it, texts aside."""
        tokens, log_probs, _ = chosen
        generated = self.generated[rows]
        place = torch.arange(rows.start, rows.stop, device=self.device) * self.width + generated
        self.tokens.view(-1).index_copy_(0, place, tokens)
        self.log_probs.view(-1).index_copy_(0, place, log_probs)
        self.versions.view(-1).index_fill_(0, place, version)
        self.last_token[rows] = tokens
        generated += 1
        if plan.any(sampling.REPETITION):
            asking = torch.tensor(plan.rows(sampling.REPETITION), device=self.device)
            own = asking + rows.start
            self.history[own, self.prompt_length[own] + generated[asking] - 1] = tokens[asking]
        stopped = (tokens[:, None] == self.stops[rows]).any(-1)
        return stopped | (generated >= self.limit[rows]) | ~log_probs.isfinite()

    def _find_texts(self, start: int, watched: list[int], finished: Tensor) -> None:
        """Mark as finished the rows start + `watched` whose newest token completed a stop text of theirs."""
        assert self.stop_texts is not None, "a request with stop texts is refused where nothing can decode"
        newest = self.last_token[start : self.decoding].tolist()
        for row in watched:
            params = self.rows[start + row].request.sampling
            if not self.stop_texts.may_complete(newest[row], params.stop):
                continue
            tokens = self.tokens[start + row, : int(self.generated[start + row])].tolist()
            if len(tokens) <= params.min_tokens:
                continue
            text = self.stop_texts.completed(tokens, params.stop)
            self.rows[start + row].ended_by = text
            if text is not None:
                finished[row] = True

    def outputs(self, rows: Sequence[int], reason: FinishReason | None = None) -> list[GenerationOutput]:
        """Return the outputs of rows; `reason` is why they ended, left out: their last token tells."""
        index = torch.tensor(rows, device=self.device)
        generated = self.generated[index]
        longest = int(generated.max())
        stopped = (self.last_token[index, None] == self.stops[index]).any(-1).tolist()
        tokens, log_probs, versions = (
            table[index, :longest].tolist() for table in (self.tokens, self.log_probs, self.versions)
        )
        outputs = []
        for i, (row, length) in enumerate(zip(rows, generated.tolist())):
            request_id = self.rows[row].request.request_id
            error = None
            text = self.rows[row].ended_by
            ended: FinishReason = reason or ("stop" if stopped[i] or text is not None else "length")
            if length and not abs(log_probs[i][length - 1]) < float("inf"):
                length -= 1
                ended = "error"
                error = (
                    f"request {request_id}: the model's logits are not finite at response token {length}; "
                    "its weights may have diverged"
                )
            stop_reason = None
            if ended == "stop":
                stop_reason = tokens[i][length - 1] if stopped[i] else text
            top = None
            if self.rows[row].needs & sampling.TOP_LOG_PROBS:
                top = self.rows[row].top[:length]
            response = (tokens[i][:length], log_probs[i][:length], ended, versions[i][:length])
            outputs.append(GenerationOutput(request_id, *response, error, stop_reason, top))
        return outputs

    def new_tokens(self, rows: Sequence[int], since: Sequence[int]) -> list[PartialOutput]:
        """Return what each of these rows has generated after its first `since` tokens.

        Only these are copied from the device, so that following a response costs as much as its tokens.
        """
        if not rows:
            return []
        lengths = self.generated[torch.tensor(rows, device=self.device)].tolist()
        spans = [range(begin, length) for begin, length in zip(since, lengths, strict=True)]
        places = [row * self.width + place for row, span in zip(rows, spans, strict=True) for place in span]
        index = torch.tensor(places, dtype=torch.int64, device=self.device)
        tokens = self.tokens.view(-1)[index].tolist()
        log_probs = self.log_probs.view(-1)[index].tolist()
        partials = []
        done = 0
        for row, span in zip(rows, spans, strict=True):
            part = slice(done, done + len(span))
            done = part.stop
            top = None
            if self.rows[row].needs & sampling.TOP_LOG_PROBS:
                top = self.rows[row].top[span.start : span.stop]
            number = self.rows[row].request.request_id
            partials.append(PartialOutput(number, span.start, tokens[part], log_probs[part], top))
        return partials

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
        if self.partial and holes and holes[-1] != kept - 1:
            tail[-1:] = [kept - 1, last]
            holes.append(kept - 1)
        moved = [self.rows[row] for row in tail]
        for hole, row in zip(holes, moved):
            self.rows[hole] = row
        del self.rows[kept:]
        if holes:
            source, destination = torch.tensor([tail, holes], device=self.device)
            for column in self._columns.values():
                column.index_copy_(0, destination, column.index_select(0, source))
        if self.rows:
            self._fit("stops", max(row.num_stops for row in self.rows))
        return tail, holes


def _padded(rows: Sequence[Sequence[float]], column: Tensor, filling: int) -> Tensor:
    """Return rows of numbers as a tensor of a column's width, dtype and device, filled up at their ends."""
    kind = np.float64 if column.dtype.is_floating_point else np.int64
    padded = np.full((len(rows), column.shape[1]), filling, dtype=kind)
    for row, numbers in enumerate(rows):
        padded[row, : len(numbers)] = numbers
    return torch.from_numpy(padded).to(column.device, column.dtype)
