"""Queue of waiting requests, in groups of one context, in the order in which they came.

    add ──► groups [A A A][B][C C] ──next_batch──► admissions: who enters, which tokens are computed now
              ▲
              └── preempted rows, with what they have (`partial_response`)

Waiting requests with the same context form a group, which is prefilled once. A prompt that is longer than a
pass is computed in chunks (chunked prefill): one of its requests is a row from the first chunk on, and the
others share that row's prefix when it is done. At most one row is so: between its chunks prompts that need a
single pass may enter, and other long ones wait.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridflow.protocol.prompt import Units
from hybridflow.rollout.base import GenerationRequest
from hybridflow.rollout.native.prefixes import PREFIX_BLOCK, Prefix


@dataclass(frozen=True, eq=False)
class Admission:
    """Part of a prefill pass: a span of one context, and the requests whose rows have it."""

    context: Units
    requests: list[GenerationRequest]
    start: int
    """Tokens that are in the cache already: a prefix hit, or earlier chunks."""
    stop: int
    """Tokens that are in the cache after the pass."""
    prefix: Prefix | None = None
    """Prefix hit, which has the first `start` tokens."""

    @property
    def whole(self) -> bool:
        """Whether the context ends with this span, so that tokens follow."""
        return self.stop == len(self.context)

    def chunk(self, budget: int) -> Admission:
        """Return the next chunk of the context, of at most `budget` tokens."""
        stop = min(len(self.context), self.stop + budget)
        return Admission(self.context, self.requests, self.stop, stop)


Find = Callable[[Units], tuple[Prefix | None, int]]
"""Context -> its longest prefix hit, and the hit's length."""
Fitting = Callable[[int, int, Prefix | None, int], int]
"""(rows, length of their context, their prefix hit and its length) -> number of them that fit."""


def _nothing(context: Units) -> tuple[Prefix | None, int]:
    return None, 0


class Scheduler:
    """The queue."""

    def __init__(self, *, max_rows: int, max_batched_tokens: int) -> None:
        self.max_rows = max_rows
        self.max_batched_tokens = max_batched_tokens
        self.num_waiting = 0
        """Number of requests that have not entered."""
        self._groups: OrderedDict[Units, deque[GenerationRequest]] = OrderedDict()

    @property
    def waiting(self) -> list[GenerationRequest]:
        """Waiting requests, the next one first."""
        return [request for group in self._groups.values() for request in group]

    def awaits(self, context: Units) -> bool:
        """Return whether a request with this context waits."""
        return context in self._groups

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Add requests to their context's group, or to the end of the queue."""
        self.num_waiting += len(requests)
        for request in requests:
            self._groups.setdefault(request.context, deque()).append(request)

    def put_back(self, request: GenerationRequest) -> None:
        """Put a preempted request, with its partial response, at the front."""
        self.num_waiting += 1
        context = request.context
        if context in self._groups:
            self._groups[context].appendleft(request)
        else:
            self._groups[context] = deque([request])
            self._groups.move_to_end(context, last=False)

    def may_enter(self, running: int) -> bool:
        """Return whether to admit now, beside `running` rows.

        Rows enter in batches of a sixteenth of the most: a prefill pass costs about as much for one prompt as
        for ten.
        """
        if not self._groups:
            return False
        free = self.max_rows - running
        return running == 0 or free >= max(1, self.max_rows // 16)

    def next_batch(
        self,
        running: int,
        find: Find,
        fitting: Fitting,
        partial: Admission | None = None,
        *,
        chunks: bool = True,
    ) -> list[Admission]:
        """Take groups for a prefill pass of up to `max_batched_tokens` tokens, beside `running` rows.

        The pass begins with the next chunk of `partial`, whose row is one of them. Without `chunks` prompts
        that are longer than a pass are passed over.
        """
        left = self.max_batched_tokens
        rows = running
        batch: list[Admission] = []
        if partial is not None:
            batch.append(partial.chunk(left))
            left -= batch[0].stop - batch[0].start
        for context, group in list(self._groups.items()):
            if rows >= self.max_rows or left <= 0:
                break
            prefix, start = find(context)
            missing = len(context) - start
            in_chunks = missing > self.max_batched_tokens
            if in_chunks and not chunks:
                continue
            if batch and ((missing > left and not in_chunks) or _worth_waiting_for(batch, context, start)):
                break
            wanted = 1 if missing > left else min(len(group), self.max_rows - rows)
            count = fitting(wanted, len(context), prefix, start)
            if count == 0 and prefix is not None and not batch:
                # a hit may hold more memory than it saves
                return self.next_batch(running, _nothing, fitting, chunks=chunks)
            if count == 0:
                break
            entering = [group.popleft() for _ in range(count)]
            batch.append(Admission(context, entering, start, min(len(context), start + left), prefix))
            self.num_waiting -= count
            rows += count
            left -= missing
            if group:  # no more of them fit
                break
            del self._groups[context]
        return batch

    def remove(self, request_ids: set[int]) -> list[GenerationRequest]:
        """Take these requests out of the queue and return those that were in it."""
        removed = [request for request in self.waiting if request.request_id in request_ids]
        self.num_waiting -= len(removed)
        for request in removed:
            group = self._groups[request.context]
            group.remove(request)
            if not group:
                del self._groups[request.context]
        return removed


def _worth_waiting_for(batch: Sequence[Admission], context: Units, start: int) -> bool:
    """Return whether a prompt shares so much with this pass that it should enter after it."""
    # so much must be shared that waiting saves at least half of the work
    wanted = max(PREFIX_BLOCK, (len(context) + start + 1) // 2)
    beginning = context[:wanted]
    return any(
        one.context == context or (one.stop >= wanted and one.context[:wanted] == beginning) for one in batch
    )
