"""The weight exchange: each rank sends the boxes it holds to the ranks that want them, in rounds of bounded
bytes.

A box that a rank holds itself is copied in place and never travels. The sender casts to the dtype in which a
parameter arrives.

Where a trainer generates itself, its weights are gathered from shards into a second module (the twin), and
are on the device while they are read (`fsdp_config.param_offload`).

shards of the trainer ──Reshard──► the twin's parameters (all, or this rank's slices) ──► checksums compared
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.distributed.process_group import gather_objects, min_over, rank_and_size
from hybridflow.distributed.shards import Box, bit_sum
from hybridflow.engines import Held, TrainEngine
from hybridflow.errors import RolloutError
from hybridflow.models.copies.twin import Twin
from hybridflow.rollout.base import WeightSource
from hybridflow.weight_sync.holding import Holding, Take, anew, explain_difference, first_difference
from hybridflow.weight_sync.plan import Boxes, Parameter, Plan, Route, make_plan

BUCKET_BYTES = 256 * 2**20

Named = tuple[str, Box]

HeldWeights = Callable[[], Iterable[Held]]
"""A function that returns the parts that this rank holds now, as `TrainEngine.held_weights` does."""


@dataclass
class _Work:
    """The part of one round that one rank has to do."""

    dtype: torch.dtype
    travels: bool
    """Whether any rank sends anything."""
    stays: list[Named] = field(default_factory=list)
    sends: list[list[Named]] = field(default_factory=list)
    """Boxes to send, by target rank."""
    takes: list[list[Named]] = field(default_factory=list)
    """Boxes to receive, by source rank."""


class Reshard:
    """A weight exchange among all ranks, planned once and run whenever weights are wanted.

    `held` returns the parts of the parameters that this rank has in training; it is called at each run, since
    they may move. A parameter arrives in its compute dtype. `wanted`: the boxes that this rank wants,
    possibly none. `device`: where buffers are made. All ranks make it and run it together.
    """

    def __init__(
        self,
        held: HeldWeights,
        wanted: Boxes,
        *,
        device: torch.device | str = "cpu",
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        now = {each.name: each for each in held()}
        assert set(wanted) <= set(now), f"no rank holds {sorted(set(wanted) - set(now))[:3]}"
        self.held = held
        self.wanted = dict(wanted)
        self.device = torch.device(device)
        self.rank, self.world_size = rank_and_size()
        self.boxes = {name: each.box for name, each in now.items()}
        self.dtypes = {name: each.compute_dtype for name, each in now.items()}
        have, want = (gather_objects(boxes) for boxes in (self.boxes, self.wanted))
        parameters = {name: Parameter(each.shape, each.compute_dtype) for name, each in now.items()}
        plan = make_plan(have, want, parameters, bucket_bytes)
        self._work = _work_of(plan, self.rank, self.world_size)
        self._answers_for = {name for name, owners in plan.owners.items() if self.rank in owners}
        self.bytes_sent = 0
        """Bytes sent to other ranks in all runs."""
        self.bytes_received = 0
        """Bytes received from other ranks in all runs."""

    @torch.no_grad()
    def run(self, out: Mapping[str, Tensor]) -> None:
        """Fill `out`, tensors with the shapes and dtypes of the wanted boxes, by name."""
        held = {each.name: each.tensor for each in self.held()}
        for work in self._work:
            for name, box in work.stays:
                self._put(out, name, box, held[name][box.within(self.boxes[name])])
            if work.travels:
                self._exchange(work, held, out)

    def _exchange(self, work: _Work, held: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        num_out = [sum(box.numel for _, box in some) for some in work.sends]
        num_in = [sum(box.numel for _, box in some) for some in work.takes]
        outgoing = torch.empty(sum(num_out), dtype=work.dtype, device=self.device)
        incoming = torch.empty(sum(num_in), dtype=work.dtype, device=self.device)
        for part, name, box in _cut(outgoing, work.sends):
            part.copy_(held[name][box.within(self.boxes[name])])
        size = work.dtype.itemsize
        splits_in, splits_out = ([count * size for count in counts] for counts in (num_in, num_out))
        # as bytes, which every backend carries
        dist.all_to_all_single(incoming.view(torch.uint8), outgoing.view(torch.uint8), splits_in, splits_out)
        for part, name, box in _cut(incoming, work.takes):
            self._put(out, name, box, part)
        self.bytes_sent += outgoing.nbytes
        self.bytes_received += incoming.nbytes

    def _put(self, out: Mapping[str, Tensor], name: str, box: Box, value: Tensor) -> None:
        out[name][box.within(self.wanted[name])].copy_(value)

    @torch.no_grad()
    def checksums(self, take: Take = anew) -> Tensor:
        """Return a checksum of each whole parameter, [number of parameters] int64 on the CPU.

        They are of the parameters as they are held now, cast to the dtype in which they arrive. `take`
        decides which of this rank's checksums are computed and which are remembered.
        """
        sums = torch.zeros(len(self.boxes), dtype=torch.int64, device=self.device)
        for index, each in enumerate(self.held()):
            if each.name in self._answers_for:
                sums[index] = take(each.name, partial(_sum, each))
        if self.world_size > 1:
            dist.all_reduce(sums)
        return sums.cpu()


def _sum(held: Held) -> Tensor:
    """Return the checksum of a part as it arrives, 0-d int64."""
    return bit_sum(held.tensor.to(held.compute_dtype), held.box)


def _work_of(plan: Plan, rank: int, world_size: int) -> list[_Work]:
    """Return this rank's part of each round; the routes of equal pieces are read once."""
    known: dict[int, list[Route]] = {}
    found = []
    for each in plan.rounds:
        work = _Work(
            each.dtype,
            any(each.load),
            sends=[[] for _ in range(world_size)],
            takes=[[] for _ in range(world_size)],
        )
        for name, routes in each.pieces:
            if id(routes) not in known:
                known[id(routes)] = [route for route in routes if rank in (route.source, route.target)]
            for source, target, box in known[id(routes)]:
                if source == target:
                    work.stays.append((name, box))
                elif source == rank:
                    work.sends[target].append((name, box))
                else:
                    work.takes[source].append((name, box))
        found.append(work)
    return found


