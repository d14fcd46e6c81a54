"""Where the tokens of a pass are stored: rows and positions, as flat indices into a layer of a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.distributed.transfers import to_device


class Places:
    """The row and the position [N] int64 at which each of N tokens is stored."""

    def __init__(self, rows: Tensor, positions: Tensor) -> None:
        self.rows = rows
        self.positions = positions
        self._flat: dict[tuple[int, int], Tensor] = {}

    @classmethod
    def of_spans(
        cls,
        rows: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> Places:
        """Return the places of spans one after the other: counts[i] tokens of rows[i], from starts[i] on."""
        count = torch.tensor(counts)
        shift = torch.tensor(starts) - (count.cumsum(0) - count)
        positions = torch.arange(sum(counts)) + shift.repeat_interleave(count)
        device = torch.device(device)
        return cls(
            to_device(torch.tensor(rows).repeat_interleave(count), device), to_device(positions, device)
        )

    def flat(self, kv_heads: int, capacity: int) -> Tensor:
        """Return the place of each token and head in a layer seen as [rows * KV * capacity, D]: [N * KV].

        It is computed once and serves all layers.
        """
        known = self._flat.get((kv_heads, capacity))
        if known is None:
            heads = torch.arange(kv_heads, device=self.rows.device) * capacity
            known = ((self.rows * (kv_heads * capacity) + self.positions)[:, None] + heads).reshape(-1)
            self._flat[(kv_heads, capacity)] = known
        return known

    def in_blocks(self, table: Tensor, block_size: int) -> Tensor:
        """Return the place of each token in a layer seen as [blocks * block_size, KV, D]: [N] int64.

        `table` [rows, n] has the blocks of each row.
        """
        known = self._flat.get((0, block_size))
        if known is None:
            blocks = table[self.rows, torch.div(self.positions, block_size, rounding_mode="floor")].long()
            known = self._flat[(0, block_size)] = blocks * block_size + self.positions % block_size
        return known
