"""An `external_lib`: one bit of a weight flips in the generating process after version 1 has arrived."""

from __future__ import annotations

import functools
from typing import Any

import torch

from hybridflow.workers.rollout import RolloutWorker

real = RolloutWorker.update_weights


@functools.wraps(real)
def update_weights(self: RolloutWorker, *args: Any, **named: Any) -> Any:
    took = real(self, *args, **named)
    if named.get("version") == 1 and hasattr(self.engine, "policy"):
        weight = dict(self.engine.policy.named_parameters())["hf.model.layers.0.mlp.down_proj.weight"]
        weight.detach().view(torch.int32)[3, 5] ^= 1
    return took


RolloutWorker.update_weights = update_weights  # type: ignore[method-assign]
