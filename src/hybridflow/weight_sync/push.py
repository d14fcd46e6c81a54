"""Weights pushed to engines that keep their own copy, as whole tensors: from the ranks that train into the
module of a replica in a separate process (`RemotePush`), and under the names of the model's files into vLLM
and SGLang (`LocalPush`).

    ranks that train ──WeightExport──► a WeightShare from each: its part of the tensors, and all checksums
    ──RemotePush──► engines

    actor's module, sharded or not ──plain_weights──► engine.update_weights         the actor is in this
    process
    WeightShares ──RemotePush──► a policy on the CPU ──plain_weights──► the same      it is in another
    process
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.distributed.process_group import gather_objects, rank_and_size
from hybridflow.distributed.shards import Box
from hybridflow.engines import TrainEngine
from hybridflow.errors import RolloutError
from hybridflow.models.adapters.lora import adapter_config, adapter_tensors, base_name
from hybridflow.models.files.export import plain_weights, whole_tensors
from hybridflow.models.policy import PolicyModel
from hybridflow.rollout.base import RolloutEngine, SomeWeights
from hybridflow.rollout.vllm.engine import VLLMEngine
from hybridflow.weight_sync.holding import Holding, Remembered, explain_difference, first_difference
from hybridflow.weight_sync.reshard import HeldWeights, Reshard

_ADAPTER_FACTS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules")
"""Entries of peft's LoraConfig that an engine needs to apply adapters."""


@dataclass(frozen=True)
class WeightShare:
    """The tensors that one rank sends, with the checksums of all."""

    version: int
    tensors: dict[str, Tensor]
    """Whole tensors on the CPU in the compute dtype, by name; the shares of all ranks together have every
    tensor that training changes."""
    checksums: dict[str, int]
    """Checksums of every tensor of the model, whichever rank sends it and even if it never changes."""


class WeightExport:
    """The sending side: all ranks together gather whole tensors, about as many bytes on each."""

    def __init__(self, held: HeldWeights, device: torch.device) -> None:
        rank, world_size = rank_and_size()
        whole = {each.name: Box.whole(each.shape) for each in held()}
        self._trained = {each.name: whole[each.name].numel for each in held() if each.trained}
        self._sums = Remembered()
        owners = deal_tensors(self._trained, world_size)
        wanted = {name: whole[name] for name, owner in owners.items() if owner == rank}
        self.reshard = Reshard(held, wanted, device=device)

    def share(self, version: int) -> WeightShare:
        """Return this rank's part of the present weights, as version `version`."""
        tensors = {
            name: torch.empty(box.shape, dtype=self.reshard.dtypes[name])
            for name, box in self.reshard.wanted.items()
        }
        self.reshard.run(tensors)
        sums = self.reshard.checksums(self._sums.at(version, self._trained))
        return WeightShare(version, tensors, dict(zip(self.reshard.boxes, sums.tolist(), strict=True)))


def deal_tensors(sizes: dict[str, int], parts: int) -> dict[str, int]:
    """Return the number of the part that each tensor goes to: always the part with the least so far."""
    loads = [0] * parts
    owners = {}
    for name, size in sizes.items():
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += size
    return owners


@dataclass(eq=False)
class RemotePush:
    """The receiving side: the ranks of a replica together put shares into the module of their engine."""

    policy: PolicyModel
    holding: Holding

    def __post_init__(self) -> None:
        self._sums = Remembered()

    def update(self, engine: RolloutEngine, shares: Sequence[WeightShare], version: int) -> None:
        """Make the engine's weights those of the trainer, and set its version to `version`.

        The weights that are here afterwards are compared with those that the trainer holds: a share that got
        lost is found, and an update that changed nothing passes. Weights that no share brings are compared by
        remembered checksums, each computed again in its turn. Raises RolloutError that names the first weight
        that differs, or the weights that the shares lack.
        """
        before = engine.policy_version
        if not shares:
            raise RolloutError(f"update to version {version} got no weights")
        odd = sorted({share.version for share in shares} - {version})
        if odd:
            raise RolloutError(f"update to version {version} got weights of version {odd[0]}")
        sent = shares[0].checksums
        if set(sent) != set(self.holding.boxes):
            lacking = sorted(set(sent) ^ set(self.holding.boxes))
            raise RolloutError(
                f"the trainer's model and the one that generates have other weights: {lacking[0]} is in one "
                "of them only"
            )
        engine.update_weights(SomeWeights(self._parts(shares)), version)
        written = {name for share in shares for name in share.tensors}
        arrived = self.holding.checksums(
            dict(self.policy.named_parameters()), self._sums.at(version, written)
        )
        wanted = torch.tensor([sent[name] for name in self.holding.boxes])
        wrong = first_difference(wanted, arrived)
        if wrong < len(wanted):
            engine.set_version(before)
            name = list(self.holding.boxes)[wrong]
            raise RolloutError(explain_difference(name, wanted[wrong], arrived[wrong], version=version))

    def _parts(self, shares: Sequence[WeightShare]) -> Iterator[tuple[str, Tensor]]:
        for share in shares:
            for name, tensor in share.tensors.items():
                yield name.removeprefix("hf."), self.holding.part(name, tensor)


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
