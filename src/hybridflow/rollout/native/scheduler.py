"""Which waiting requests enter next: groups of one prompt, in the order in which they came.

Requests of a call with the same prompt ids form a group, which is prefilled once. Because groups enter in order, at most one
group has entered only in part; its prompt's keys and values are kept in one spare slot until its last request has entered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.rollout.base import GenerationRequest


@dataclass(frozen=True)
class Admission:
    """Requests of one prompt that enter together."""

    requests: list[GenerationRequest]
    from_kept: bool
    """The prompt was prefilled before and is in the spare slot."""
    keep: bool
    """More requests of this prompt wait: its keys and values must be in the spare slot afterwards."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids that all of these requests share."""
        return self.requests[0].prompt_token_ids


@dataclass
class _Group:
    waiting: deque[GenerationRequest]
    prefilled: bool = False


class Scheduler:
    """The waiting line of one call."""

    def __init__(self, requests: Sequence[GenerationRequest], *, max_rows: int, max_batched_tokens: int) -> None:
        self.max_rows, self.max_batched_tokens = max_rows, max_batched_tokens
        groups: dict[tuple[int, ...], _Group] = {}
        for request in requests:
            groups.setdefault(request.prompt_token_ids, _Group(deque())).waiting.append(request)
        self._groups = deque(groups.values())

    @property
    def num_waiting(self) -> int:
        """Requests that have not entered."""
        return sum(len(group.waiting) for group in self._groups)

    def may_enter(self, running: int) -> bool:
        """Whether to admit now, with `running` rows decoding.

        Rows enter in batches of a sixteenth of the slots: a prefill pass costs about as much for one prompt as for ten.
        """
        if not self._groups:
            return False
        free = self.max_rows - running
        return running == 0 or free >= max(1, self.max_rows // 16)

    def next_batch(self, free: int) -> list[Admission]:
        """Take groups for one prefill pass: at most `free` rows and `max_batched_tokens` new prompt tokens (or one longer prompt)."""
        batch: list[Admission] = []
        tokens = 0
        while self._groups and free > 0:
            group = self._groups[0]
            cost = 0 if group.prefilled else len(group.waiting[0].prompt_token_ids)
            if batch and tokens + cost > self.max_batched_tokens:
                break
            entering = [group.waiting.popleft() for _ in range(min(free, len(group.waiting)))]
            batch.append(Admission(entering, from_kept=group.prefilled, keep=bool(group.waiting)))
            group.prefilled = True
            free -= len(entering)
            tokens += cost
            if not group.waiting:
                self._groups.popleft()
        return batch

    def remove(self, request_ids: set[int]) -> list[GenerationRequest]:
        """Take these requests out of the line and return those that were in it."""
        removed = []
        for group in self._groups:
            removed += [request for request in group.waiting if request.request_id in request_ids]
            group.waiting = deque(request for request in group.waiting if request.request_id not in request_ids)
        self._groups = deque(group for group in self._groups if group.waiting)
        return removed
