"""The rollout worker: generation with the actor's weights, shared or sent.

same process, one rank      the engine uses the actor's own module; nothing is sent
same processes, shards      shards are gathered when the engine wakes up and freed when it sleeps
other processes             `RolloutGroup.update_from` pushes weights before a step
engine with own weights     the same call pushes weights into the engine, wherever it is (vLLM, SGLang)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybridflow.controller import Dispatch, WorkerGroup, register
from hybridflow.errors import RolloutError
from hybridflow.observability.progress import progress
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, RolloutEngine, RolloutStats
from hybridflow.weight_sync.local_push import LocalPush, StagedPush
from hybridflow.weight_sync.remote_push import RemotePush, WeightShare
from hybridflow.workers.actor import ActorGroup, ActorWorker
from hybridflow.workers.exact import ExactRollout

Finished = Callable[[GenerationOutput], None]
"""Called with each output as soon as it is there."""


class RolloutWorker(ExactRollout):
    """A generation engine with the source of its weights.

    `pushed` is set where the weights are the engine's own and come from the actor's ranks, `owned` where they
    come from the policy in this process; neither where the engine shares the actor's module.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        pushed: RemotePush | StagedPush | None = None,
        owned: LocalPush | None = None,
    ) -> None:
        self.engine = engine
        self.pushed = pushed
        self.owned = owned

    @register(dispatch_mode=Dispatch.DP_DEAL)
    def generate(
        self, requests: Sequence[GenerationRequest], *, finished: Finished | None = None
    ) -> list[GenerationOutput]:
        """Answer all requests, in their order; afterwards the KV cache and gathered weights are freed.

        The engine says of each token which version of the weights has sampled it.
        """
        try:
            # on all ranks, also on those without a request: they send their shards to the others
            self.engine.wake_up()
            outputs: dict[int, GenerationOutput] = {}
            for output in progress.results(self.engine.generate(requests), len(requests)):
                outputs[output.request_id] = output
                if finished is not None:
                    finished(output)
        finally:
            self.engine.sleep()
        return [outputs[request.request_id] for request in requests]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self, shares: Sequence[WeightShare], *, version: int) -> None:
        """Load the weights that the actor's ranks sent, unless this rank shares the actor's.

        Raises RolloutError where they are not what the actor's ranks hold.
        """
        if self.pushed is not None:
            self.pushed.update(self.engine, shares, version)
            self._confirm(version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def renew_weights(self, *, version: int) -> None:
        """Take over the weights of the policy in this process as `version`: load them where the engine has
        its own, and else note that the shared ones have changed.

        Raises RolloutError where they did not arrive.
        """
        if self.owned is not None:
            self.owned.update(self.engine, version)
        else:
            self.engine.set_version(version)
        self._confirm(version)

    def _confirm(self, version: int) -> None:
        reported = self.engine.policy_version
        if reported != version:
            raise RolloutError(
                f"rollout rank {self.rank} was given weights of version {version} and has those of version "
                f"{reported}: the update did not reach it"
            )

    @register(dispatch_mode=Dispatch.ALL_TO_LIST)
    def stats(self) -> RolloutStats:
        """Return the statistics of the newest `generate` on this replica."""
        return self.engine.stats


class RolloutGroup(WorkerGroup[RolloutWorker]):
    """The driver's view of the rollout: replicas of `tensor_model_parallel_size` ranks each."""

    def generate(
        self, requests: Sequence[GenerationRequest], *, finished: Finished | None = None
    ) -> list[GenerationOutput]:
        """See `RolloutWorker.generate`; requests of one prompt go to one replica, outputs keep the order of
        requests.

        `finished` hears of each output once: at once where the workers are in this process, else when all are
        there.
        """
        if self.backend.in_process:
            return self.call(RolloutWorker.generate, requests, finished=finished)
        outputs = self.call(RolloutWorker.generate, requests)
        if finished is not None:
            for output in outputs:
                finished(output)
        return outputs

    def update_from(self, actor: ActorGroup, version: int) -> None:
        """Give all replicas the actor's weights, called `version` from now on.

        Where replicas share the actor's module nothing is sent, and they learn its version. Raises
        RolloutError where an update does not reach a replica, and where the two share processes and the
        rollout is not on all processes of the actor.
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
        """Return the statistics of the newest `generate` on all replicas together."""
        return RolloutStats.join(self.call_list(RolloutWorker.stats), together=True)
