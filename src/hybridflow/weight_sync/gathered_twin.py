"""Weights of a sharded policy, gathered into a second module (the twin) while that generates.

shards of the trainer ──Reshard──► the twin's parameters (all, or this rank's slices) ──► checksums compared
"""

from __future__ import annotations

from hybridflow.distributed.process_group import min_over
from hybridflow.errors import RolloutError
from hybridflow.models.twin import Twin
from hybridflow.weight_sync.checksum import explain_difference, first_difference
from hybridflow.weight_sync.holding import Holding
from hybridflow.weight_sync.reshard import HeldWeights, Reshard


class GatheredTwin:
    """A `WeightSource` for `twin`, filled from the parts of all ranks, which make and use it together."""

    def __init__(self, held: HeldWeights, twin: Twin) -> None:
        self.twin = twin
        self.holding = Holding.of(twin, {each.name: each.shape for each in held()})
        self.reshard = Reshard(held, self.holding.boxes, device=twin.device)

    def acquire(self, version: int) -> None:
        """Gather the weights as they are now; RolloutError on all ranks where a checksum differs on any."""
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
