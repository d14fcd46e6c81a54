"""The exchange: each rank sends the boxes it holds to the ranks that want them, in rounds of bounded bytes.

What a rank holds itself is copied on the spot and never travels. The sender casts to the dtype in which a
parameter arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.distributed.bit_sum import bit_sum
from hybridflow.distributed.boxes import Box
from hybridflow.distributed.process_group import gather_objects, rank_and_size
from hybridflow.distributed.shards import local, own_box
from hybridflow.weight_sync.checksum import Take, anew
from hybridflow.weight_sync.plan import Boxes, Parameter, Plan, Route, make_plan

BUCKET_BYTES = 256 * 2**20

Named = tuple[str, Box]


@dataclass
class _Work:
    """A rank's part of one round."""

    dtype: torch.dtype
    travels: bool
    """Whether any rank sends anything."""
    stays: list[Named] = field(default_factory=list)
    sends: list[list[Named]] = field(default_factory=list)
    """By target rank."""
    takes: list[list[Named]] = field(default_factory=list)
    """By source rank."""


class Reshard:
    """An exchange among the ranks of `group`, planned when it is made and run as often as weights are wanted.

    `held`: gives the parameters as they are in training, by name, on every rank (DTensors, or plain ones that
    every rank has whole); it is asked at each run, since they may move. `wanted`: the boxes that this rank
    wants, possibly none. `dtypes`: in which they arrive. `device`: where buffers are made. All ranks of the
    group make it and run it together; no group: the default one, or this process alone.
    """

    def __init__(
        self,
        held: Callable[[], Mapping[str, Tensor]],
        wanted: Boxes,
        dtypes: Mapping[str, torch.dtype],
        *,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        now = held()
        assert set(wanted) <= set(now), f"nobody holds {sorted(set(wanted) - set(now))[:3]}"
        self.held, self.wanted, self.device, self.group = held, dict(wanted), torch.device(device), group
        self.rank, self.world_size = rank_and_size(group)
        self.boxes = {name: own_box(tensor) for name, tensor in now.items()}
        self.dtypes = {name: dtypes[name] for name in now}
        have, want = (gather_objects(boxes, group) for boxes in (self.boxes, self.wanted))
        parameters = {name: Parameter(tuple(tensor.shape), self.dtypes[name]) for name, tensor in now.items()}
        plan = make_plan(have, want, parameters, bucket_bytes)
        self._work = _work_of(plan, self.rank, self.world_size)
        self._answers_for = {name for name, owners in plan.owners.items() if self.rank in owners}
        self.bytes_sent = 0
        """Since it was made, and so `bytes_received`; what a rank copies from itself is in neither."""
        self.bytes_received = 0

    @torch.no_grad()
    def run(self, out: Mapping[str, Tensor]) -> None:
        """Fill `out`: tensors of the shapes of the wanted boxes and of their dtypes."""
        held = {name: local(tensor) for name, tensor in self.held().items()}
        for work in self._work:
            for name, box in work.stays:
                self._put(out, name, box, held[name][box.within(self.boxes[name])])
            if work.travels:
                self._exchange(work, held, out)

    def _exchange(self, work: _Work, held: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        num_out, num_in = (
            [sum(box.numel for _, box in some) for some in all_] for all_ in (work.sends, work.takes)
        )
        outgoing, incoming = (
            torch.empty(sum(counts), dtype=work.dtype, device=self.device) for counts in (num_out, num_in)
        )
        for part, name, box in _cut(outgoing, work.sends):
            part.copy_(held[name][box.within(self.boxes[name])])
        size = work.dtype.itemsize
        splits_in, splits_out = ([count * size for count in counts] for counts in (num_in, num_out))
        # as bytes, which every backend carries
        dist.all_to_all_single(
            incoming.view(torch.uint8), outgoing.view(torch.uint8), splits_in, splits_out, group=self.group
        )
        for part, name, box in _cut(incoming, work.takes):
            self._put(out, name, box, part)
        self.bytes_sent += outgoing.nbytes
        self.bytes_received += incoming.nbytes

    def _put(self, out: Mapping[str, Tensor], name: str, box: Box, value: Tensor) -> None:
        out[name][box.within(self.wanted[name])].copy_(value)

    @torch.no_grad()
    def checksums(self, take: Take = anew) -> Tensor:
        """[number of parameters] int64 on the CPU: of each whole parameter as it is held now, cast to the
        dtype it arrives in.

        `take`: which of this rank's numbers are computed and which remembered.
        """
        sums = torch.zeros(len(self.boxes), dtype=torch.int64, device=self.device)
        for index, (name, tensor) in enumerate(self.held().items()):
            if name in self._answers_for:
                sums[index] = take(name, partial(self._sum, name, tensor))
        if self.world_size > 1:
            dist.all_reduce(sums, group=self.group)
        return sums.cpu()

    def _sum(self, name: str, tensor: Tensor) -> Tensor:
        return bit_sum(local(tensor).to(self.dtypes[name]), self.boxes[name])


def _work_of(plan: Plan, rank: int, world_size: int) -> list[_Work]:
    """This rank's routes; routes of equal pieces (a model has many) are looked at once."""
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
                (
                    work.stays
                    if source == target
                    else work.sends[target]
                    if source == rank
                    else work.takes[source]
                ).append((name, box))
        found.append(work)
    return found


def _cut(flat: Tensor, by_rank: Sequence[Sequence[Named]]) -> Iterator[tuple[Tensor, str, Box]]:
    """A flat buffer as the boxes that lie in it one after the other."""
    offset = 0
    for some in by_rank:
        for name, box in some:
            yield flat[offset : offset + box.numel].view(box.shape), name, box
            offset += box.numel
