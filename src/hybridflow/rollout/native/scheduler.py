"""Which waiting requests enter next: groups of one prompt, in the order in which they came.

    add ──► groups [A A A][B][C C] ──next_batch──► admissions: who enters, and which tokens of its prompt are
    to be computed now
              ▲ rows that made room                 (a prompt longer than a pass: one piece, and nobody enters
              before the last)

Waiting requests with the same prompt ids form a group, which is prefilled once. Because groups enter in
order, at most one group has entered only in part, and at most one prompt is prefilled in part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hybridflow.rollout.base import GenerationOutput, GenerationRequest
from hybridflow.rollout.native.prefixes import LEAST, Prefix

if TYPE_CHECKING:
    from hybridflow.rollout.native.rows import SavedRow


@dataclass(frozen=True, eq=False)
class Aside:
    """A row that made room for others: what it had, to go on from there."""

    row: SavedRow
    so_far: GenerationOutput


@dataclass(frozen=True, eq=False)
class Waiting:
    """A request that is to enter."""

    request: GenerationRequest
    aside: Aside | None = None

    @property
    def context(self) -> tuple[int, ...]:
        """The tokens that have to be in its slot before its next one can be sampled."""
        return self.request.prompt_token_ids + (
            () if self.aside is None else tuple(self.aside.so_far.token_ids)
        )


@dataclass(eq=False)
class _Group:
    context: tuple[int, ...]
    waiting: deque[Waiting] = field(default_factory=deque)
    computed: int = 0
    """Tokens that are in the slot of the prompt that is prefilled in pieces."""


@dataclass(frozen=True, eq=False)
class Admission:
    """What one pass does for one prompt, and the requests of it that enter by that."""

    prompt: tuple[int, ...]
    """Token ids that all of these requests share."""
    entering: list[Waiting]
    """Nobody, where the piece is not the last."""
    start: int
    """Tokens that are at hand already."""
    stop: int
    """Tokens that are there after the pass."""
    prefix: Prefix | None
    """Where the first `start` tokens are; None: in the slot of the pieces before."""
    keep: bool
    """More requests of this prompt wait: its keys and values must be kept."""

    @property
    def requests(self) -> list[GenerationRequest]:
        """Of those that enter."""
        return [one.request for one in self.entering]

    @property
    def continues(self) -> bool:
        """A piece was computed before, and is in the slot of the prompt in pieces."""
        return self.start > 0 and self.prefix is None


FreeRows = Callable[[int, Sequence[Admission], Sequence[int], Prefix | None], int]
"""From the slots that are taken, the batch so far, the next context and what is at hand of it: how many rows
of it may enter.
"""

Find = Callable[[tuple[int, ...]], Prefix | None]
"""Which beginning of a prompt is at hand."""


def _nothing(context: tuple[int, ...]) -> Prefix | None:
    return None


class Scheduler:
    """The waiting line."""

    def __init__(self, *, max_rows: int, max_batched_tokens: int) -> None:
        self.max_rows, self.max_batched_tokens = max_rows, max_batched_tokens
        self._groups: deque[_Group] = deque()
        self._by_context: dict[tuple[int, ...], _Group] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that have not entered."""
        return sum(len(group.waiting) for group in self._groups)

    @property
    def waiting(self) -> list[Waiting]:
        """Those requests, the next one first."""
        return [one for group in self._groups for one in group.waiting]

    @property
    def in_pieces(self) -> bool:
        """A prompt is prefilled in part."""
        return bool(self._groups) and self._groups[0].computed > 0

    @property
    def tokens_in_pieces(self) -> int:
        """Of the whole prompt that is prefilled in part; 0: there is none."""
        return len(self._groups[0].context) if self.in_pieces else 0

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Requests join the line: their prompt's group, or its end."""
        for request in requests:
            group = self._by_context.get(request.prompt_token_ids)
            if group is None:
                group = self._by_context[request.prompt_token_ids] = _Group(request.prompt_token_ids)
                self._groups.append(group)
            group.waiting.append(Waiting(request))

    def put_back(self, rows: Sequence[Waiting]) -> None:
        """Rows that made room are the next to enter, in this order; a prompt that was prefilled in part
        begins anew.
        """
        self.begin_anew()
        for one in reversed(rows):
            group = self._by_context.get(one.context)
            if group is None:
                group = self._by_context[one.context] = _Group(one.context)
                self._groups.appendleft(group)
            group.waiting.appendleft(one)

    def begin_anew(self) -> None:
        """What was computed of a prompt in part is gone."""
        if self._groups:
            self._groups[0].computed = 0

    def may_enter(self, running: int) -> bool:
        """Whether to admit now, with `running` rows decoding.

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
        """Take groups for one prefill pass of at most `max_batched_tokens` new tokens, while `running` rows
        decode.

        `free_rows`: how many more the memory holds.
        """
        batch: list[Admission] = []
        left, rows = self.max_batched_tokens, running
        while self._groups and left >= 0:
            group = self._groups[0]
            size = len(group.context)
            prefix = None if group.computed else find(group.context)
            free = self.max_rows - rows
            if free_rows is not None:
                room = free_rows(rows, batch, group.context, prefix)
                if room <= 0 and prefix is not None:  # what is kept of it may take more room than it saves
                    prefix, room = None, free_rows(rows, batch, group.context, None)
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

    def remove(self, request_ids: set[int]) -> list[Waiting]:
        """Take these requests out of the line and return those that were in it."""
        removed = []
        for group in self._groups:
            removed += [one for one in group.waiting if one.request.request_id in request_ids]
            group.waiting = deque(one for one in group.waiting if one.request.request_id not in request_ids)
        self._groups = deque(group for group in self._groups if group.waiting)
        self._by_context = {group.context: group for group in self._groups}
        return removed


def _worth_waiting_for(batch: Sequence[Admission], context: tuple[int, ...], start: int) -> bool:
    """A prompt that would compute twice what this pass computes, for at least half of it, enters after it."""
    if len(context) <= LEAST:
        return False
    # tokens that a prompt of the pass must share with this one, so that waiting saves half of the work or more
    wanted = max(LEAST, (len(context) + start + 1) // 2)
    beginning = context[:wanted]
    return any(one.stop >= wanted and one.prompt[:wanted] == beginning for one in batch)
