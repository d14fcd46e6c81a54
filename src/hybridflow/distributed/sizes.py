"""How many ranks share what: plain numbers, known to the driver before any process is there."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridflow.errors import ConfigError


@dataclass(frozen=True)
class ParallelSizes:
    """How the ranks of a pool divide the work of one model. Raises ConfigError, naming the keys, for sizes
    that do not go together.

    Example: 8 ranks, `sequence=2`, `fsdp_size=4`: 4 parts of the rows, each computed by 2 ranks; every 4
    ranks hold one copy of the parameters, so there are 2 copies.
    """

    world_size: int = 1
    fsdp_size: int = -1
    """Ranks that share one copy of the parameters; -1: all."""
    sequence: int = 1
    """Ranks that share the tokens of each row."""
    tensor: int = 1
    """Ranks that split each dense layer."""

    def __post_init__(self) -> None:
        if self.sequence > 1 and self.tensor > 1:
            raise ConfigError(
                f"ulysses_sequence_parallel_size={self.sequence} and "
                f"fsdp_config.tensor_parallel_size={self.tensor} cannot be combined: "
                "set one of them to 1"
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
            split = (
                f" ({self.world_size} ranks / tensor_parallel_size {self.tensor})" if self.tensor > 1 else ""
            )
            raise ConfigError(
                f"fsdp_config.fsdp_size={self.fsdp_size} does not divide {ranks} ranks{split}: set it to a "
                "divisor, or to -1"
            )

    @property
    def data(self) -> int:
        """Parts that the rows are dealt into."""
        return self.world_size // (self.sequence * self.tensor)

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the parameters (each of them a tensor-parallel slice of it)."""
        return self.world_size // self.tensor if self.fsdp_size == -1 else self.fsdp_size

    @property
    def copies(self) -> int:
        """Copies of the parameters, which only sum gradients: 1 but with HSDP."""
        return self.world_size // self.tensor // self.shards

    def axes(self) -> tuple[tuple[str, int], ...]:
        """The mesh over which calls are dispatched, slowest axis first; axes of size 1 but `dp` are left out."""
        inner = (("sp", self.sequence), ("tp", self.tensor))
        return (("dp", self.data), *(axis for axis in inner if axis[1] > 1))

    def data_rank(self, rank: int) -> int:
        """Which part of the rows `rank` computes."""
        return rank // (self.sequence * self.tensor)

    def is_leader(self, rank: int) -> bool:
        """Whether `rank` is the first of those that compute the same rows: its outputs count."""
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
