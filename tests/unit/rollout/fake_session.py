"""A session without a model: each row says its script, a token a step, slowly or failing on order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from hybridflow.rollout.base import (
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    PartialOutput,
    RolloutStats,
)

Script = Callable[[GenerationRequest], Sequence[int]]
LOG_PROB = -0.5


class FakeSession:
    """Serves `max_rows` rows at once; `version` is what each token carries."""

    def __init__(
        self,
        script: Script,
        *,
        end: int = -1,
        max_rows: int = 1_000,
        seconds: float = 0.0,
        dies_at: int | None = None,
        gated: bool = False,
    ) -> None:
        self.script, self.end, self.max_rows, self.seconds, self.dies_at = (
            script,
            end,
            max_rows,
            seconds,
            dies_at,
        )
        self.version = self.steps = self.num_added = self.num_copied = 0
        self.closed = False
        self.gate = threading.Semaphore(0)
        """Where `gated`: a step waits here for a `release` of its own."""
        self.gated = gated
        self.threads: set[int] = set()
        self._rows: dict[int, tuple[GenerationRequest, list[int], list[int]]] = {}
        self._waiting: deque[GenerationRequest] = deque()

    @property
    def idle(self) -> bool:
        return not (self._rows or self._waiting)

    @property
    def policy_version(self) -> int:
        return self.version

    @property
    def num_running(self) -> int:
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
        self.num_added += len(requests)
        bad = [request for request in requests if request.prompt_token_ids == (0,)]
        self._waiting += [request for request in requests if request not in bad]
        return [
            GenerationOutput(
                request.request_id,
                [],
                [],
                "error",
                [],
                f"request {request.request_id}: a bad prompt",
                refused=True,
            )
            for request in bad
        ]

    def step(self) -> list[GenerationOutput]:
        self.threads.add(threading.get_ident())
        self.steps += 1
        if self.dies_at == self.steps:
            raise RuntimeError("out of memory, as ordered")
        if self.gated:
            self.gate.acquire()
        time.sleep(self.seconds)
        while self._waiting and len(self._rows) < self.max_rows:
            request = self._waiting.popleft()
            self._rows[request.request_id] = (request, [], [])
        done = []
        for request, tokens, versions in list(self._rows.values()):
            said = self.script(request)
            tokens.append(said[len(tokens)] if len(tokens) < len(said) else self.end)
            versions.append(self.version)
            stopped = tokens[-1] == self.end or tokens[-1] in request.sampling.stop_token_ids
            if stopped or len(tokens) == request.sampling.max_tokens:
                done.append(self._leave(request, "stop" if stopped else "length"))
        return done

    def abort(self, request_ids: Iterable[int]) -> list[GenerationOutput]:
        wanted = set(request_ids)
        waiting = [request for request in self._waiting if request.request_id in wanted]
        self._waiting = deque(request for request in self._waiting if request.request_id not in wanted)
        running = [self._leave(row[0], "abort") for key, row in list(self._rows.items()) if key in wanted]
        return [GenerationOutput(request.request_id, [], [], "abort", []) for request in waiting] + running

    def so_far(self, since: Mapping[int, int]) -> list[PartialOutput]:
        assert since.keys() <= self._rows.keys() | {request.request_id for request in self._waiting}
        partials = []
        for number in since.keys() & self._rows.keys():
            output, start = self._output(self._rows[number], "abort"), since[number]
            tops = None if output.top_log_probs is None else output.top_log_probs[start:]
            new = output.token_ids[start:]
            self.num_copied += len(new)
            partials.append(PartialOutput(number, start, new, output.log_probs[start:], tops))
        return partials

    def close(self) -> None:
        self.closed = True

    # ---- it is its own engine, which is always awake

    def open(self, *, closed: bool = False) -> FakeSession:
        return self

    @property
    def stats(self) -> RolloutStats:
        return RolloutStats(generated_tokens=self.steps)

    def wake_up(self) -> None:
        """Nothing."""

    def sleep(self) -> None:
        """Nothing."""

    def _leave(self, request: GenerationRequest, reason: FinishReason) -> GenerationOutput:
        return self._output(self._rows.pop(request.request_id), reason)

    def _output(
        self, row: tuple[GenerationRequest, list[int], list[int]], reason: FinishReason
    ) -> GenerationOutput:
        request, tokens, versions = row[0], list(row[1]), list(row[2])
        tops = (
            [[(token, LOG_PROB), (token + 1, -2.0)] for token in tokens]
            if request.sampling.top_log_probs
            else None
        )
        stop = tokens[-1] if reason == "stop" else None
        return GenerationOutput(
            request.request_id, tokens, [LOG_PROB] * len(tokens), reason, versions, None, stop, tops
        )
