"""Weights of a trainer that rest in CPU memory between its phases (`fsdp_config.param_offload`): on the
device while they are read.
"""

from __future__ import annotations

from hybridflow.engines import TrainEngine
from hybridflow.rollout.base import WeightSource


class RestingWeights:
    """Implements `WeightSource`: over the trainer's own module, which stays on the device while the engine is
    awake, or over another source that reads it (`inner`), which has the weights of its own once they are
    acquired.
    """

    def __init__(self, engine: TrainEngine, inner: WeightSource | None) -> None:
        self.engine, self.inner = engine, inner
        self._on_the_device = False

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
        """Let the weights rest again, or free the inner source's; a second time, nothing happens."""
        if self.inner is not None:
            self.inner.release()
        else:
            self._let_go()

    def _let_go(self) -> None:
        if self._on_the_device:
            self.engine.offload()
        self._on_the_device = False
