"""Rows that are decoded together: they enter from the waiting line, get a token each step, and leave as they
finish.

Scheduler ──admissions──► prefill (each prompt once, what is at hand copied) ──keys, values──► slots ──► first
tokens ─┐
    ▲
    ▼
    └── free slots ◄── outputs ◄── finished rows leave, last rows move up ◄── decode: [B, 1]
    ◄─────────────────────────┘
    └── rows that make room, where longer ones would not fit

Row i is in slot i. A prompt that is prefilled in pieces is in the last slot until it has entered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from hybridflow.models.attention import PackedLayout
from hybridflow.models.chunk_layout import ChunkLayout
from hybridflow.models.kv_cache import KVCache, Places
from hybridflow.models.policy import PolicyModel
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, PartialOutput, RolloutStats
from hybridflow.rollout.native.graphs import GraphDecoder, decode_rows
from hybridflow.rollout.native.memory import KVMemory, Running
from hybridflow.rollout.native.prefixes import LEAST, Prefix, PrefixStore
from hybridflow.rollout.native.rows import RowTable, end_tokens
from hybridflow.rollout.native.scheduler import Admission, Aside, Scheduler, Waiting
from hybridflow.rollout.native.stop_text import StopTexts


@dataclass(frozen=True)
class Weights:
    """What the weights are now."""

    version: int
    """What their tokens carry."""
    state: int
    """Counts every change, so that keys and values of other weights are known as such."""


@dataclass(frozen=True)
class BatchSettings:
    """How rows share the machine."""

    eos_token_ids: tuple[int, ...]
    max_rows: int
    max_batched_tokens: int
    fill_first: bool
    """Give every free slot a row before the next token is decoded; else one prefill pass a step."""
    reuse_prefixes: bool
    keep_finished: bool
    """Rows that finished are prefixes for later prompts."""
    recompute: bool
    """When the weights change, compute the keys and values of running rows again."""
    stop_texts: StopTexts | None


@dataclass(frozen=True, eq=False)
class _Piece:
    """Tokens start.. of one row that a pass computes, for each of `slots`; the first of these has what is
    before them.
    """

    tokens: Sequence[int]
    start: int
    slots: list[int]


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
        self.policy, self.memory, self.settings, self.stats, self._graphs = (
            policy,
            memory,
            settings,
            stats,
            graphs,
        )
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
        """The slots, or the blocks of each."""
        return self.memory.cache

    @property
    def _running(self) -> Running:
        return Running(self.rows.count, self._longest, self._longest_ever, self.scheduler.tokens_in_pieces)

    @property
    def done(self) -> bool:
        """Nothing runs and nothing waits."""
        return self.rows.count == 0 and self.scheduler.num_waiting == 0

    def so_far(self, since: Mapping[int, int]) -> list[PartialOutput]:
        """Return the tokens of running and preempted requests beyond the first `since[request_id]` ones."""
        rows = [row for row, request in enumerate(self.rows.requests) if request.request_id in since]
        known = [since[self.rows.requests[row].request_id] for row in rows]
        partials = self.rows.new_tokens(rows, known) if rows else []
        if len(rows) < len(since):
            waiting = [one for one in self.scheduler.waiting if one.request.request_id in since]
            partials += [_partial(one.aside.so_far, since) for one in waiting if one.aside is not None]
        return partials

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Requests join the line."""
        self.scheduler.add(requests)
        self._longest_ever = max(
            [self._longest_ever, *(len(r.prompt_token_ids) + r.sampling.max_tokens for r in requests)]
        )

    @torch.no_grad()
    def step(self) -> list[GenerationOutput]:
        """Admit what may enter, decode one token for every row, and return the rows that finished."""
        started = perf_counter()
        self._follow_weights()
        self._drop_pieces()
        outputs = self._admit()
        if self.rows.count:
            self._make_room()
            outputs += self._decode()
        self.stats.generated_tokens += sum(len(output.token_ids) for output in outputs)
        self.stats.seconds += perf_counter() - started
        return outputs

    @torch.no_grad()
    def abort(self, request_ids: set[int]) -> list[GenerationOutput]:
        """End these requests between two steps; the others go on."""
        outputs = [_so_far(one) for one in self.scheduler.remove(request_ids)]
        running = [row for row, request in enumerate(self.rows.requests) if request.request_id in request_ids]
        if running:
            outputs += self._leave(running, aborted=True)
        self._drop_pieces()
        self.stats.generated_tokens += sum(len(output.token_ids) for output in outputs)
        return outputs

    def close(self) -> None:
        """Nothing of it is needed any longer."""
        self.prefixes.clear()
        self.cache.drop(0, self.cache.num_slots)

    def _find(self, prompt: tuple[int, ...]) -> Prefix | None:
        """Which beginning of a prompt is at hand, in keys and values of the weights as they are."""
        rows = enumerate(self.rows.requests) if self.settings.reuse_prefixes else ()
        running = {
            r.prompt_token_ids: row for row, r in rows if self._entered[r.request_id][1] == self._seen.state
        }
        return self.prefixes.find(prompt, running)

    def _follow_weights(self) -> None:
        """Where the weights changed: no key or value of the old ones is given to another row."""
        now, before = self._weights(), self._seen
        self._seen = now
        if now.state == before.state:
            return
        self.prefixes.clear()
        if self.settings.recompute:
            self.scheduler.begin_anew()
            self._recompute()

    def _recompute(self) -> None:
        """Keys and values of all running rows, by the weights as they are now."""
        passes: list[list[_Piece]] = [[]]
        left = self.settings.max_batched_tokens
        for row, request in enumerate(self.rows.requests):
            generated = int(self.rows.generated[row])
            tokens = request.prompt_token_ids + tuple(self.rows.tokens[row, : generated - 1].tolist())
            start = 0
            while start < len(tokens):
                if left == 0 or (passes[-1] and start == 0 and len(tokens) > left):
                    passes.append([])
                    left = self.settings.max_batched_tokens
                stop = min(len(tokens), start + left)
                passes[-1].append(_Piece(tokens[start:stop], start, [row]))
                left -= stop - start
                start = stop
            self._entered[request.request_id] = (self._entered[request.request_id][0], self._seen.state)
        for pieces in passes:
            if pieces:
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
        """Give the batch its slots, fill them, and sample the first tokens."""
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
        self._longest = max(
            self._longest, *(len(admission.prompt) for admission in batch if admission.entering)
        )
        self._add_rows(
            entering, [state for admission, state in zip(batch, weights) for _ in admission.entering]
        )
        for admission, own, state in zip(batch, _slots(batch, start), states):
            self._keep_prompt(admission, own, state)
        return self._choose(
            start,
            torch.cat(
                [state.expand(len(one.entering), -1) for one, state in zip(batch, states) if one.entering]
            ),
        )

    def _add_rows(self, entering: Sequence[Waiting], weights: Sequence[int]) -> None:
        """Rows for those whose prompts are in their slots, with keys of these states of the weights."""
        start = self.rows.count
        requests = [one.request for one in entering]
        eos = self.settings.eos_token_ids
        stops = [end_tokens(request.sampling, eos) for request in requests]
        self.rows.grow(self.cache.num_slots, max(request.sampling.max_tokens for request in requests))
        self.rows.add(requests, stops)
        for row, (one, state) in enumerate(zip(entering, weights), start):
            self._entered[one.request.request_id] = (self._num_entered, state)
            self._num_entered += 1
            if one.aside is not None:
                self.rows.restore(row, one.aside.row)
        self.stats.max_rows = max(self.stats.max_rows, self.rows.count)

    def _prefill(self, batch: list[Admission], start: int) -> list[Tensor]:
        """Fill the slots of the rows from `start` on; the last hidden state [1, H] of each admission."""
        last = self.cache.num_slots - 1
        stop = start + sum(len(admission.entering) for admission in batch)
        self.cache.clear(start, min(stop, last) if batch[0].continues else stop)
        if self.scheduler.in_pieces and not batch[-1].continues:
            self.cache.clear(last, last + 1)
        pieces: list[_Piece] = []
        filled = [self._filled(admission, own) for admission, own in zip(batch, _slots(batch, start))]
        for admission, slots in zip(batch, filled):
            if (prefix := admission.prefix) is not None and prefix.kept is not None:
                self.cache.load(prefix.kept.copy, slots, prefix.length)
            elif prefix is not None and prefix.slot is not None:
                self.cache.fork(prefix.slot, slots, prefix.length)
            if admission.start < admission.stop:
                pieces.append(
                    _Piece(admission.prompt[admission.start : admission.stop], admission.start, slots)
                )
        computed, states = iter(self._compute(pieces).split(1) if pieces else ()), []
        for admission, own, slots in zip(batch, _slots(batch, start), filled):
            if own and slots[0] not in own:  # the slot of the pieces becomes free
                self.cache.move(slots, own[:1])
                slots = own[:1]
            if others := [slot for slot in own if slot not in slots]:
                self.cache.fork(slots[0], others, admission.stop)
            kept = None if admission.prefix is None else admission.prefix.state
            states.append(next(computed) if kept is None else kept)
        return states

    def _filled(self, admission: Admission, own: list[int]) -> list[int]:
        """Slots that get what is at hand and what is computed; the others of its `own` get it from the first
        of these.
        """
        if admission.continues or not own:
            return [self.cache.num_slots - 1]
        return own[:1] if self.cache.shares else own

    def _compute(self, pieces: Sequence[_Piece]) -> Tensor:
        """One packed pass over pieces, whose keys and values go to their slots; last hidden state [n, H] of
        each.
        """
        device = self.policy.device
        lengths, starts = [len(piece.tokens) for piece in pieces], [piece.start for piece in pieces]
        for piece in pieces:
            self.cache.extend(piece.slots, piece.start + len(piece.tokens))
        places = Places.of_pieces(lengths, starts, [piece.slots for piece in pieces], device)
        layout: PackedLayout | ChunkLayout
        if any(starts):
            layout = ChunkLayout(self.cache, [piece.slots[0] for piece in pieces], starts, lengths, places)
        else:

            def store(layer: int, key: Tensor, value: Tensor) -> None:
                self.cache.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), places)

            layout = PackedLayout.build(lengths, device, kv_sink=store)
        input_ids = torch.tensor([[token for piece in pieces for token in piece.tokens]], device=device)
        position_ids = torch.cat(
            [torch.arange(start, start + length) for start, length in zip(starts, lengths)]
        )[None].to(device)
        hidden = self.policy.hidden(input_ids, position_ids, layout)[0]
        self.stats.prefill_tokens += len(hidden)
        return hidden.index_select(0, torch.tensor(lengths, device=device).cumsum(0) - 1)

    def _keep_prompt(self, admission: Admission, own: list[int], state: Tensor) -> None:
        """Keep the prompt where more requests of it wait, and let it go where none does."""
        prompt = admission.prompt
        if not admission.keep:
            self.prefixes.release(prompt)
            return
        current = bool(own) and self._entered[admission.requests[0].request_id][1] == self._seen.state
        if current and not self.prefixes.holds(prompt) and self._makes_room_for(len(prompt)):
            self.prefixes.keep(prompt, self.cache.read(own[0], len(prompt)), state.clone(), pinned=True)

    def _makes_room_for(self, num_tokens: int) -> bool:
        """Whether so many tokens more can be kept beside the slots; older ones go for them."""
        room = self.memory.max_kept - num_tokens
        self.prefixes.shrink(max(0, room))
        return room >= 0

    def _resize(self, rows: int, length: int, *, in_pieces: bool) -> None:
        """See that there are slots for `rows` of `length` tokens; the rows and the prompt `in_pieces` stay."""
        live = min(self.settings.max_rows, rows + self.scheduler.num_waiting)
        self.memory.fit(self._running, rows, length, live=live, in_pieces=in_pieces, prefixes=self.prefixes)

    def _make_room(self) -> None:
        """See that each row has room for one more token: if there is none, the prompt in pieces begins anew,
        then the newest rows leave.
        """
        while not self.memory.has_next(self._running):
            if self.scheduler.in_pieces:
                self.scheduler.begin_anew()
            else:
                self._put_aside()
            self._drop_pieces()
        now, in_pieces = self._running, self.scheduler.in_pieces
        self._resize(now.rows + int(in_pieces), max(now.longest, now.in_pieces) + 1, in_pieces=in_pieces)
        self.cache.extend(range(self.rows.count))

    def _drop_pieces(self) -> None:
        """Where no prompt is in pieces any longer, nothing is in their slot."""
        if not self.scheduler.in_pieces:
            self.cache.drop(max(self.rows.count, self.cache.num_slots - 1), self.cache.num_slots)

    def _put_aside(self) -> None:
        """The row that entered last waits, with what it has, until there is room again."""
        row = max(
            range(self.rows.count), key=lambda row: self._entered[self.rows.requests[row].request_id][0]
        )
        aside = Aside(self.rows.copy_of(row), self.rows.outputs([row], "abort")[0])
        self.scheduler.put_back([Waiting(self.rows.requests[row], aside)])
        self._remove([row])

    def _decode(self) -> list[GenerationOutput]:
        """One token for every running row."""
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
        """Sample the next token of rows start.. from their hidden states [n, H]; those that finish by it
        leave.
        """
        finished = self.rows.choose(start, self.policy.logits(hidden), self._seen.version)
        leaving = (finished.nonzero()[:, 0] + start).tolist()  # the one wait for the device in a step
        return self._leave(leaving) if leaving else []

    def _leave(self, leaving: list[int], aborted: bool = False) -> list[GenerationOutput]:
        """Rows go with what they came to."""
        outputs = self.rows.outputs(leaving, "abort" if aborted else None)
        broken = [row for row, output in zip(leaving, outputs) if output.error is not None]
        if broken:  # what is kept may be not finite either
            self.prefixes.clear()
            self.cache.wipe(broken)
        elif self.settings.keep_finished:
            for row, output in zip(leaving, outputs):
                tokens = self.rows.requests[row].prompt_token_ids + tuple(output.token_ids[:-1])
                current = self._entered[output.request_id][1] == self._seen.state
                if current and len(tokens) >= LEAST and self._makes_room_for(len(tokens)):
                    self.prefixes.keep(tokens, self.cache.read(row, len(tokens)))
        self._remove(leaving)
        return outputs

    def _remove(self, rows: list[int]) -> None:
        """The last rows move into the slots of those that go."""
        for row in rows:
            del self._entered[self.rows.requests[row].request_id]
        count = self.rows.count
        source, destination = self.rows.remove(rows)
        if source:
            self.cache.move(source, destination)
        self.cache.drop(self.rows.count, count)
        self._longest = int(self.rows.length[: self.rows.count].max()) if self.rows.count else 0


def _slots(batch: Sequence[Admission], start: int) -> list[list[int]]:
    """Slots of the rows that enter with each admission, from `start` on."""
    slots = []
    for admission in batch:
        slots.append(list(range(start, start + len(admission.entering))))
        start += len(admission.entering)
    return slots


def _partial(output: GenerationOutput, since: Mapping[int, int]) -> PartialOutput:
    """Return the tokens of a preempted request that its caller does not have."""
    number = output.request_id
    start = since[number]
    top = output.top_log_probs and output.top_log_probs[start:]
    return PartialOutput(number, start, output.token_ids[start:], output.log_probs[start:], top)


def _so_far(waiting: Waiting) -> GenerationOutput:
    """What a request in the line has: nothing, or what it had when it made room."""
    return (
        GenerationOutput(waiting.request.request_id, [], [], "abort", [])
        if waiting.aside is None
        else waiting.aside.so_far
    )
