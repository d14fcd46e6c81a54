"""Weights of engines that have their own, such as vLLM: whole tensors by the names of the model's files, out of a policy of this process.

actor's module, sharded or not ──plain_weights──► engine.update_weights             the actor lives here
WeightShares ──PushedWeights──► a policy on the CPU ──plain_weights──► the same     it lives elsewhere
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from hybridflow.engines import TrainEngine
from hybridflow.models.export import plain_weights
from hybridflow.models.lora import base_name
from hybridflow.models.policy import PolicyModel
from hybridflow.rollout.base import RolloutEngine
from hybridflow.weight_sync.holding import trainer_parameters
from hybridflow.weight_sync.pushed import PushedWeights, WeightShare


class OwnedWeights:
    """Of an engine beside the policy that trains; where that is sharded, all ranks have such an engine and update it together.

    `trainer`: brings weights that rest in CPU memory to the device meanwhile. `narrow`: as `WeightExport`'s.
    """

    def __init__(
        self, policy: PolicyModel, trainer: TrainEngine | None = None, narrow: Mapping[str, torch.dtype] = MappingProxyType({})
    ) -> None:
        self.policy, self.trainer = policy, trainer
        self._dtypes = {base_name(name): dtype for name, dtype in narrow.items()}

    def update(self, engine: RolloutEngine, version: int) -> None:
        """Make the engine's weights those of the policy, called `version`; RolloutError where they did not arrive as they are here."""
        if self.trainer is not None:
            self.trainer.onload()
        try:
            trainer_parameters(self.policy)  # for its effect: blocks that are still gathered are sharded again
            engine.update_weights(plain_weights(self.policy, self._dtypes), version)
        finally:
            if self.trainer is not None:
                self.trainer.offload()


class StagedWeights:
    """Takes shares of the actor's ranks into a policy on the CPU, proves them there, and from there updates the engine.

    `stage`: an engine over that policy, which keeps its version.
    """

    def __init__(self, pushed: PushedWeights, stage: RolloutEngine) -> None:
        self.pushed, self.stage, self.owned = pushed, stage, OwnedWeights(pushed.policy)

    def update(self, engine: RolloutEngine, shares: Sequence[WeightShare], version: int) -> None:
        """As `PushedWeights.update`, and on to the engine."""
        self.pushed.update(self.stage, shares, version)
        self.owned.update(engine, version)
