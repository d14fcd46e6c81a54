"""The sizes of a model, as plain numbers: counted on the meta device (`models/size.py`) or from config.json
alone (`model_shape.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Count:
    """Numbers of parameters of a model or a part of it; shared ones count once."""

    all: int
    trained: int
    cut: int = 0
    """Number of all parameters that tensor parallelism cuts."""
    cut_trained: int = 0
    """Number of trained parameters that tensor parallelism cuts."""

    def on_rank(self, tensor: int, shards: int = 1) -> Count:
        """Return a rank's numbers if `tensor` ranks cut the layers and `shards` share each slice."""

        def held(count: int, cut: int) -> int:
            return math.ceil((count - cut + cut // tensor) / shards)

        return Count(held(self.all, self.cut), held(self.trained, self.cut_trained))


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model."""

    whole: Count
    root: Count
    """Parameters outside of the blocks: embeddings, last norm, head."""
    block: Count
    """Parameters of the largest block."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Activations of the widest feed-forward part for a token: of experts those that it is routed to."""
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    itemsize: int
    """Bytes of one number in the compute dtype."""
    active: int
    """Parameters that a token is multiplied with: of experts those that it is routed to."""
    experts: int
    """Experts of a sparse layer; 0 for a dense model."""
    experts_per_token: int
    tower: Count = Count(0, 0)
    """Parameters of the part that reads pictures; 0 for a model of text."""
