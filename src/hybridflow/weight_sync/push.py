"""Weights pushed to engines that keep their own copy, as whole tensors: from the ranks that train into the
module of a replica in a separate process (`RemotePush`), and under the names of the model's files into vLLM
and SGLang (`LocalPush`).

    ranks that train ──WeightExport──► a WeightShare from each: its part of the tensors, and all checksums
    ──RemotePush──► engines

With `rollout.delta_push` a share has only the elements that differ from the share before, where they are
fewer bytes than the tensor: an update changes few of the weights that are rounded to bfloat16. A replica that
has other weights than those before asks for whole tensors.

    actor's module, sharded or not ──plain_weights──► engine.update_weights         the actor is in this
    process
    WeightShares ──RemotePush──► a policy on the CPU ──plain_weights──► the same      it is in another
    process
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridflow.distributed.process_group import gather_objects, rank_and_size
from hybridflow.distributed.shards import BITS, Box
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
class Delta:
    """The elements of a tensor that are not what they were in another version of it."""

    shape: tuple[int, ...]
    """Shape of the tensor."""
    places: Tensor
    """Their indices in the flattened tensor, [n] int32, or int64 where it has more elements."""
    values: Tensor
    """What they are now, [n]."""

    @classmethod
    def between(cls, old: Tensor, new: Tensor) -> Tensor | Delta:
        """Return the elements of `new` whose bits are not those of `old`, or `new` where it takes no more
        bytes than they do.
        """
        bits = BITS[new.element_size()]
        places = (old.view(bits) != new.view(bits)).flatten().nonzero()[:, 0]
        if new.numel() <= torch.iinfo(torch.int32).max:
            places = places.int()
        if places.numel() * (places.element_size() + new.element_size()) >= new.nbytes:
            return new
        return cls(tuple(new.shape), places, new.flatten()[places])

    @property
    def nbytes(self) -> int:
        """Bytes of places and values."""
        return self.places.nbytes + self.values.nbytes

    def write(self, part: Tensor, box: Box) -> Tensor:
        """Return `part`, which holds `box` of the tensor, with the elements that are in it changed."""
        places, inside = self._within(box)
        changed = part.detach().clone(memory_format=torch.contiguous_format)
        changed.view(-1)[places.to(part.device)] = self.values[inside].to(part.device)
        return changed

    def undone(self, part: Tensor, box: Box) -> Delta:
        """Return what gives `part`, which holds `box`, back after `write`."""
        places, inside = self._within(box)
        old = part.detach().flatten()[places.to(part.device)].cpu()
        return Delta(self.shape, self.places[inside], old)

    def _within(self, box: Box) -> tuple[Tensor, Tensor | slice]:
        """Return the indices in a flattened box of the elements that are in it, and which these are."""
        places = self.places.long()
        if box == Box.whole(self.shape):
            return places, slice(None)
        indices = torch.unravel_index(places, self.shape)
        inside = torch.ones(len(places), dtype=torch.bool)
        places = torch.zeros_like(places)
        for index, start, stop in zip(indices, box.start, box.stop, strict=True):
            inside &= (index >= start) & (index < stop)
            places = places * (stop - start) + index - start
        return places[inside], inside


@dataclass(frozen=True)
class WeightShare:
    """The tensors that one rank sends, with the checksums of all."""

    version: int
    tensors: dict[str, Tensor | Delta]
    """Whole tensors on the CPU in the compute dtype, or what has changed of them, by name; the shares of all
    ranks together have every tensor that training changes."""
    checksums: dict[str, int]
    """Checksums of every tensor of the model, whichever rank sends it and even if it never changes."""
    base: int | None = None
    """The version that a replica must have to take it; None where all tensors are whole."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class WeightExport:
    """The sending side: all ranks together gather whole tensors, about as many bytes on each.

    With `deltas` it keeps what it has sent, and sends what differs from it.
    """

    def __init__(self, held: HeldWeights, device: torch.device, *, deltas: bool = False) -> None:
        rank, world_size = rank_and_size()
        whole = {each.name: Box.whole(each.shape) for each in held()}
        self._trained = {each.name: whole[each.name].numel for each in held() if each.trained}
        self._sums = Remembered()
        owners = deal_tensors(self._trained, world_size)
        wanted = {name: whole[name] for name, owner in owners.items() if owner == rank}
        self.reshard = Reshard(held, wanted, device=device)
        self._deltas = deltas
        self._sent: WeightShare | None = None

    def share(self, version: int, *, whole: bool = False) -> WeightShare:
        """Return this rank's part of the present weights, as version `version`; `whole`: without deltas."""
        tensors = {
            name: torch.empty(box.shape, dtype=self.reshard.dtypes[name])
            for name, box in self.reshard.wanted.items()
        }
        self.reshard.run(tensors)
        sums = self.reshard.checksums(self._sums.at(version, self._trained))
        now = WeightShare(version, {**tensors}, dict(zip(self.reshard.boxes, sums.tolist(), strict=True)))
        before = self._sent
        if self._deltas:
            self._sent = now
        if before is None or whole:
            return now
        changed: dict[str, Tensor | Delta] = {}
        for name, tensor in tensors.items():
            old = before.tensors[name]
            assert isinstance(old, Tensor), "what is kept is whole"
            changed[name] = Delta.between(old, tensor)
        return WeightShare(version, changed, now.checksums, before.version)

    def again(self, version: int) -> WeightShare:
        """Return the share of `version` with whole tensors; RolloutError where it is not the newest."""
        if self._sent is None or self._sent.version != version:
            raise RolloutError(
                f"a replica needs the whole weights of version {version}, and the actor has newer ones"
            )
        return self._sent


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
        bases = {share.base for share in shares} - {None}
        if bases - {before}:
            raise RolloutError(
                f"update to version {version} has what changed since version {sorted(map(str, bases))[0]}, "
                f"and the weights here are of version {before}"
            )
        sent = shares[0].checksums
        if set(sent) != set(self.holding.boxes):
            lacking = sorted(set(sent) ^ set(self.holding.boxes))
            raise RolloutError(
                f"the trainer's model and the one that generates have other weights: {lacking[0]} is in one "
                "of them only"
            )
        undo = self._undo(shares) if bases else {}
        engine.update_weights(SomeWeights(self._parts(shares)), version)
        written = {name for share in shares for name in share.tensors}
        arrived = self.holding.checksums(
            dict(self.policy.named_parameters()), self._sums.at(version, written)
        )
        wanted = torch.tensor([sent[name] for name in self.holding.boxes])
        wrong = first_difference(wanted, arrived)
        if wrong < len(wanted):
            if undo:  # requests may go on with these weights until whole ones come
                old = ((name.removeprefix("hf."), self._changed(name, part)) for name, part in undo.items())
                engine.update_weights(SomeWeights(old), before)
            engine.set_version(before)
            name = list(self.holding.boxes)[wrong]
            raise RolloutError(explain_difference(name, wanted[wrong], arrived[wrong], version=version))

    def _parts(self, shares: Sequence[WeightShare]) -> Iterator[tuple[str, Tensor]]:
        for share in shares:
            for name, tensor in share.tensors.items():
                part = tensor if isinstance(tensor, Delta) else self.holding.part(name, tensor)
                yield name.removeprefix("hf."), self._changed(name, part)

    def _changed(self, name: str, part: Tensor | Delta) -> Tensor:
        """Return this rank's part of a weight, as it is or with what has changed of it."""
        if isinstance(part, Delta):
            return part.write(self.policy.get_parameter(name), self.holding.boxes[name])
        return part

    def _undo(self, shares: Sequence[WeightShare]) -> dict[str, Tensor | Delta]:
        """Return what gives this rank's parts back that the shares are to overwrite, by name."""
        undo: dict[str, Tensor | Delta] = {}
        for name, tensor in (item for share in shares for item in share.tensors.items()):
            own = self.policy.get_parameter(name)
            if isinstance(tensor, Delta):
                undo[name] = tensor.undone(own, self.holding.boxes[name])
            else:
                undo[name] = own.detach().clone()
        return undo


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
        pushes: list[tuple[Iterator[tuple[str, Tensor]], Callable[[Any], None]]] = []
        try:
            if self.trainer is not None:  # at each update: gathered parameters become shards again by it
                held = self.trainer.held_weights()
                self._dtypes = {base_name(each.name): each.compute_dtype for each in held}
            if self.adapters:
                assert isinstance(engine, VLLMEngine), "only vllm takes adapters"
                if not all(gather_objects(engine.has_base)):  # all ranks read sharded weights together
                    base = plain_weights(self.policy, self._dtypes, folded=False)
                    pushes.append((base, engine.update_base))
                config = adapter_config(self.policy)
                facts = {name: getattr(config, name) for name in _ADAPTER_FACTS}
                tensors = whole_tensors(self.policy, dict(adapter_tensors(self.policy)))
                pushes.append((tensors, partial(engine.update_adapters, version=version, adapter=facts)))
            else:
                weights = plain_weights(self.policy, self._dtypes)
                pushes.append((weights, partial(engine.update_weights, version=version)))
            with nullcontext() if self.trainer is None else self.trainer.readable_policy():
                push_to_the_end(pushes)
        finally:
            if self.trainer is not None:
                self.trainer.offload()


def push_to_the_end(pushes: Sequence[tuple[Iterator[tuple[str, Tensor]], Callable[[Any], None]]]) -> None:
    """Push weights in turn, and raise the first error. After it all weights are still read: they may be
    sharded, and other ranks, whose engines live, read them together with this one.
    """
    failed: Exception | None = None
    for weights, push in pushes:
        if failed is None:
            try:
                push(weights)
            except Exception as error:
                failed = error
        for _ in weights:
            pass
    if failed is not None:
        raise failed


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
