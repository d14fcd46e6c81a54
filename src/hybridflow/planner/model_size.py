"""The sizes of a model, as plain numbers: counted on the meta device (`models/files/size.py`) or from
config.json alone (`model_shape.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hybridflow.distributed.layout import ParallelLayout


@dataclass(frozen=True)
class Count:
    """Numbers of parameters of a model or a part of it; shared ones count once."""

    all: int
    trained: int
    cut: int = 0
    """Number of all parameters that tensor parallelism cuts, without those of experts."""
    cut_trained: int = 0
    """Number of trained parameters that tensor parallelism cuts, without those of experts."""
    experts: int = 0
    """Number of all parameters that are in routed experts."""
    experts_trained: int = 0
    """Number of trained parameters that are in routed experts."""

    def on_rank(self, tensor: int, shards: int = 1, *, parts: float | None = None) -> Count:
        """Return a rank's numbers if `tensor` ranks cut the layers, and `shards` share each slice.

        `parts` is the number of ranks that experts are spread over before `shards` share them, those of
        `tensor` if it is None.
        """
        dealt = parts or tensor

        def held(count: int, cut: int, experts: int) -> int:
            return math.ceil((count - cut - experts + cut // tensor + int(experts / dealt)) / shards)

        return Count(
            held(self.all, self.cut, self.experts),
            held(self.trained, self.cut_trained, self.experts_trained),
        )


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
    num_heads: int
    """Query heads of a layer."""
    num_kv_heads: int
    head_dim: int
    """Numbers of a key, and of a value, that the native engine keeps for a head; where the two differ, of
    their mean.
    """
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
    quantized: int = 0
    """Parameters of all that are held in 4 bits."""
    largest_quantized: int = 0
    """Parameters of the largest weight that is."""

    def at_rest(self, layout: ParallelLayout) -> Count:
        """Return the numbers of the parameters that the fullest rank has between passes, besides those in 4
        bits, which each rank has whole.

        Dense layers are split over the ranks of `tp`, experts over those of `ep`, and FSDP shards what
        either leaves over all others of a stage: so both are divided by `dp_shard` × `tp`. Without expert
        parallelism FSDP cuts between experts only, and each rank has whole ones.
        """
        parts: float = layout.tp
        if self.experts and layout.ep == 1:
            parts = self.experts / (math.ceil(self.experts / layout.dp_shard) * layout.dp_shard)
        others = replace(self.whole, all=self.whole.all - self.quantized)
        return others.on_rank(layout.tp, layout.dp_shard * layout.pp, parts=parts)
