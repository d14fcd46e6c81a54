"""The exchange of rows among ranks through which gradients flow."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class AllToAll(torch.autograd.Function):
    """Exchange of rows [R, ...] among the ranks of a group, whose gradient goes the way back.

    `sends` has the number of rows for each rank, `receives` the number from each; None means equal counts.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: dist.ProcessGroup, sends: list[int] | None, receives: list[int] | None
    ) -> Tensor:
        ctx.way_back = (group, receives, sends)
        return exchange(rows, group, sends, receives)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange(grads[0], *ctx.way_back), None, None, None


def exchange(
    rows: Tensor, group: dist.ProcessGroup, sends: list[int] | None, receives: list[int] | None
) -> Tensor:
    """Send rows to the ranks of a group and return those that they sent, as `AllToAll` without a gradient."""
    count = len(rows)
    if receives is not None:
        count = sum(receives)
    received = rows.new_empty((count, *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
    return received
