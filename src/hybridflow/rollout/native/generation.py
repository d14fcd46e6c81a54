"""Continuous batching: rows enter from the queue, get a token in each step, and leave as they finish.

    Scheduler ──admissions──► prefill (each prompt once, prefix hits copied) ──keys, values──► slots
       ▲                                                                                        │
       │ preempted rows, where memory ends                                         first tokens ▼
       └─────────────────── outputs ◄── finished rows leave, last rows move up ◄── decode [B, 1]

Row i is in slot i. A prompt in chunked prefill is in the last slot until all of it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from hybridflow.models.kv_cache import KVCache
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol.prompt import Units, token_ids_of
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, PartialOutput, RolloutStats
from hybridflow.rollout.native.graphs import GraphDecoder, decode_rows
from hybridflow.rollout.native.memory import KVMemory, Running
from hybridflow.rollout.native.prefill import Piece, compute, cut_into_passes
from hybridflow.rollout.native.prefixes import LEAST, Prefix, PrefixStore
from hybridflow.rollout.native.row_numbers import end_tokens
from hybridflow.rollout.native.rows import RowTable
from hybridflow.rollout.native.scheduler import Admission, Scheduler
from hybridflow.rollout.native.stop_text import StopTexts
from hybridflow.rollout.requests import aborted


@dataclass(frozen=True)
class Weights:
    """Version of the weights, and how often they have changed."""

    version: int
    """Version that tokens sampled with them carry."""
    state: int
    """Number of changes so far; keys and values are valid for the state that they were computed in."""


@dataclass(frozen=True)
class BatchSettings:
    """Settings of a batch: its limits, and what is reused."""

    eos_token_ids: tuple[int, ...]
    max_rows: int
    max_batched_tokens: int
    fill_first: bool
    """Prefill until every free slot has a row before the next token is decoded; else one prefill pass a step.
    """
    reuse_prefixes: bool
    keep_finished: bool
    """Keep the keys and values of finished rows as prefixes for later prompts."""
    recompute: bool
    """Compute the keys and values of running rows again when the weights change."""
    stop_texts: StopTexts | None


class Generation:
    """The rows of one session; `step` does one round of it."""

    def __init__(
        self,
        policy: PolicyModel,
        memory: KVMemory,
        settings: BatchSettings,
        *,
        weights: Callable[[], Weights],
        stats: RolloutStats,
        graphs: GraphDecoder | None = None,
    ) -> None:
        self.policy = policy
        self.memory = memory
        self.settings = settings
        self.stats = stats
        self._graphs = graphs
        self.prefixes = PrefixStore(reuse=settings.reuse_prefixes)
        self.scheduler = Scheduler(max_rows=settings.max_rows, max_batched_tokens=settings.max_batched_tokens)
        dtype = torch.promote_types(policy.dtype, torch.float32)
        self.rows = RowTable(
            0, 0, 0, policy.head.weight.shape[0], dtype, policy.device, stop_texts=settings.stop_texts
        )
        self._weights = weights
        self._seen = weights()
        # of each running request: its number, and the state of the weights of its keys
        self._entered: dict[int, tuple[int, int]] = {}
        self._num_entered = 0
        # state of the weights that computed the first piece of the prompt in pieces
        self._pieces_weights = self._seen.state
        self._longest = 0  # most tokens in any slot in use
        self._longest_ever = 0  # that any request may come to
        memory.begin(self.prefixes)

    @property
    def cache(self) -> KVCache:
        """The KV cache: slots, or blocks of each slot."""
        return self.memory.cache

    @property
    def version(self) -> int:
        """Version of the weights there are now."""
        return self._weights().version

    @property
    def _running(self) -> Running:
        return Running(self.rows.count, self._longest, self._longest_ever, self.scheduler.tokens_in_pieces)

    @property
    def done(self) -> bool:
        """Whether no request runs or waits."""
        return self.rows.count == 0 and self.scheduler.num_waiting == 0

    def so_far(self, since: Mapping[int, int]) -> list[PartialOutput]:
        """Return the tokens of running and begun requests beyond the first `since[request_id]` ones."""
        rows = [row for row, request in enumerate(self.rows.requests) if request.request_id in since]
        known = [since[self.rows.requests[row].request_id] for row in rows]
        partials = self.rows.new_tokens(rows, known)
        if len(rows) < len(since):
            waiting = [one for one in self.scheduler.waiting if one.request_id in since]
            partials += [_begun_beyond(one, since[one.request_id]) for one in waiting if one.begun]
        return partials

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Add requests to the queue."""
        self.scheduler.add(requests)
        self._longest_ever = max(self._longest_ever, *(request.most_tokens for request in requests), 0)

    @torch.no_grad()
    def step(self) -> list[GenerationOutput]:
        """Admit what may enter, decode one token for every row, and return the outputs that are finished."""
        started = perf_counter()
        self._follow_weights()
        self._drop_pieces()
        outputs = self._admit()
        if self.rows.count:
            self._preempt()
            outputs += self._decode()
        self.stats.seconds += perf_counter() - started
        return outputs

    @torch.no_grad()
    def abort(self, request_ids: set[int]) -> list[GenerationOutput]:
        """End these requests between two steps; the others go on."""
        outputs = [aborted(request) for request in self.scheduler.remove(request_ids)]
        running = [row for row, request in enumerate(self.rows.requests) if request.request_id in request_ids]
        if running:
            outputs += self._leave(running, aborted=True)
        self._drop_pieces()
        return outputs

    def close(self) -> None:
        """Free the prefixes and the cache."""
        self.prefixes.clear()
        self.cache.drop(0, self.cache.num_slots)

    def _find(self, prompt: Units) -> Prefix | None:
        """Return the longest prefix hit of a prompt, in keys and values of the weights as they are now."""
        running: dict[Units, int] = {}
        if self.settings.reuse_prefixes:
            for row, request in enumerate(self.rows.requests):
                if self._entered[request.request_id][1] == self._seen.state:
                    running[request.prompt.key] = row
        return self.prefixes.find(prompt, running)

    def _follow_weights(self) -> None:
        """Where the weights changed, drop prefixes of the old ones and, if so set, recompute running rows."""
        before = self._seen
        now = self._weights()
        self._seen = now
        if now.state == before.state:
            return
        self.prefixes.clear()
        if self.settings.recompute:
            self.scheduler.begin_anew()
            self._recompute()

    def _recompute(self) -> None:
        """Compute the keys and values of all running rows again, by the weights as they are now."""
        contexts = []
        for row, request in enumerate(self.rows.requests):
            stored = int(self.rows.generated[row]) - 1
            contexts.append(request.prompt_token_ids + tuple(self.rows.tokens[row, :stored].tolist()))
            self._entered[request.request_id] = (self._entered[request.request_id][0], self._seen.state)
        for pieces in cut_into_passes(contexts, self.settings.max_batched_tokens):
            self._compute(pieces)

    def _admit(self) -> list[GenerationOutput]:
        outputs: list[GenerationOutput] = []
        while self.scheduler.in_pieces or self.scheduler.may_enter(self.rows.count):
            batch = self.scheduler.next_batch(
                self.rows.count, partial(self.memory.free_rows, self._running), self._find
            )
            if not batch:
                break
            outputs += self._enter(batch)
            if self.scheduler.in_pieces or (self.rows.count and not self.settings.fill_first):
                break
        return outputs

    def _enter(self, batch: list[Admission]) -> list[GenerationOutput]:
        """Give the admitted requests their slots, prefill them, and sample their first tokens."""
        start = self.rows.count
        entering = [one for admission in batch for one in admission.entering]
        longest = max(self._longest, *(len(admission.prompt) for admission in batch))
        used = start + len(entering)
        slots = self.memory.rows_of(self._running.ahead(longest + 1))
        apart = self.scheduler.in_pieces or (batch[0].continues and used < min(self.settings.max_rows, slots))
        self._resize(used + int(apart), longest + 1, in_pieces=batch[0].continues)
        weights = [self._pieces_weights if admission.continues else self._seen.state for admission in batch]
        if self.scheduler.in_pieces:
            self._pieces_weights = weights[-1]
        states = self._prefill(batch, start)
        if not entering:
            return []
        self._longest = max(self._longest, *(len(one.prompt) for one in batch if one.entering))
        self._add_rows(entering, [state for one, state in zip(batch, weights) for _ in one.entering])
        for admission, own, state in zip(batch, _slots(batch, start), states):
            self._keep_prompt(admission, own, state)
        rows = [state.expand(len(one.entering), -1) for one, state in zip(batch, states) if one.entering]
        return self._choose(start, torch.cat(rows))

    def _add_rows(self, requests: Sequence[GenerationRequest], weights: Sequence[int]) -> None:
        """Add rows for requests whose contexts are in their slots; `weights` are the states of their keys."""
        eos = self.settings.eos_token_ids
        stops = [end_tokens(request.sampling, eos) for request in requests]
        self.rows.grow(self.cache.num_slots, max(request.sampling.max_tokens for request in requests))
        self.rows.add(requests, stops)
        for request, state in zip(requests, weights):
            self._entered[request.request_id] = (self._num_entered, state)
            self._num_entered += 1
        self.stats.max_rows = max(self.stats.max_rows, self.rows.count)

    def _prefill(self, batch: list[Admission], start: int) -> list[Tensor]:
        """Fill the slots of the rows from `start` on; return each admission's last hidden state [1, H]."""
        last = self.cache.num_slots - 1
        stop = start + sum(len(admission.entering) for admission in batch)
        if batch[0].continues:
            stop = min(stop, last)
        self.cache.clear(start, stop)
        if self.scheduler.in_pieces and not batch[-1].continues:
            self.cache.clear(last, last + 1)
        pieces: list[Piece] = []
        filled = [self._filled(admission, own) for admission, own in zip(batch, _slots(batch, start))]
        for admission, slots in zip(batch, filled):
            if (prefix := admission.prefix) is not None and prefix.kept is not None:
                self.cache.load(prefix.kept.copy, slots, prefix.length)
            elif prefix is not None and prefix.slot is not None:
                self.cache.fork(prefix.slot, slots, prefix.length)
            if admission.start < admission.stop:
                tokens = token_ids_of(admission.prompt[admission.start : admission.stop])
                pieces.append(Piece(tokens, admission.start, slots))
        computed = iter(self._compute(pieces))
        states = []
        for admission, own, slots in zip(batch, _slots(batch, start), filled):
            if own and slots[0] not in own:  # the slot of the pieces becomes free
                self.cache.move(slots, own[:1])
                slots = own[:1]
            if others := [slot for slot in own if slot not in slots]:
                self.cache.fork(slots[0], others, admission.stop)
            if admission.prefix is not None and admission.prefix.state is not None:
                states.append(admission.prefix.state)
            else:
                states.append(next(computed))
        return states

    def _filled(self, admission: Admission, own: list[int]) -> list[int]:
        """Return the slots that an admission fills; its other own ones are forked from the first of these."""
        if admission.continues or not own:
            return [self.cache.num_slots - 1]
        return own[:1] if self.cache.shares else own

    def _compute(self, pieces: Sequence[Piece]) -> Sequence[Tensor]:
        """Compute pieces in one pass; the last hidden state [1, H] of each."""
        if not pieces:
            return ()
        self.stats.prefill_tokens += sum(len(piece.tokens) for piece in pieces)
        states: Sequence[Tensor] = compute(self.policy, self.cache, pieces).split(1)
        return states

    def _keep_prompt(self, admission: Admission, own: list[int], state: Tensor) -> None:
        """Keep the prompt's keys and values while more requests of it wait, then release them."""
        prompt = admission.prompt
        if not admission.keep:
            self.prefixes.release(prompt)
            return
        current = bool(own) and self._entered[admission.entering[0].request_id][1] == self._seen.state
        if current and not self.prefixes.holds(prompt) and self._evict_for(len(prompt)):
            self.prefixes.keep(prompt, self.cache.read(own[0], len(prompt)), state.clone(), pinned=True)

    def _evict_for(self, num_tokens: int) -> bool:
        """Evict old prefixes so that `num_tokens` more fit beside the slots; False where they cannot fit."""
        room = self.memory.max_kept - num_tokens
        self.prefixes.shrink(max(0, room))
        return room >= 0

    def _resize(self, rows: int, length: int, *, in_pieces: bool) -> None:
        """Allocate slots for `rows` of `length` tokens; what is in the slots in use stays."""
        live = min(self.settings.max_rows, rows + self.scheduler.num_waiting)
        self.memory.fit(self._running, rows, length, live=live, in_pieces=in_pieces, prefixes=self.prefixes)

    def _preempt(self) -> None:
        """Preempt for one more token of each row: the prompt in chunked prefill first, then newest rows."""
        while not self.memory.has_next(self._running):
            if self.scheduler.in_pieces:
                self.scheduler.begin_anew()
            else:
                self._put_aside()
            self._drop_pieces()
        now = self._running
        in_pieces = self.scheduler.in_pieces
        self._resize(now.rows + int(in_pieces), max(now.longest, now.in_pieces) + 1, in_pieces=in_pieces)
        self.cache.extend(range(self.rows.count))

    def _drop_pieces(self) -> None:
        """Free the last slot where no prompt is in chunked prefill any longer."""
        if not self.scheduler.in_pieces:
            self.cache.drop(max(self.rows.count, self.cache.num_slots - 1), self.cache.num_slots)

    def _put_aside(self) -> None:
        """Preempt the row that entered last: it waits, with what it has, until there is memory again."""
        numbers = [self._entered[request.request_id][0] for request in self.rows.requests]
        row = numbers.index(max(numbers))
        so_far = self.rows.outputs([row], "abort")[0]
        self.scheduler.put_back(self.rows.requests[row].continued(so_far))
        self._remove([row])

    def _decode(self) -> list[GenerationOutput]:
        """Decode one token for every running row; return the rows that finish."""
        count = self.rows.count
        lengths = self.rows.length[:count]
        step = (self.cache, self.rows.last_token[:count], lengths, self._longest)
        if self._graphs is None:
            hidden = decode_rows(self.policy, *step)
        else:
            hidden = self._graphs(*step, slots=self.cache.num_slots - int(self.scheduler.in_pieces))
        lengths += 1
        self._longest += 1
        self.stats.decode_steps += 1
        return self._choose(0, hidden)

    def _choose(self, start: int, hidden: Tensor) -> list[GenerationOutput]:
        """Sample a token for the rows from `start` on, of hidden states [n, H]; finished ones leave."""
        self.stats.generated_tokens += self.rows.count - start
        finished = self.rows.choose(start, self.policy.logits(hidden), self._seen.version)
        leaving = (finished.nonzero()[:, 0] + start).tolist()  # the one wait for the device in a step
        return self._leave(leaving)

    def _leave(self, leaving: list[int], aborted: bool = False) -> list[GenerationOutput]:
        """Remove rows and return their outputs; keep their keys and values as prefixes where that is set."""
        if not leaving:
            return []
        outputs = self.rows.outputs(leaving, "abort" if aborted else None)
        broken = [row for row, output in zip(leaving, outputs) if output.error is not None]
        if broken:  # what is kept may be not finite either
            self.prefixes.clear()
            self.cache.wipe(broken)
        elif self.settings.keep_finished:
            for row, output in zip(leaving, outputs):
                tokens = self.rows.requests[row].prompt.key + tuple(output.token_ids[:-1])
                current = self._entered[output.request_id][1] == self._seen.state
                if current and len(tokens) >= LEAST and self._evict_for(len(tokens)):
                    self.prefixes.keep(tokens, self.cache.read(row, len(tokens)))
        self._remove(leaving)
        return outputs

    def _remove(self, rows: list[int]) -> None:
        """Remove rows; the last rows move into their slots."""
        for row in rows:
            del self._entered[self.rows.requests[row].request_id]
        count = self.rows.count
        source, destination = self.rows.remove(rows)
        if source:
            self.cache.move(source, destination)
        self.cache.drop(self.rows.count, count)
        self._longest = int(self.rows.length[: self.rows.count].max()) if self.rows.count else 0


def _slots(batch: Sequence[Admission], start: int) -> list[list[int]]:
    """Return the slots of the rows that enter with each admission, from `start` on."""
    slots = []
    for admission in batch:
        slots.append(list(range(start, start + len(admission.entering))))
        start += len(admission.entering)
    return slots


def _begun_beyond(request: GenerationRequest, start: int) -> PartialOutput:
    """Return the tokens of a waiting request that its caller does not have."""
    begun = request.begun
    top = None
    if begun.top_log_probs is not None:
        top = list(begun.top_log_probs[start:])
    return PartialOutput(
        request.request_id, start, list(begun.token_ids[start:]), list(begun.log_probs[start:]), top
    )
