"""Tokens that rows share: gathered to each of their places; the gradient is the sum over these.

    forward:   tokens [N] ──index [P], an entry may come several times──► places [P]
    backward:  places [P] ──sum by token──► tokens [N]

Sums are made of gathers in a fixed order: as fast as copies, and the same to the bit each time, on a GPU too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridflow.distributed.transfers import all_to_device


class Places(NamedTuple):
    """The places of all tokens that have the same number of places."""

    tokens: Tensor
    """Distinct tokens [T] int64."""
    places: Tensor
    """Their places [T, c] int64."""


class SharedTokens:
    """The places of each token: `index` [P] int64 is the token at each place.

    `real` [P] bool marks the places that count; None means all.
    """

    def __init__(self, index: Tensor, real: Tensor | None, device: torch.device | str) -> None:
        places = torch.arange(len(index))
        if real is not None:
            places = real.nonzero()[:, 0]
        order = index[places].argsort(stable=True)
        tokens, counts = index[places][order].unique_consecutive(return_counts=True)
        first = counts.cumsum(0) - counts
        self.first_places = places[order[first]]
        """First place of each token in use, [tokens in use] int64 on the host, tokens ascending."""
        of_count: dict[str, Tensor] = {}
        for count in counts.unique().tolist():
            having = counts == count
            of_count[f"tokens of {count}"] = tokens[having]
            of_count[f"places of {count}"] = places[order[first[having][:, None] + torch.arange(count)]]
        moved = list(all_to_device(of_count, torch.device(device)).values())
        self.parts = [Places(*pair) for pair in zip(moved[::2], moved[1::2], strict=True)]

    def spread(self, tokens: Tensor, index: Tensor) -> Tensor:
        """Gather tokens [N, ...] at `index` [P] -> [P, ...]; places that do not count give no gradient."""
        spread: Tensor = _SpreadTokens.apply(tokens, index, self)  # type: ignore[no-untyped-call]
        return spread

    def sum(self, places: Tensor, num_tokens: int) -> Tensor:
        """Sum [P, ...] by token -> [num_tokens, ...], 0 for tokens without a place."""
        total = places.new_zeros(num_tokens, *places.shape[1:])
        for part in self.parts:
            found = places.index_select(0, part.places.flatten())
            if part.places.shape[1] > 1:
                found = found.unflatten(0, part.places.shape).sum(1)
            total.index_copy_(0, part.tokens, found)
        return total


class _SpreadTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, index: Tensor, shared: SharedTokens) -> Tensor:
        ctx.shared = shared
        ctx.num_tokens = tokens.shape[0]
        return tokens.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.shared.sum(grads[0], ctx.num_tokens), None, None
