"""Weights for engines that keep their own copy (vLLM, SGLang): whole tensors under the names of the model's
files, read from a policy in this process.

    actor's module, sharded or not ──plain_weights──► engine.update_weights         the actor is in this
    process
    WeightShares ──RemotePush──► a policy on the CPU ──plain_weights──► the same      it is in another
    process
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridflow.distributed.process_group import gather_objects
from hybridflow.engines import TrainEngine
from hybridflow.models.export import plain_weights, whole_tensors
from hybridflow.models.lora import adapter_config, adapter_tensors, base_name
from hybridflow.models.policy import PolicyModel
from hybridflow.rollout.base import RolloutEngine
from hybridflow.rollout.vllm.engine import VLLMEngine
from hybridflow.weight_sync.remote_push import RemotePush, WeightShare

_ADAPTER_FACTS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules")
"""Entries of peft's LoraConfig that an engine needs to apply adapters."""


@dataclass(eq=False)
class LocalPush:
    """Weights pushed to an engine in the trainer's process; where the policy is sharded, all ranks have such
    an engine and update it together.
    """

    policy: PolicyModel
    trainer: TrainEngine | None = None
    """The engine that trains the policy, which has its weights on the device while they are read; None where
    the policy is a copy.
    """
    adapters: bool = False
    """Whether the policy's adapters are sent alone, over a base that is sent once."""

    def __post_init__(self) -> None:
        self._dtypes: dict[str, torch.dtype] = {}
        """Compute dtypes of the parameters, by their names in the model without adapters."""

    def update(self, engine: RolloutEngine, version: int) -> None:
        """Make the engine's weights those of the policy, called `version`; RolloutError where they did not
        arrive as they are here.
        """
        if self.trainer is not None:
            self.trainer.onload()
        try:
            if self.trainer is not None:  # at each update: gathered parameters become shards again by it
                held = self.trainer.held_weights()
                self._dtypes = {base_name(each.name): each.compute_dtype for each in held}
            if self.adapters:
                assert isinstance(engine, VLLMEngine), "only vllm takes adapters"
                if not all(gather_objects(engine.has_base)):  # all ranks read sharded weights together
                    engine.update_base(plain_weights(self.policy, self._dtypes, folded=False))
                config = adapter_config(self.policy)
                facts = {name: getattr(config, name) for name in _ADAPTER_FACTS}
                tensors = whole_tensors(self.policy, dict(adapter_tensors(self.policy)))
                engine.update_adapters(tensors, version, facts)
            else:
                engine.update_weights(plain_weights(self.policy, self._dtypes), version)
        finally:
            if self.trainer is not None:
                self.trainer.offload()


class StagedPush:
    """Weights pushed by the actor's ranks in other processes: they are put into a policy on the CPU, compared
    there with the trainer's checksums, and sent on to the engine.

    `stage`: an engine over that policy, which keeps its version.
    """

    def __init__(self, pushed: RemotePush, stage: RolloutEngine, *, adapters: bool = False) -> None:
        self.pushed = pushed
        self.stage = stage
        self.owned = LocalPush(pushed.policy, adapters=adapters)

    def update(self, engine: RolloutEngine, shares: Sequence[WeightShare], version: int) -> None:
        """Take the shares as `RemotePush.update` does, then update the engine; errors are the same."""
        self.pushed.update(self.stage, shares, version)
        self.owned.update(engine, version)
