"""The layout of one model over ranks: plain numbers that the driver knows before any process has started.

rank = (pp, dp_replicate, dp_shard, tp), the slowest first; the ranks of cp are some of dp's, those of ep some
of dp_shard × tp
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelLayout:
    """The way in which ranks divide one model and its rows.

    Example: 8 ranks, `dp_replicate=2, dp_shard=4, cp=2`: every 4 ranks hold one copy of the parameters, and
    every 2 ranks compute the same rows, so the rows are sharded into 4 parts.
    """

    dp_replicate: int = 1
    """Number of copies of the parameters, between which only gradients are summed; 1 without HSDP."""
    dp_shard: int = 1
    """Number of ranks that share one copy of the parameters, or of the slice of it that pp and tp give."""
    cp: int = 1
    """Number of ranks that share the tokens of each row; they are neighbours among those of dp."""
    tp: int = 1
    """Number of ranks that split each dense layer."""
    pp: int = 1
    """Number of stages, each of which has some of the layers."""
    ep: int = 1
    """Number of ranks that share the experts of a layer; neighbours among those of `dp_shard` × `tp`."""

    def __post_init__(self) -> None:
        assert min(self.dp_replicate, self.dp_shard, self.cp, self.tp, self.pp, self.ep) >= 1, f"{self!r}"
        assert (self.dp_replicate * self.dp_shard) % self.cp == 0, f"{self!r}: cp does not divide dp"
        assert self.dp_shard * self.tp % self.ep == 0, f"{self!r}: ep does not divide dp_shard × tp"

    @classmethod
    def from_keys(
        cls,
        world_size: int,
        fsdp_size: int = -1,
        sequence: int = 1,
        tensor: int = 1,
        pipeline: int = 1,
        experts: int = 1,
    ) -> ParallelLayout:
        """Return the layout of `world_size` ranks under `fsdp_config.fsdp_size` (-1 means all ranks),
        `ulysses_sequence_parallel_size`, `fsdp_config.tensor_parallel_size`, `pipeline_parallel_size` and
        `expert_parallel_size`.

        Sizes that do not go together were refused with the keys (`config/layout.py`).
        """
        ranks = world_size // (tensor * pipeline)
        shards = fsdp_size
        if fsdp_size == -1:
            shards = ranks
        given = f"{world_size} ranks, {fsdp_size=}, {sequence=}, {tensor=}, {pipeline=}"
        assert ranks * tensor * pipeline == world_size and ranks % sequence == 0, f"{given}: no divisor"
        assert shards >= 1 and ranks % shards == 0, f"{given}: fsdp_size is no divisor"
        copies = ranks // shards
        return cls(dp_replicate=copies, dp_shard=shards, cp=sequence, tp=tensor, pp=pipeline, ep=experts)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def stage_size(self) -> int:
        """Number of ranks of each stage."""
        return self.world_size // self.pp

    @property
    def data(self) -> int:
        """Number of parts that the rows are sharded into."""
        return self.dp_replicate * self.dp_shard // self.cp

    def axes(self) -> tuple[tuple[str, int], ...]:
        """Return the mesh over which calls are dispatched, as (name, size) with the slowest axis first.

        Axes of size 1 are left out, except `dp`.
        """
        named = (("pp", self.pp), ("dp", self.data), ("sp", self.cp), ("tp", self.tp))
        return tuple(axis for axis in named if axis[0] == "dp" or axis[1] > 1)

    def data_rank(self, rank: int) -> int:
        """Return the number of the part of the rows that `rank` computes; equal for ranks with equal rows."""
        return rank // (self.cp * self.tp) % self.data

    def place(self, rank: int) -> str:
        """Return what `rank` holds of the model, in words: `stage 2 of 2, shard 1 of 4`."""
        within = rank % self.stage_size
        shard = within // self.tp % self.dp_shard
        named = (
            ("stage", rank // self.stage_size, self.pp),
            ("copy", within // (self.tp * self.dp_shard), self.dp_replicate),
            ("shard", shard, self.dp_shard),
            ("experts", within % self.ep, self.ep),
            ("slice", within % self.tp, self.tp),
        )
        parts = [f"{name} {number + 1} of {size}" for name, number, size in named if size > 1]
        return ", ".join(parts) or "the whole model"

    def returns(self, rank: int) -> bool:
        """Return whether `rank` is the one of those with equal rows whose answers and loss count.

        It is the first along cp and tp, and the last along pp, where the answers are computed.
        """
        within_part = rank % (self.cp * self.tp)
        return within_part == 0 and rank // self.stage_size == self.pp - 1

    def __str__(self) -> str:
        named = {
            "stages": self.pp,
            "copies": self.dp_replicate,
            "shards": self.dp_shard,
            "sequence": self.cp,
            "tensor": self.tp,
            "experts": self.ep,
        }
        parts = ", ".join(f"{name} {size}" for name, size in named.items() if size > 1)
        return f"{self.world_size} ranks ({parts or 'whole'})"
