"""The rollout worker: generation with the actor's weights, where they are or after they have come.

same process, one rank      the actor's own module: nothing to do
same processes, shards      gathered when the engine wakes up, freed when it sleeps
processes of its own        pushed by `RolloutGroup.update_from` before a step
engine with its own         pushed into the engine by the same call, wherever it is (vLLM, SGLang)
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.controller import Dispatch, WorkerGroup, register
from hybridflow.errors import RolloutError
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, RolloutEngine, RolloutStats
from hybridflow.weight_sync.owned import OwnedWeights, StagedWeights
from hybridflow.weight_sync.pushed import PushedWeights, WeightShare
from hybridflow.workers.actor import ActorGroup, ActorWorker
from hybridflow.workers.exact import ExactRollout


class RolloutWorker(ExactRollout):
    """Holds a generation engine; `pushed` where its weights are its own and come from the actor's ranks,
    `owned` where they come from the policy in this process.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        pushed: PushedWeights | StagedWeights | None = None,
        owned: OwnedWeights | None = None,
    ) -> None:
        self.engine = engine
        self.pushed = pushed
        self.owned = owned

    @register(dispatch_mode=Dispatch.DP_DEAL)
    def generate(
        self, requests: Sequence[GenerationRequest], *, policy_version: int
    ) -> list[GenerationOutput]:
        """All requests answered, in their order; the KV cache is given back afterwards, and gathered weights
        are.

        `policy_version`: that of the actor's weights now. RolloutError where this replica's own weights are
        older.
        """
        if self.pushed is None and self.owned is None:
            self.engine.set_version(policy_version)
        elif self.engine.policy_version < policy_version:
            raise RolloutError(
                f"rollout rank {self.rank} was asked to generate with weights of version {policy_version} "
                "and has those of version "
                f"{self.engine.policy_version}: an update did not reach it"
            )
        try:
            # on all ranks, also on those without a request: they send their shards to the others
            self.engine.wake_up()
            finished = {output.request_id: output for output in self.engine.generate(requests)}
        finally:
            self.engine.sleep()
        return [finished[request.request_id] for request in requests]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self, shares: Sequence[WeightShare], *, version: int) -> None:
        """Take over what the actor's ranks sent, unless this rank shares the actor's; RolloutError where it
        is not what they hold.
        """
        if self.pushed is not None:
            self.pushed.update(self.engine, shares, version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def renew_weights(self, *, version: int) -> None:
        """Take over the weights of the policy in this process, unless the engine shares them."""
        if self.owned is not None:
            self.owned.update(self.engine, version)

    @register(dispatch_mode=Dispatch.ALL_TO_LIST)
    def stats(self) -> RolloutStats:
        """What the newest `generate` did on this replica."""
        return self.engine.stats


class RolloutGroup(WorkerGroup[RolloutWorker]):
    """The driver's view of the rollout: replicas of `tensor_model_parallel_size` ranks each."""

    def generate(
        self, requests: Sequence[GenerationRequest], *, policy_version: int
    ) -> list[GenerationOutput]:
        """See `RolloutWorker.generate`; requests of one prompt go to one replica, outputs come in the order
        of the requests.
        """
        return self.call(RolloutWorker.generate, requests, policy_version=policy_version)

    def update_from(self, actor: ActorGroup, version: int) -> None:
        """Bring the actor's weights, now called `version`, to replicas that have their own; nothing moves
        where all share the actor's.

        RolloutError where the two share processes and the rollout is not on all of the actor's.
        """
        if self.backend.together(actor.role, self.role):
            if self.world_size < actor.world_size:
                raise RolloutError(
                    f"{self.role} has {self.world_size} of the {actor.world_size} ranks of {actor.role}, "
                    "whose weights it shares: all must "
                    "take part where shards are gathered. Set trainer.placement.rollout to the actor's "
                    "pool, or to others only"
                )
            # a role lives on whole pools: it has no rank outside of the actor's
            if self.world_size == actor.world_size:
                self.call(RolloutWorker.renew_weights, version=version)
                return
        shares = actor.submit_each(ActorWorker.export_buckets, [version] * actor.world_size)
        self.call(RolloutWorker.update_weights, shares.by_reference(), version=version)

    def stats(self) -> RolloutStats:
        """What the newest `generate` did on all replicas."""
        return RolloutStats.join(self.call_list(RolloutWorker.stats), together=True)