def _cut(flat: Tensor, by_rank: Sequence[Sequence[Named]]) -> Iterator[tuple[Tensor, str, Box]]:
    """Yield the boxes that lie in a flat buffer one after the other, each with its name."""
    offset = 0
    for some in by_rank:
        for name, box in some:
            yield flat[offset : offset + box.numel].view(box.shape), name, box
            offset += box.numel


class GatheredTwin:
    """A `WeightSource` for `twin`, filled from the parts of all ranks, which make and use it together."""

    def __init__(self, held: HeldWeights, twin: Twin) -> None:
        self.twin = twin
        self.holding = Holding.of(twin, {each.name: each.shape for each in held()})
        self.reshard = Reshard(held, self.holding.boxes, device=twin.device)

    def acquire(self, version: int) -> None:
        """Gather the present weights; RolloutError on all ranks where a checksum differs on any."""
        self.reshard.run(self.twin.allocate())
        sent = self.reshard.checksums()
        arrived = self.holding.checksums(self.twin.parameters)
        (first,) = min_over([first_difference(sent, arrived)])
        if first < len(sent):
            name = list(self.holding.boxes)[first]
            raise RolloutError(explain_difference(name, sent[first], arrived[first], version=version))

    def release(self) -> None:
        """Free the gathered weights; a second call does nothing."""
        self.twin.free()


@dataclass(eq=False)
class OffloadedSource:
    """A `WeightSource` that brings the trainer's offloaded weights to the device.

    Without `inner`, generation uses the trainer's own module, which stays on the device until `release`. With
    `inner`, that source copies the weights, and the trainer's are offloaded again at once.
    """

    engine: TrainEngine
    inner: WeightSource | None
    _on_the_device: bool = field(default=False, init=False)

    def acquire(self, version: int) -> None:
        """Bring the trainer's weights to the device, and fill the inner source from them."""
        self.engine.onload()
        self._on_the_device = True
        if self.inner is not None:
            try:
                self.inner.acquire(version)
            finally:
                self._let_go()

    def release(self) -> None:
        """Offload the trainer's weights again, or free the inner source's; a second call does nothing."""
        if self.inner is not None:
            self.inner.release()
        else:
            self._let_go()

    def _let_go(self) -> None:
        if self._on_the_device:
            self.engine.offload()
        self._on_the_device = False
