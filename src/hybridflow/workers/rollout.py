"""The rollout worker: generation with the actor's own module when both live in one process."""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.controller import Dispatch, Worker, WorkerGroup, register
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, RolloutEngine, RolloutStats


class RolloutWorker(Worker):
    """Holds a generation engine."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def generate(self, requests: Sequence[GenerationRequest], *, policy_version: int) -> list[GenerationOutput]:
        """All requests answered, in their order; the KV cache is given back afterwards."""
        self.engine.wake_up()
        self.engine.set_version(policy_version)
        finished = {output.request_id: output for output in self.engine.generate(requests)}
        self.engine.sleep()
        return [finished[request.request_id] for request in requests]

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def stats(self) -> RolloutStats:
        """What the newest `generate` did."""
        return self.engine.stats


class RolloutGroup(WorkerGroup[RolloutWorker]):
    """The driver's view of the rollout."""

    def generate(self, requests: Sequence[GenerationRequest], *, policy_version: int) -> list[GenerationOutput]:
        """See `RolloutWorker.generate`."""
        return self.call(RolloutWorker.generate, requests, policy_version=policy_version)

    def stats(self) -> RolloutStats:
        """See `RolloutWorker.stats`."""
        return self.call(RolloutWorker.stats)
