"""Queue of waiting requests, in groups of one prompt, in the order in which they came.

    add ──► groups [A A A][B][C C] ──next_batch──► admissions: who enters, which tokens are computed now
              ▲
              └── preempted rows

A prompt that is longer than a pass is computed in chunks (chunked prefill), and enters with the last.
Waiting requests with the same context form a group, which is prefilled once. Because groups enter in
order, at most one group has entered only in part, and at most one prompt is in chunked prefill.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hybridflow.protocol.prompt import Units
from hybridflow.rollout.base import GenerationRequest
from hybridflow.rollout.native.prefixes import LEAST, Prefix


@dataclass(eq=False)
class _Group:
    context: Units
    waiting: deque[GenerationRequest] = field(default_factory=deque)
    computed: int = 0
    """Tokens that chunked prefill has computed so far."""


@dataclass(frozen=True, eq=False)
class Admission:
    """Part of a prefill pass: tokens of one prompt, and the requests that enter with them."""

    prompt: Units
    """Context that all of these requests share."""
    entering: list[GenerationRequest]
    """Empty where the chunk is not the prompt's last."""
    start: int
    """Tokens that are in the cache already: a prefix hit, or earlier chunks."""
    stop: int
    """Tokens that are in the cache after the pass."""
    prefix: Prefix | None
    """Prefix hit of the first `start` tokens; None: they are in the slot of the earlier chunks."""
    keep: bool
    """More requests of this prompt wait: its keys and values must be kept."""

    @property
    def continues(self) -> bool:
        """Whether an earlier chunk of the prompt was computed; it is in the last slot."""
        return self.start > 0 and self.prefix is None


FreeRows = Callable[[int, Sequence[Admission], Units, Prefix | None], int]
"""(slots in use, batch so far, next context, its prefix hit) -> number of its rows that may enter."""

Find = Callable[[Units], Prefix | None]
"""Function from a prompt to its prefix hit."""


def _nothing(context: Units) -> Prefix | None:
    return None


class Scheduler:
    """The queue."""

    def __init__(self, *, max_rows: int, max_batched_tokens: int) -> None:
        self.max_rows = max_rows
        self.max_batched_tokens = max_batched_tokens
        self._groups: deque[_Group] = deque()
        self._by_context: dict[Units, _Group] = {}

    @property
    def num_waiting(self) -> int:
        """Number of requests that have not entered."""
        return sum(len(group.waiting) for group in self._groups)

    @property
    def waiting(self) -> list[GenerationRequest]:
        """Waiting requests, the next one first."""
        return [one for group in self._groups for one in group.waiting]

    @property
    def in_pieces(self) -> bool:
        """Whether a prompt is in chunked prefill."""
        return bool(self._groups) and self._groups[0].computed > 0

    @property
    def tokens_in_pieces(self) -> int:
        """Number of tokens of the whole prompt in chunked prefill; 0: there is none."""
        if not self.in_pieces:
            return 0
        return len(self._groups[0].context)

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Add requests to their prompt's group, or to the end of the queue."""
        for request in requests:
            context = request.context
            group = self._by_context.get(context)
            if group is None:
                group = self._by_context[context] = _Group(context)
                self._groups.append(group)
            group.waiting.append(request)

    def put_back(self, request: GenerationRequest) -> None:
        """Put a preempted request at the front; a prompt in chunked prefill begins anew."""
        self.begin_anew()
        context = request.context
        group = self._by_context.get(context)
        if group is None:
            group = self._by_context[context] = _Group(context)
            self._groups.appendleft(group)
        group.waiting.appendleft(request)

    def begin_anew(self) -> None:
        """Forget the chunks that were computed of a prompt."""
        if self._groups:
            self._groups[0].computed = 0

    def may_enter(self, running: int) -> bool:
        """Return whether to admit now, with `running` rows decoding.

        Rows enter in batches of a sixteenth of the slots: a prefill pass costs about as much for one prompt
        as for ten.
        """
        if not self._groups:
            return False
        free = self.max_rows - running
        return running == 0 or free >= max(1, self.max_rows // 16)

    def next_batch(
        self, running: int, free_rows: FreeRows | None = None, find: Find = _nothing
    ) -> list[Admission]:
        """Take groups for a prefill pass of up to `max_batched_tokens` tokens, while `running` rows decode.

        `free_rows`: number of further rows that the memory holds.
        """
        batch: list[Admission] = []
        left = self.max_batched_tokens
        rows = running
        while self._groups and left >= 0:
            group = self._groups[0]
            size = len(group.context)
            prefix = None if group.computed else find(group.context)
            free = self.max_rows - rows
            if free_rows is not None:
                room = free_rows(rows, batch, group.context, prefix)
                if room <= 0 and prefix is not None:  # a prefix hit may hold more memory than it saves
                    prefix = None
                    room = free_rows(rows, batch, group.context, None)
                free = min(free, room)
            if free <= 0:
                break
            start = group.computed if prefix is None else prefix.length
            if start < size and size - start <= self.max_batched_tokens and not group.computed:
                if batch and (size - start > left or _worth_waiting_for(batch, group.context, start)):
                    break
            elif start < size and left == 0:
                break
            stop = min(size, start + left)
            if stop < size:
                if batch and batch[0].continues:  # the last slot is its own until the pass is over
                    break
                batch.append(Admission(group.context, [], start, stop, prefix, keep=False))
                group.computed = stop
                break
            if group.computed:  # its slot is the last one, and taken until the pass is over
                rows += int(free > 1)
                free = max(1, free - 1)
            entering = [group.waiting.popleft() for _ in range(min(free, len(group.waiting)))]
            batch.append(Admission(group.context, entering, start, size, prefix, keep=bool(group.waiting)))
            group.computed = 0
            rows += len(entering)
            left -= size - start
            if not group.waiting:
                del self._by_context[self._groups.popleft().context]
        return batch

    def remove(self, request_ids: set[int]) -> list[GenerationRequest]:
        """Take these requests out of the queue and return those that were in it."""
        removed = []
        for group in self._groups:
            removed += [one for one in group.waiting if one.request_id in request_ids]
            group.waiting = deque(one for one in group.waiting if one.request_id not in request_ids)
        self._groups = deque(group for group in self._groups if group.waiting)
        self._by_context = {group.context: group for group in self._groups}
        return removed


def _worth_waiting_for(batch: Sequence[Admission], context: Units, start: int) -> bool:
    """Return whether a prompt shares so much with this pass that it should enter after it."""
    if len(context) <= LEAST:
        return False
    # so much must be shared that waiting saves at least half of the work
    wanted = max(LEAST, (len(context) + start + 1) // 2)
    beginning = context[:wanted]
    return any(one.stop >= wanted and one.prompt[:wanted] == beginning for one in batch)
