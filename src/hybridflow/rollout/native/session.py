"""A session of the native engine: requests join at any time, are decoded together, and leave as they finish.

    add ──► Scheduler ──admissions──► prefill (each context once) ──► cache ──► first tokens
               ▲                                                                    │
               │ preempted rows, where memory ends                                  ▼
               └──────────── outputs ◄── finished rows leave ◄──────── decode, a token for each row

Row i of the table is row i of the cache. A row whose prompt is in chunked prefill is the last one, and does
not decode until all of it is computed.

With look-ahead, for devices that work beside the host, the tokens of a step are the input of the next one
before the host has seen them: it looks at them while the next step runs. A row that ends is found one step
late. What that step computed of it is forgotten, and the other rows do not depend on it. A row whose most
probable tokens did not suffice for its top-p is found late too: it is taken back to what the host knows and
decodes that token again, which is then drawn of the whole vocabulary, by the same random number.

With drafts a step may give a row several tokens: those that `Drafter` proposes are verified in one pass.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridflow.distributed.process_group import ReplicaRanks
from hybridflow.distributed.transfers import to_device
from hybridflow.errors import RolloutError
from hybridflow.models.cache import kv_cache
from hybridflow.models.cache.kv_cache import KVCache
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol.prompt import token_ids_of
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, PartialOutput, RolloutStats
from hybridflow.rollout.native.drafts import Drafter, DraftSettings
from hybridflow.rollout.native.graphs import GraphDecoder, GraphSampler
from hybridflow.rollout.native.prefixes import PREFIX_BLOCK, Prefix, PrefixCache
from hybridflow.rollout.native.responses import Choice, Row, StopTexts, begun_beyond
from hybridflow.rollout.native.rows import RowTable
from hybridflow.rollout.native.scheduler import Admission, Scheduler
from hybridflow.rollout.native.step import Span, add_routes, decode_rows, least_verified, prefill, verify_rows
from hybridflow.rollout.session_engine import aborted, check_ids, sort_out


class Weights(NamedTuple):
    """Version of the weights, and how often they have changed."""

    version: int
    """Version that tokens sampled with them carry."""
    state: int
    """Number of changes so far; keys and values are valid for the state that they were computed in."""


@dataclass(frozen=True)
class SessionSettings:
    """Limits of a session, and what is reused."""

    eos_token_ids: tuple[int, ...]
    max_rows: int
    max_batched_tokens: int
    closed: bool
    """No more requests will join: prefill until no more rows fit before the next token is decoded. Else there
    is one prefill pass a step, and finished rows are kept as prefixes for later prompts.
    """
    share_prefixes: bool
    """Share what prompts have in common; else only equal prompts share, and none is kept."""
    recompute: bool
    """Compute the keys and values of running rows again when the weights change."""
    stop_texts: StopTexts | None
    look_ahead: bool
    """Begin a step before the host has seen the tokens of the one before: never with drafts."""
    drafts: DraftSettings | None = None
    """How much is drafted; None: nothing."""


class Session:
    """Session of a native engine, called by one thread at a time; the module is in eval mode until `close`.

    Weights may change between two steps: tokens sampled from then on carry the new version.
    """

    def __init__(
        self,
        policy: PolicyModel,
        cache: KVCache,
        settings: SessionSettings,
        *,
        weights: Callable[[], Weights],
        stats: RolloutStats,
        graphs: GraphDecoder | None,
        sampler: GraphSampler | None,
        replica: ReplicaRanks,
        problem: Callable[[GenerationRequest], str | None],
        closed: Callable[[bool], None],
    ) -> None:
        """`problem` is asked of each request that joins. `closed` is called at the end, with whether there
        were values that are not finite.
        """
        self.policy = policy
        self.cache = cache
        self.settings = settings
        self.prefixes = PrefixCache(share_parts=settings.share_prefixes)
        self.scheduler = Scheduler(max_rows=settings.max_rows, max_batched_tokens=settings.max_batched_tokens)
        self.rows = RowTable(
            policy.head.weight.shape[0],
            settings.eos_token_ids,
            torch.promote_types(policy.dtype, torch.float32),
            policy.device,
            stop_texts=settings.stop_texts,
        )
        self._weights = weights
        self._seen = weights()
        self._stats = stats
        self._graphs = graphs
        self._sampler = sampler if settings.look_ahead else None
        self._replica = replica
        self._problem = problem
        self._closed = closed
        self._open = True
        self._broken = False
        self._live: set[int] = set()
        self._tokens = 0  # a hash of all tokens that were returned
        self._choices: deque[Choice] = deque()  # that the host has not seen
        self._finished: list[GenerationOutput] = []  # that no caller has got
        self._partial: Admission | None = None  # the newest chunk of the last row, in chunked prefill
        self._others_next = False  # whether prompts of one pass enter before its next chunk
        self._preempted: set[int] = set()  # ids of requests, of which some may have finished
        self._longest_ever = 0  # most tokens that any request may come to
        self._drafter = None if settings.drafts is None else Drafter(settings.drafts, policy.device.type)
        cache.kept = self.prefixes
        self._training = [module for module in policy.modules() if module.training]
        policy.eval()  # no dropout: log-probs must be those of the policy

    @property
    def policy_version(self) -> int:
        """Version that tokens carry which are sampled now."""
        return self._weights().version

    @property
    def num_running(self) -> int:
        """Number of requests that get a token in each step."""
        return self.rows.decoding

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait, with preempted ones and the one in chunked prefill."""
        return self.scheduler.num_waiting + int(self.rows.partial)

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits."""
        return not (self.rows.count or self.scheduler.num_waiting or self._finished)

    def add(self, requests: Iterable[GenerationRequest]) -> list[GenerationOutput]:
        """Add requests for the next step; those that cannot be served come back now, with reason "error".

        RolloutError for a request id that is in use, and when closed; then none of them has joined.
        """
        self._check_open()
        requests = list(requests)
        check_ids(requests, self._live)
        good, outputs = sort_out(requests, self._problem)
        self._live |= {request.request_id for request in good}
        self.scheduler.add(good)
        self._longest_ever = max(self._longest_ever, *(request.most_tokens for request in good), 0)
        return outputs

    @torch.inference_mode()
    def step(self) -> list[GenerationOutput]:
        """Admit requests, prefill up to the token budget, decode a token for each row; return what finished.

        Ranks of a replica call it together.
        """
        self._check_open()
        if self.idle:
            return []
        started = perf_counter()
        self._follow_weights()
        if self._choices and self.rows.exhausted:
            self._look()
        self._admit()
        if self.rows.decoding and self._make_room():
            self._decode()
        outputs = self._finished
        self._finished = []
        for output in outputs:
            self._live.remove(output.request_id)
            self._tokens += hash((output.request_id, *output.token_ids))
        if outputs and self.idle:
            self._replica.check_same(self._tokens)
        self._stats.seconds += perf_counter() - started
        return outputs

    @torch.inference_mode()
    def abort(self, request_ids: Iterable[int]) -> list[GenerationOutput]:
        """End these requests, unknown ones aside; return their partial responses, with reason "abort"."""
        ending = set(request_ids)
        outputs = [aborted(request) for request in self.scheduler.remove(ending)]
        self._look()
        outputs += [output for output in self._finished if output.request_id in ending]
        self._finished = [output for output in self._finished if output.request_id not in ending]
        running = [row for row in self.rows.rows if row.request.request_id in ending]
        outputs += self._leave(running, aborted=True)
        self._live -= {output.request_id for output in outputs}
        return outputs

    def so_far(self, since: Mapping[int, int]) -> list[PartialOutput]:
        """Return what begun requests have beyond the first `since[request_id]` tokens of the caller.

        With look-ahead the newest token is not among them.
        """
        rows = [row for row in self.rows.rows if row.request.request_id in since]
        partials = [self.rows.responses.new_tokens(row, since[row.request.request_id]) for row in rows]
        if len(rows) < len(since):
            waiting = [one for one in self.scheduler.waiting if one.request_id in since]
            partials += [begun_beyond(one, since[one.request_id]) for one in waiting if one.partial_response]
        return partials

    @torch.inference_mode()
    def close(self) -> None:
        """Drop running requests, and release the engine for other uses. A repeated call does nothing."""
        if not self._open:
            return
        self._open = False
        self._choices.clear()
        for module in self._training:
            module.training = True
        self.prefixes.clear()
        self.cache.drop(range(self.rows.count))
        self.cache.kept = None
        self._closed(self._broken)

    def _check_open(self) -> None:
        if not self._open:
            raise RolloutError("this session is closed: open another one")

    def _follow_weights(self) -> None:
        """Where the weights changed, drop the prefixes, and preempt rows whose keys are to be computed again.

        A prompt in chunked prefill, which has no token yet, restarts in any case.
        """
        before = self._seen
        self._seen = self._weights()
        if self._seen.state == before.state:
            return
        self._look()
        self.prefixes.clear()
        if self.rows.partial:
            self._preempt(self.rows.count - 1)
        while self.settings.recompute and self.rows.count:
            self._preempt()

    def _admit(self) -> None:
        """Prefill, in one or more passes; a prompt in chunked prefill gives way to rows that have grown.

        Passes with a chunk take turns with passes of the prompts that have come meanwhile, so that a long
        prompt holds up no others. One that was preempted lets none pass: where memory is short, those that
        come would drive out all that wait, again and again.
        """
        count = self.rows.count
        if self._partial is not None and not self._grow(count, count, self._longest + 1):
            self._stats.preemptions += 1
            self._preempt(count - 1)
        while self._partial or self.scheduler.may_enter(self.rows.count):
            batch: list[Admission] = []
            lets_others_pass = self._partial is not None and self._others_next
            if lets_others_pass and self.rows.rows[-1].request.request_id in self._preempted:
                lets_others_pass = False
            if lets_others_pass and self.scheduler.may_enter(self.rows.count):
                batch = self._next_batch(None)
            between = bool(batch)
            if not between:
                batch = self._next_batch(self._partial)
            if not batch:
                break
            self._others_next = not between
            self._enter(batch, goes_on=self._partial is not None and not between)
            if self._partial or (self.rows.count and not self.settings.closed):
                break

    def _next_batch(self, partial: Admission | None) -> list[Admission]:
        """Return the next prefill pass, which begins with a chunk of `partial`."""
        self.cache.plan(self.rows.count, self._ahead(self._longest + 1))
        return self.scheduler.next_batch(
            self.rows.count, self.prefixes.find, self._fitting, partial, chunks=partial is self._partial
        )

    @property
    def _longest(self) -> int:
        """Most tokens that a row has in the cache, or will have once its prompt is computed."""
        if self._partial is None:
            return self.rows.longest
        return max(self.rows.longest, len(self._partial.context))

    def _fitting(self, count: int, length: int, prefix: Prefix | None, shared: int) -> int:
        """Return how many of `count` rows fit into memory, with some tokens more, so that they may stay."""
        source = None if prefix is None else self._source(prefix)
        return self.cache.admit(count, length, self._ahead(length + 1), source, shared)

    def _ahead(self, length: int) -> int:
        return max(length, min(length + kv_cache.AHEAD, self._longest_ever))

    def _source(self, prefix: Prefix) -> int | kv_cache.RowCopy:
        if prefix.copy is not None:
            return prefix.copy
        return next(i for i, row in enumerate(self.rows.rows) if row.prefix is prefix)

    def _enter(self, batch: Sequence[Admission], *, goes_on: bool) -> None:
        """Prefill a pass, give rows to those who enter with it, and sample first tokens of whole contexts.

        The pass begins with a chunk of the last row where that `goes_on`; else a prompt in chunked prefill
        waits, and its row stays the last one.
        """
        running = self.rows.count
        waits = self._partial is not None and not goes_on
        first = running - int(self._partial is not None)
        new = batch[int(goes_on) :]
        requests = [request for one in new for request in one.requests]
        longest = max(self._longest, *(len(one.context) for one in batch))
        # copies that are evicted meanwhile live until they are read
        sources = [None if one.prefix is None else self._source(one.prefix) for one in batch]
        fits = self._grow(running, running + len(requests), longest + 1)
        assert fits, f"{len(requests)} rows were admitted, but they do not fit"
        if new:
            self.rows.add(requests, self.cache.num_slots)
            hits = [one.prefix for one in new for _ in one.requests]
            for entered, hit in zip(self.rows.rows[running:], hits, strict=True):
                entered.hit = hit
        if waits:
            last = self.rows.count - 1
            self.rows.move_to_end(first)
            self.cache.move([first, last], [last, first])
        spans = []
        row = first
        for source, one in zip(sources, batch):
            if source is not None:
                self.cache.copy(source, [row], one.start)
            tokens = token_ids_of(one.context[one.start : one.stop])
            spans.append(Span(row, one.start, tokens, one.requests[0].prompt.media))
            row += len(one.requests)
        del source, sources
        for span, one in zip(spans, batch):
            fits = self.cache.extend([span.row], len(one.context))
            assert fits, f"row {span.row} was admitted, but its {len(one.context)} tokens do not fit"
        states = prefill(self.policy, self.cache, spans)
        self._stats.prefill_tokens += sum(len(span.tokens) for span in spans)
        self._stats.requests += len(requests)
        self._stats.prompt_tokens += sum(len(one.context) * len(one.requests) for one in new)
        others = [range(span.row + 1, span.row + len(one.requests)) for span, one in zip(spans, batch)]
        groups = zip(spans, others, batch)
        self.cache.fork([(span.row, rows, one.stop) for span, rows, one in groups if rows])
        for end in (0, -1):  # those that may be chunks
            # by `fill_`: CUDA would wait for a number that is put into a place of a tensor
            self.rows.length[spans[end].row].fill_(batch[end].stop)
        if not waits:
            self._partial = None if batch[-1].whole else batch[-1]
        self.rows.partial = self._partial is not None
        self._choose_first(first, batch, states)

    def _choose_first(self, first: int, batch: Sequence[Admission], states: Tensor) -> None:
        """Sample a token for the rows from `first` on, by the last state [n, H] of each of their contexts."""
        whole = [one for one in batch if one.whole]
        if not whole:
            return
        row = first
        for one in whole:
            prefix = self.prefixes.add(one.context, rows=len(one.requests))
            for entered in self.rows.rows[row : row + len(one.requests)]:
                entered.prefix = prefix
            row += len(one.requests)
        self._stats.max_rows = max(self._stats.max_rows, self.rows.decoding)
        if row - first > len(whole):
            index = [place for place, one in enumerate(whole) for _ in one.requests]
            states = states.index_select(0, to_device(index, states.device))
        logits = self.policy.logits(states[: row - first])
        # not ahead: a prompt's last token, whose keys others share, is not decoded again
        self._add(self.rows.choose(first, logits, self._seen.version))

    def _grow(self, running: int, rows: int, length: int) -> bool:
        """Make room for rows of up to `length` tokens, and for drafts behind them as long as memory lasts."""
        live = min(self.settings.max_rows, rows + self.scheduler.num_waiting)
        lengths = [length]
        if self._drafter is not None:
            lengths.insert(0, max(length, min(length + self._drafter.most, self._longest_ever)))
        longest = self._longest_ever
        return any(self.cache.grow(running, rows, each, live=live, longest=longest) for each in lengths)

    def _make_room(self) -> bool:
        """Make room for one more token of each row, and return whether there are any rows.

        Where memory ends, rows that have ended leave, and then the newest rows are preempted.
        """
        while self.rows.decoding and not (
            self._grow(self.rows.count, self.rows.count, self._longest + 1)
            and self.cache.advance(self.rows.decoding)
        ):
            if not self._look():
                self._stats.preemptions += 1
                self._preempt()
        return self.rows.decoding > 0

    def _preempt(self, row: int | None = None) -> None:
        """Preempt a row, by default the one that entered last: its request goes to the front of the queue,
        with what it has.
        """
        if row is None:
            row = max(range(self.rows.count), key=lambda i: self.rows.rows[i].number)
        self.prefixes.release(self.rows.rows[row].prefix)
        self._preempted &= self._live
        self._preempted.add(self.rows.rows[row].request.request_id)
        so_far = self.rows.outputs([row], "abort")[0]
        self.scheduler.put_back(self.rows.rows[row].request.continued(so_far))
        self._remove([row])

    def _decode(self) -> None:
        """Decode one token for every decoding row, or those that are right of what was drafted."""
        drafts = self._drafts()
        if any(drafts):
            self._verify(drafts)
            return
        count = self.rows.decoding
        tokens = self.rows.last_token[:count]
        lengths = self.rows.length[:count]
        longest = self.rows.longest
        shifts = None
        if self.policy.vision is not None:
            shifts = self.rows.shift[:count]
        if self._graphs is None:
            hidden = decode_rows(self.policy, self.cache, tokens, lengths, longest, None, shifts)
        else:
            hidden = self._graphs(self.cache, tokens, self.rows.length[: self.rows.count], longest, shifts)
        lengths += 1
        self._stats.decode_steps += 1
        logits = self.policy.logits(hidden)
        facts = None
        if self._sampler is not None:
            facts = self._sampler(self.rows, logits)
        version = self._seen.version
        if facts is None:
            self._add(self.rows.choose(0, logits, version, ahead=self.settings.look_ahead))
        else:
            self._add(self.rows.chosen(facts, version))

    def _drafts(self) -> list[list[int]]:
        """Return what is drafted for each decoding row, and has memory; nothing without drafts."""
        if self._drafter is None:
            return []
        count = self.rows.decoding
        room = np.minimum(self.rows.tokens_left, self.cache.capacity - self.rows.lengths) - 1
        plain = count if self.policy.exact is None else self.policy.exact.num_rows(count)
        least = max(plain, least_verified(self.policy.device.type))
        rows = self.rows.rows[:count]
        drafts = self._drafter.propose(rows, self.rows.responses, room.tolist(), plain, least)
        lengths = self.rows.lengths + 1
        for row, draft in enumerate(drafts):
            if draft and not self.cache.extend([row], int(lengths[row]) + len(draft)):
                draft.clear()
        return drafts

    def _verify(self, drafts: Sequence[Sequence[int]]) -> None:
        """Give every decoding row the tokens that were drafted for it and are right, and one more."""
        counts = [1 + len(draft) for draft in drafts]
        rows = self.rows.rows[: len(drafts)]
        newest = map(self.rows.responses.newest, rows)
        flat = [token for first, draft in zip(newest, drafts) for token in (first, *draft)]
        tokens = to_device(flat, self.policy.device)
        shifts = None
        if self.policy.vision is not None:
            shifts = self.rows.shift
        hidden = verify_rows(self.policy, self.cache, tokens, self.rows.lengths.tolist(), counts, shifts)
        self._stats.decode_steps += 1
        choices = self.rows.verify(tokens, drafts, self.policy.logits(hidden), self._seen.version)
        right = Counter(row for choice in choices[1:] for row in choice.rows)
        assert self._drafter is not None, "something was drafted"
        for row, draft in zip(rows, drafts):
            self._drafter.learn(row, len(draft), right[row])
        wrong = [len(draft) - right[row] for row, draft in zip(rows, drafts)]
        self.cache.take_back(range(len(drafts)), wrong)
        self._stats.draft_tokens += sum(map(len, drafts))
        self._stats.accepted_draft_tokens += sum(right.values())
        self._choices += choices
        self._look()

    def _add(self, choice: Choice) -> None:
        self._choices.append(choice)
        self._look(behind=int(self.settings.look_ahead))

    def _look(self, behind: int = 0) -> bool:
        """Take the tokens that the host has not seen, but those of the newest `behind` steps.

        Rows that they end leave, and those that fell short are taken back. Returns whether any left.
        """
        left = False
        while len(self._choices) > behind:
            choice = self._choices.popleft()
            leaving = self.rows.responses.take(choice)
            self._stats.generated_tokens += len(choice.rows)
            if choice.short:
                self._take_back(choice.short)
            self._finished += self._leave(leaving)
            left = left or bool(leaving)
        return left

    def _take_back(self, rows: Sequence[Row]) -> None:
        """Set rows back to the tokens that the host knows; later tokens are discarded."""
        for choice in self._choices:
            choice.forget(set(rows))
        self.cache.take_back(*self.rows.take_back(rows))

    def _leave(self, rows: Sequence[Row], aborted: bool = False) -> list[GenerationOutput]:
        """Remove rows and return their outputs; keep what later prompts may share."""
        if not rows:
            return []
        leaving = set(rows)
        for choice in self._choices:
            choice.forget(leaving)
        places = [place for place, row in enumerate(self.rows.rows) if row in leaving]
        outputs = self.rows.outputs(places, "abort" if aborted else None)
        outputs = add_routes(self.cache, places, [self.rows.rows[place] for place in places], outputs)
        broken = [place for place in places if self.rows.rows[place].broken]
        if broken:  # what is kept may be not finite either
            self._broken = True
            self.prefixes.clear()
            self.cache.wipe(broken)
        for place, output in zip(places, outputs):
            self._keep(place, self.rows.rows[place], output)
        self._remove(places)
        return outputs

    def _keep(self, number: int, row: Row, output: GenerationOutput) -> None:
        """Keep a copy of a leaving row: all of it where that is set, else a context that others wait for."""
        context = row.prefix
        if not self.prefixes.release(context):  # its keys are of other weights, or not finite
            return
        assert context is not None
        units = row.request.prompt.key + tuple(output.token_ids[:-1])
        keeps_finished = self.settings.share_prefixes and not self.settings.closed
        if not keeps_finished or len(units) < PREFIX_BLOCK:
            units = context.units
            if context.rows or not self.scheduler.awaits(units):
                return
        copy = self.cache.read(number, len(units))
        if copy is None:
            return
        self.prefixes.add(units, copy)
        if row.hit is not None and row.hit.copy is not None and units[: len(row.hit.units)] == row.hit.units:
            self.prefixes.remove(row.hit)  # the new one has all of it

    def _remove(self, rows: list[int]) -> None:
        """Remove rows; the last rows move to their places."""
        count = self.rows.count
        source, destination = self.rows.remove(rows)
        if source:
            self.cache.move(source, destination)
        self.cache.drop(range(self.rows.count, count))
        if not self.rows.partial:
            self._partial = None
