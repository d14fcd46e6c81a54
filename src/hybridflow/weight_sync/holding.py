"""The part of each parameter that a generating rank holds, and its checksums: when they are computed again,
and the message where two of them differ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hybridflow.distributed.process_group import ReplicaRanks
from hybridflow.distributed.shards import Box, bit_sum
from hybridflow.models.copies.twin import Twin
from hybridflow.models.policy import PolicyModel

Take = Callable[[str, Callable[[], Tensor]], Tensor]
"""(name of a tensor, function that computes its checksum) -> its checksum."""
TURNS = 16


def anew(name: str, compute: Callable[[], Tensor]) -> Tensor:
    """Compute a checksum each time it is asked for."""
    return compute()


class Remembered:
    """Remembered checksums of tensors that nothing should write, such as the base under adapters.

    At each push one of `TURNS` parts of them is computed again, so that a frozen tensor that was written by
    mistake is found within as many pushes. Tensors in `written` are computed each time.
    """

    def __init__(self) -> None:
        self._known: dict[str, Tensor] = {}
        self._places: dict[str, int] = {}

    def at(self, push: int, written: Collection[str]) -> Take:
        """Return the function that gives checksums at push number `push`."""

        def take(name: str, compute: Callable[[], Tensor]) -> Tensor:
            if name in written:
                self._known.pop(name, None)
                return compute()
            place = self._places.setdefault(name, len(self._places))
            if name not in self._known or (push - place) % TURNS == 0:
                self._known[name] = compute()
            return self._known[name]

        return take


def first_difference(sent: Tensor, arrived: Tensor) -> int:
    """Return the index of the first of n checksums, [n] int64, that differs; n where all are equal."""
    wrong = (sent != arrived).nonzero()
    return int(min(wrong, default=len(sent)))


def explain_difference(name: str, sent: Tensor, arrived: Tensor, *, version: int) -> str:
    """Return the message for a weight that arrived otherwise than sent, on this rank or another."""
    here = f"is {int(arrived) % 2**64:016x}"
    if int(sent) == int(arrived):
        here = "differs on another rank"
    return (
        f"weights of version {version} did not arrive as the trainer holds them: the first that differs is "
        f"{name}, whose checksum there is {int(sent) % 2**64:016x} and here {here}. Nothing was generated "
        "with them"
    )


@dataclass(frozen=True)
class Holding:
    """The boxes of the parameters that one rank holds, by name and in the model's order.

    Parameters in `cut` are slices, and the other ranks of `replica` hold the rest of them.
    """

    boxes: dict[str, Box]
    cut: frozenset[str]
    replica: ReplicaRanks

    @classmethod
    def whole(cls, policy: PolicyModel) -> Holding:
        """Return the holding of a rank that has all of an unsharded policy."""
        return cls(
            {name: Box.whole(parameter.shape) for name, parameter in policy.named_parameters()},
            frozenset(),
            ReplicaRanks(),
        )

    @classmethod
    def of(cls, twin: Twin, shapes: Mapping[str, tuple[int, ...]]) -> Holding:
        """Return the holding of a twin; `shapes` are those of the whole parameters."""
        boxes = {name: Box.whole(shape) for name, shape in shapes.items()}
        for name, dim in twin.slices.items():
            boxes[name] = boxes[name].cut(dim, twin.replica.rank, twin.replica.size)
        odd = [name for name, box in boxes.items() if box.shape != twin.shapes[name]]
        assert not odd, f"{odd[:3]}: the twin's slice has another shape than the box that it holds"
        return cls(boxes, frozenset(twin.slices), twin.replica)

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """Return the part of a whole tensor that belongs to this rank."""
        return tensor[self.boxes[name].within(Box.whole(tensor.shape))]

    @torch.no_grad()
    def checksums(self, parameters: Mapping[str, Tensor], take: Take = anew) -> Tensor:
        """Return a checksum of each whole parameter, [number of parameters] int64 on the CPU.

        The ranks of the replica call this together. `take` decides which of this rank's checksums are
        computed and which are remembered.
        """
        sums = torch.stack(
            [take(name, partial(bit_sum, parameters[name].detach(), box)) for name, box in self.boxes.items()]
        )
        sliced = torch.tensor([name in self.cut for name in self.boxes], device=sums.device)
        return torch.where(sliced, self.replica.sum_(sums * sliced), sums).cpu()
