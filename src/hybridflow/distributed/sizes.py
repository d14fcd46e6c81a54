"""The parallel sizes of one model: plain numbers that the driver knows before any process has started."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridflow.errors import ConfigError


@dataclass(frozen=True)
class ParallelSizes:
    """The way in which the ranks of a pool divide the work of one model.

    Raises ConfigError, naming the keys, for sizes that do not go together.

    Example: 8 ranks, `sequence=2`, `fsdp_size=4`: 4 parts of the rows, each computed by 2 ranks; every 4
    ranks hold one copy of the parameters, so there are 2 copies.
    """

    world_size: int = 1
    fsdp_size: int = -1
    """Number of ranks that share one copy of the parameters; -1 means all."""
    sequence: int = 1
    """Number of ranks that share the tokens of each row."""
    tensor: int = 1
    """Number of ranks that split each dense layer."""

    def __post_init__(self) -> None:
        if self.sequence > 1 and self.tensor > 1:
            raise ConfigError(
                f"ulysses_sequence_parallel_size={self.sequence} and "
                f"fsdp_config.tensor_parallel_size={self.tensor} cannot be combined: set one of them to 1"
            )
        for key, size in (
            ("ulysses_sequence_parallel_size", self.sequence),
            ("fsdp_config.tensor_parallel_size", self.tensor),
        ):
            if size < 1 or self.world_size % size:
                raise ConfigError(
                    f"{key}={size} does not divide the {self.world_size} ranks of the pool: set it to a "
                    "divisor of them"
                )
        ranks = self.world_size // self.tensor
        if self.fsdp_size != -1 and (self.fsdp_size < 1 or ranks % self.fsdp_size):
            split = ""
            if self.tensor > 1:
                split = f" ({self.world_size} ranks / tensor_parallel_size {self.tensor})"
            raise ConfigError(
                f"fsdp_config.fsdp_size={self.fsdp_size} does not divide {ranks} ranks{split}: set it to a "
                "divisor, or to -1"
            )

    @property
    def data(self) -> int:
        """Number of parts that the rows are dealt into."""
        return self.world_size // (self.sequence * self.tensor)

    @property
    def shards(self) -> int:
        """Number of ranks that share one copy of the parameters, or of a tensor-parallel slice of it."""
        if self.fsdp_size == -1:
            return self.world_size // self.tensor
        return self.fsdp_size

    @property
    def copies(self) -> int:
        """Number of copies of the parameters, between which only gradients are summed; 1 without HSDP."""
        return self.world_size // self.tensor // self.shards

    def axes(self) -> tuple[tuple[str, int], ...]:
        """Return the mesh over which calls are dispatched, as (name, size) with the slowest axis first.

        Axes of size 1 are left out, except `dp`.
        """
        inner = (("sp", self.sequence), ("tp", self.tensor))
        return (("dp", self.data), *(axis for axis in inner if axis[1] > 1))

    def data_rank(self, rank: int) -> int:
        """Return the number of the part of the rows that `rank` computes."""
        return rank // (self.sequence * self.tensor)

    def is_leader(self, rank: int) -> bool:
        """Return whether `rank` is the first of those that compute the same rows, whose outputs count."""
        return rank % (self.sequence * self.tensor) == 0

    def __str__(self) -> str:
        named = {
            "copies": self.copies,
            "shards": self.shards,
            "sequence": self.sequence,
            "tensor": self.tensor,
        }
        assert math.prod((self.copies, self.shards, self.tensor)) == self.world_size
        return (
            f"{self.world_size} ranks "
            f"({', '.join(f'{name} {size}' for name, size in named.items() if size > 1) or 'whole'})"
        )
