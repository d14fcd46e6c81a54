"""A native engine at work: requests join at any time, are decoded together, and leave as they finish.

add ──check──► errors (that request only)
  └──► Generation (scheduler, rows, slots) ──step──► outputs, as they finish
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from hybridflow.distributed.replica_ranks import ReplicaRanks
from hybridflow.errors import RolloutError
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, PartialOutput
from hybridflow.rollout.native.generation import Generation
from hybridflow.rollout.requests import check_ids, sort_out


class Session:
    """Session of a native engine, called by one thread at a time; the module is in eval mode until `close`.

    Weights may change between two steps: tokens sampled from then on carry the new version.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        problem: Callable[[GenerationRequest], str | None],
        replica: ReplicaRanks,
        closed: Callable[[bool], None],
    ) -> None:
        """`closed` is called at the end, with whether there were values that are not finite."""
        self._generation = generation
        self._problem = problem
        self._replica = replica
        self._closed = closed
        self._open = True
        self._broken = False
        self._live: set[int] = set()
        self._tokens = 0  # stands for all tokens that were returned
        self._training = [module for module in generation.policy.modules() if module.training]
        generation.policy.eval()  # no dropout: log-probs must be those of the policy

    @property
    def policy_version(self) -> int:
        """Version that tokens carry which are sampled now."""
        return self._generation.version

    @property
    def num_running(self) -> int:
        """Number of requests that get a token in each step."""
        return self._generation.rows.count

    @property
    def num_waiting(self) -> int:
        """Number of requests that have not entered, with those in chunked prefill and preempted ones."""
        return self._generation.scheduler.num_waiting

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits."""
        return self._generation.done

    def add(self, requests: Iterable[GenerationRequest]) -> list[GenerationOutput]:
        """Add requests for the next step; those that cannot be served come back now, with reason "error".

        RolloutError for a request id that is in use, and when closed; then none of them has joined.
        """
        self._check_open()
        requests = list(requests)
        check_ids(requests, self._live)
        good, outputs = sort_out(requests, self._problem)
        self._live |= {request.request_id for request in good}
        self._generation.add(good)
        return outputs

    def step(self) -> list[GenerationOutput]:
        """Admit requests, prefill up to the token budget, decode a token for each row; return what finished.

        Ranks of a replica call it together.
        """
        self._check_open()
        if self.idle:
            return []
        outputs = self._generation.step()
        for output in outputs:
            self._live.remove(output.request_id)
            self._broken = self._broken or output.error is not None
            self._tokens += hash((output.request_id, *output.token_ids))
        if outputs and self.idle:
            self._replica.check_same(self._tokens)
        return outputs

    def abort(self, request_ids: Iterable[int]) -> list[GenerationOutput]:
        """End these requests, unknown ones aside; their partial responses come back, with reason "abort"."""
        outputs = self._generation.abort(set(request_ids))
        self._live -= {output.request_id for output in outputs}
        return outputs

    def so_far(self, since: Mapping[int, int]) -> list[PartialOutput]:
        """Return what begun requests have beyond the first `since[request_id]` tokens of the caller."""
        return self._generation.so_far(since)

    def close(self) -> None:
        """End, and let the engine be used otherwise; what runs is dropped. A repeated call does nothing."""
        if not self._open:
            return
        self._open = False
        for module in self._training:
            module.training = True
        self._generation.close()
        self._closed(self._broken)

    def _check_open(self) -> None:
        if not self._open:
            raise RolloutError("this session is closed: open another one")
