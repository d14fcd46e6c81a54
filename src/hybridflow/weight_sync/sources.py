"""Weights of a trainer that generates itself: gathered from shards into a second module (the twin), and on
the device while they are read (`fsdp_config.param_offload`).

shards of the trainer ──Reshard──► the twin's parameters (all, or this rank's slices) ──► checksums compared
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridflow.distributed.process_group import min_over
from hybridflow.engines import TrainEngine
from hybridflow.errors import RolloutError
from hybridflow.models.twin import Twin
from hybridflow.rollout.base import WeightSource
from hybridflow.weight_sync.holding import Holding, explain_difference, first_difference
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
