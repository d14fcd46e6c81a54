"""Weights of a trainer that offloads them to CPU memory between its phases (`fsdp_config.param_offload`):
they are on the device while they are read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridflow.engines import TrainEngine
from hybridflow.rollout.base import WeightSource


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
