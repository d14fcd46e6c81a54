"""Tokens that several rows share: reading them at every place where they stand, and the gradient, which is
the sum over those places.

    tokens [N] ──index [P], an entry may come several times──► places [P]         backward: places [P] ──sum
    by token──► tokens [N]

Sums are made of gathers in a fixed order: as fast as copies, and the same to the bit each time, on a GPU too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Places(NamedTuple):
    """The places of all tokens that stand at equally many of them."""

    tokens: Tensor
    """[T] int64, distinct."""
    places: Tensor
    """[T, c] int64."""


class SharedTokens:
    """Where each token stands: `index` [P] int64 says it of places, `real` [P] bool which of them count
    (None: all).
    """

    def __init__(self, index: Tensor, real: Tensor | None, device: torch.device | str) -> None:
        places = torch.arange(len(index)) if real is None else real.nonzero()[:, 0]
        order = index[places].argsort(stable=True)
        tokens, counts = index[places][order].unique_consecutive(return_counts=True)
        first = counts.cumsum(0) - counts
        self.first_places = places[order[first]].to(device)
        """[tokens in use] int64: where each token stands for the first time, tokens ascending."""
        self.parts: list[Places] = []
        for count in counts.unique().tolist():
            having = counts == count
            where = places[order[first[having][:, None] + torch.arange(count)]]
            self.parts.append(Places(tokens[having].to(device), where.to(device)))

    def spread(self, tokens: Tensor, index: Tensor) -> Tensor:
        """Tokens [N, ...] at the places of `index` [P] -> [P, ...]; places that do not count give no
        gradient.
        """
        spread: Tensor = _Spread.apply(tokens, index, self)  # type: ignore[no-untyped-call]
        return spread

    def sum(self, places: Tensor, num_tokens: int) -> Tensor:
        """[P, ...] summed by token -> [num_tokens, ...], 0 for tokens that stand nowhere."""
        total = places.new_zeros(num_tokens, *places.shape[1:])
        for part in self.parts:
            found = places.index_select(0, part.places.flatten())
            total.index_copy_(
                0,
                part.tokens,
                found if part.places.shape[1] == 1 else found.unflatten(0, part.places.shape).sum(1),
            )
        return total


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, index: Tensor, shared: SharedTokens) -> Tensor:
        ctx.shared, ctx.num_tokens = shared, tokens.shape[0]
        return tokens.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.shared.sum(grads[0], ctx.num_tokens), None, None
