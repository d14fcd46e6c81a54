"""One call of `generate`: rows enter, are decoded together, and leave as they finish.

Scheduler ──admissions──► prefill (each prompt once) ──keys, values──► slots ──► first tokens ─┐
    ▲                                                                                         ▼
    └── free slots ◄── outputs ◄── finished rows leave, last rows move up ◄── decode: [B, 1] ◄─┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from hybridflow.models.attention import PackedLayout
from hybridflow.models.kv_cache import Places, SlotCache
from hybridflow.models.policy import PolicyModel
from hybridflow.models.slot_layout import SlotLayout
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, RolloutStats
from hybridflow.rollout.native.rows import RowTable
from hybridflow.rollout.native.scheduler import Admission, Scheduler


class Generation:
    """The state of one call; `step` does one round of it."""

    def __init__(
        self,
        policy: PolicyModel,
        cache: SlotCache,
        requests: Sequence[GenerationRequest],
        *,
        eos_token_ids: Sequence[int],
        max_rows: int,
        max_batched_tokens: int,
        version: Callable[[], int],
        stats: RolloutStats,
    ) -> None:
        self.policy, self.cache, self.version, self.stats = policy, cache, version, stats
        self.scheduler = Scheduler(requests, max_rows=max_rows, max_batched_tokens=max_batched_tokens)
        self._eos = tuple(eos_token_ids)
        self._max_rows = max_rows
        self._dtype = torch.promote_types(policy.dtype, torch.float32)
        self._longest = 0  # most tokens in any slot in use
        self._kept_states: Tensor | None = None  # last hidden state [1, H] of the prompt in the spare slot
        vocabulary = policy.head.weight.shape[0]
        width = max(request.sampling.max_tokens for request in requests)
        num_stops = max(len(self._stops(request)) for request in requests)
        self.rows = RowTable(max_rows, width, num_stops, vocabulary, self._dtype, policy.device)

    @property
    def done(self) -> bool:
        """Nothing runs and nothing waits."""
        return self.rows.count == 0 and self.scheduler.num_waiting == 0

    @torch.no_grad()
    def step(self) -> list[GenerationOutput]:
        """Admit what may enter, decode one token for every row, and return the rows that finished."""
        started = perf_counter()
        outputs = []
        while self.scheduler.may_enter(self.rows.count):
            outputs += self._enter(self.scheduler.next_batch(self._max_rows - self.rows.count))
        if self.rows.count:
            outputs += self._decode()
        self.stats.generated_tokens += sum(len(output.token_ids) for output in outputs)
        self.stats.seconds += perf_counter() - started
        return outputs

    @torch.no_grad()
    def abort(self, request_ids: set[int]) -> list[GenerationOutput]:
        """End these requests between two steps; the others go on."""
        outputs = [GenerationOutput(request.request_id, [], [], "abort", []) for request in self.scheduler.remove(request_ids)]
        running = [row for row, request in enumerate(self.rows.requests) if request.request_id in request_ids]
        if running:
            outputs += self._leave(running, aborted=True)
        self.stats.generated_tokens += sum(len(output.token_ids) for output in outputs)
        return outputs

    def _stops(self, request: GenerationRequest) -> tuple[int, ...]:
        return request.sampling.stop_token_ids + (() if request.sampling.ignore_eos else self._eos)

    def _enter(self, batch: list[Admission]) -> list[GenerationOutput]:
        """Give the batch its slots, fill them, and sample the first tokens."""
        start = self.rows.count
        requests = [request for admission in batch for request in admission.requests]
        states = []
        if batch[0].from_kept:  # before the prefill, which may need the spare slot for another prompt
            assert self._kept_states is not None, "a kept prompt has its last hidden state"
            own = torch.arange(start, start + len(batch[0].requests), device=self.policy.device)
            self.cache.fork(self._max_rows, own, len(batch[0].prompt))
            states.append(self._kept_states.expand(len(own), -1))
        new = [admission for admission in batch if not admission.from_kept]
        if new:
            states.append(self._prefill(new, start + len(requests) - sum(len(admission.requests) for admission in new)))
        self.rows.add(requests, [self._stops(request) for request in requests])
        self._longest = max(self._longest, *(len(admission.prompt) for admission in batch))
        self.stats.max_rows = max(self.stats.max_rows, self.rows.count)
        return self._choose(start, torch.cat(states))

    def _prefill(self, batch: list[Admission], start: int) -> Tensor:
        """One packed pass over the prompts, written to slots start.. (and the spare one); last hidden states [n, H], one per request."""
        device = self.policy.device
        lengths = [len(admission.prompt) for admission in batch]
        first_token = [0]
        for length in lengths:
            first_token.append(first_token[-1] + length)
        owner = [index for index, admission in enumerate(batch) for _ in admission.requests]  # prompt of each slot
        slots = list(range(start, start + len(owner)))
        kept = batch[-1].keep
        places = self._prompt_places(lengths, first_token, owner + [len(batch) - 1] * kept, slots + [self._max_rows] * kept)

        def store(layer: int, key: Tensor, value: Tensor) -> None:
            self.cache.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), places)

        input_ids = torch.tensor([[token for admission in batch for token in admission.prompt]], device=device)
        position_ids = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
        hidden = self.policy.hidden(input_ids, position_ids, PackedLayout.build(lengths, device, kv_sink=store))[0]
        last = torch.tensor([first_token[index + 1] - 1 for index in owner], device=device)
        self._kept_states = hidden[-1:].clone() if kept else None
        self.stats.prefill_tokens += first_token[-1]
        return hidden.index_select(0, last)

    def _prompt_places(self, lengths: list[int], first_token: list[int], owner: list[int], slots: list[int]) -> Places:
        """Every token of prompt owner[i] goes to slot slots[i], at its own position."""
        device = self.policy.device
        counts = torch.tensor([lengths[index] for index in owner])
        ends = counts.cumsum(0)
        positions = torch.arange(int(ends[-1])) - (ends - counts).repeat_interleave(counts)
        source = torch.tensor([first_token[index] for index in owner]).repeat_interleave(counts) + positions
        return Places(torch.tensor(slots).repeat_interleave(counts).to(device), positions.to(device), source.to(device))

    def _decode(self) -> list[GenerationOutput]:
        """One token for every running row."""
        count = self.rows.count
        lengths = self.rows.length[:count]
        layout = SlotLayout(self.cache, lengths, self._longest)
        hidden = self.policy.hidden(self.rows.last_token[:count, None], lengths[:, None], layout)[:, 0]
        lengths += 1
        self._longest += 1
        self.stats.decode_steps += 1
        return self._choose(0, hidden)

    def _choose(self, start: int, hidden: Tensor) -> list[GenerationOutput]:
        """Sample the next token of rows start.. from their hidden states [n, H]; those that finish by it leave."""
        finished = self.rows.choose(start, self.policy.logits(hidden), self.version())
        leaving = (finished.nonzero()[:, 0] + start).tolist()  # the one wait for the device in a step
        return self._leave(leaving) if leaving else []

    def _leave(self, leaving: list[int], aborted: bool = False) -> list[GenerationOutput]:
        """Rows go, the last rows move into their slots."""
        outputs = self.rows.outputs(leaving, "abort" if aborted else None)
        moves = self.rows.remove(leaving)
        if moves is not None:
            self.cache.move(*moves, self._longest)
        self._longest = int(self.rows.length[: self.rows.count].max()) if self.rows.count else 0
        return outputs
