"""The running rows: one column of tensors per fact, row i in slot i, rows 0..count-1 in use.

Everything a decode step reads or writes is here, so that a step is a handful of tensor operations whatever the number of rows.
A row is its request and its place in every column: what moves, grows or is put aside does so for all columns alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.rollout.base import FinishReason, GenerationOutput, GenerationRequest
from hybridflow.rollout.native.sampling import SamplingPlan, sample, stream_keys, uniforms

SEED_BITS = (1 << 63) - 1


class RowTable:
    """State of at most `num_rows` rows that generate at most `width` tokens each."""

    def __init__(self, num_rows: int, width: int, num_stops: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
        def column(*shape: int, kind: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(num_rows, *shape, dtype=kind, device=device)

        self.vocabulary, self.width, self.device = vocabulary, width, device
        self.requests: list[GenerationRequest] = []
        self.length = column()  # tokens whose keys and values are in the slot
        self.last_token = column()  # newest token, not in the slot yet
        self.generated = column()  # response tokens so far
        self.limit = column()  # of response tokens
        self.stream = column()  # where the row's random numbers start
        self.temperature = column(kind=dtype)  # 1 for greedy rows
        self.top_k = column()
        self.top_p = column(kind=dtype)
        self.greedy = column(kind=torch.bool)
        self.stops = column(num_stops).fill_(-1)  # token ids that end the row, filled up with -1
        self.tokens = column(width)
        self.log_probs = column(width, kind=dtype)
        self.versions = column(width, kind=torch.int32)

    @property
    def count(self) -> int:
        """Rows in use."""
        return len(self.requests)

    @property
    def _columns(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def grow(self, num_rows: int, width: int, num_stops: int) -> None:
        """Make room for so many rows, tokens and stops where there is less; rows in use keep what they have."""
        now = (self.tokens.shape[0], self.width, self.stops.shape[1])
        num_rows, width, num_stops = (max(pair) for pair in zip(now, (num_rows, width, num_stops)))
        if (num_rows, width, num_stops) == now:
            return
        larger = RowTable(num_rows, width, num_stops, self.vocabulary, self.temperature.dtype, self.device)
        for name, column in larger._columns.items():
            old = getattr(self, name)
            column[tuple(slice(0, length) for length in old.shape)] = old
            setattr(self, name, column)
        self.width = width

    def copy_of(self, row: int) -> dict[str, Tensor]:
        """What the columns say of a row, to be put aside."""
        return {name: column[row].clone() for name, column in self._columns.items()}

    def restore(self, row: int, saved: dict[str, Tensor]) -> None:
        """Give a row that was just added what `copy_of` kept; its newest token is in the slot now, too."""
        for name, value in saved.items():
            getattr(self, name)[row][tuple(slice(0, length) for length in value.shape)] = value
        self.length[row] += 1

    def add(self, requests: Sequence[GenerationRequest], stops: Sequence[Sequence[int]]) -> None:
        """Append rows whose prompts are in their slots; `stops` are the ending tokens of each."""
        start, stop = self.count, self.count + len(requests)
        params = [request.sampling for request in requests]
        depth = self.stops.shape[1]

        def fill(column: Tensor, values: Sequence[object]) -> None:
            column[start:stop] = torch.tensor(values, dtype=column.dtype, device=self.device)

        fill(self.length, [len(request.prompt_token_ids) for request in requests])
        fill(self.limit, [one.max_tokens for one in params])
        self.stream[start:stop] = stream_keys(torch.tensor([request.seed & SEED_BITS for request in requests], device=self.device))
        fill(self.temperature, [1.0 if one.takes_argmax else one.temperature for one in params])
        fill(self.top_k, [one.top_k if one.limits_tokens and one.top_k > 0 else self.vocabulary for one in params])
        fill(self.top_p, [one.top_p if one.limits_tokens else 1.0 for one in params])
        fill(self.greedy, [one.takes_argmax for one in params])
        if depth:
            fill(self.stops, [[*ids, *[-1] * (depth - len(ids))] for ids in stops])
        self.generated[start:stop] = 0
        self.requests.extend(requests)

    def choose(self, start: int, logits: Tensor, version: int) -> Tensor:
        """Sample one token for each row from `start` on, of logits [n, V], and append it; [n] bool of those that are finished by it."""
        rows = slice(start, self.count)
        plan = SamplingPlan.of(request.sampling for request in self.requests[rows])
        uniform = None if plan.all_greedy else uniforms(self.stream[rows], self.generated[rows], self.log_probs.dtype)
        tokens, log_probs = sample(
            logits,
            plan,
            uniform=uniform,
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            greedy=self.greedy[rows],
        )
        return self.record(rows, tokens, log_probs, version)

    def record(self, rows: slice, tokens: Tensor, log_probs: Tensor, version: int) -> Tensor:
        """Append one token to each of `rows`; [n] bool of those that are finished by it."""
        generated = self.generated[rows]
        place = torch.arange(rows.start, rows.stop, device=self.device) * self.width + generated
        self.tokens.view(-1).index_copy_(0, place, tokens)
        self.log_probs.view(-1).index_copy_(0, place, log_probs)
        self.versions.view(-1).index_fill_(0, place, version)
        self.last_token[rows] = tokens
        generated += 1
        stopped = (tokens[:, None] == self.stops[rows]).any(-1)
        return stopped | (generated >= self.limit[rows]) | ~log_probs.isfinite()

    def outputs(self, rows: Sequence[int], reason: FinishReason | None = None) -> list[GenerationOutput]:
        """What these rows came to: why they ended is read off their last token unless `reason` says it."""
        index = torch.tensor(rows, device=self.device)
        generated = self.generated[index]
        longest = int(generated.max())
        stopped = (self.last_token[index, None] == self.stops[index]).any(-1).tolist()
        tokens, log_probs, versions = (table[index, :longest].tolist() for table in (self.tokens, self.log_probs, self.versions))
        outputs = []
        for i, (row, length) in enumerate(zip(rows, generated.tolist())):
            request_id, error = self.requests[row].request_id, None
            ended: FinishReason = reason or ("stop" if stopped[i] else "length")
            if length and not abs(log_probs[i][length - 1]) < float("inf"):
                length -= 1
                ended, error = (
                    "error",
                    f"request {request_id}: the model's logits are not finite at response token {length}; its weights may have diverged",
                )
            outputs.append(GenerationOutput(request_id, tokens[i][:length], log_probs[i][:length], ended, versions[i][:length], error))
        return outputs

    def remove(self, rows: Sequence[int]) -> tuple[Tensor, Tensor] | None:
        """Drop rows; the last ones move into the holes. (source, destination) of the moves [n] int64, None if there are none."""
        leaving, kept = set(rows), self.count - len(rows)
        holes = [row for row in rows if row < kept]
        tail = [row for row in range(kept, self.count) if row not in leaving]
        assert len(holes) == len(tail), f"{len(holes)} holes for {len(tail)} rows"
        for hole, row in zip(holes, tail):
            self.requests[hole] = self.requests[row]
        del self.requests[kept:]
        if not holes:
            return None
        source, destination = torch.tensor([tail, holes], device=self.device)
        for column in self._columns.values():
            column.index_copy_(0, destination, column.index_select(0, source))
        return source, destination
