"""The table entry of a policy loss: its function, and as data what it needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput


@dataclass(frozen=True)
class PolicyLoss:
    """A loss with what it needs, as data.

    Its keyword-only arguments are parameters of the run or columns of the batch, by name.
    """

    function: Callable[..., LossOutput]
    agg_mode: str = "token-mean"
    """The aggregation of its paper, used where the run sets none."""
    select: Callable[..., dict[str, Tensor]] | None = None
    """For a loss that must see the whole mini-batch first: a function (log_prob, old_log_prob, advantages,
    response_mask, generator, **parameters) -> columns [B, R], which the loss then takes by name.
    """
    keeps_groups: bool = False
    """True: a micro-batch holds whole groups, and tokens whose advantage is 0 are left out of `loss_mask`."""

    learns_from: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """For a loss that needs other rows beside a row: a function (advantages, loss_mask, group_ids) -> [B]
    bool of the rows that have them. The others are left out of `loss_mask`, so that no count of the
    mini-batch includes them.
    """

    @property
    def keywords(self) -> tuple[str, ...]:
        """Names of the arguments it takes by keyword."""
        return _keywords(self.function)

    @property
    def select_keywords(self) -> tuple[str, ...]:
        """Names of the arguments that its `select` takes by keyword; none without one."""
        return _keywords(self.select) if self.select is not None else ()

    def arguments(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of `available` that its function takes by keyword."""
        return {name: available[name] for name in self.keywords if name in available}

    def select_arguments(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of `available` that its `select` takes by keyword."""
        return {name: available[name] for name in self.select_keywords if name in available}


def _keywords(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY)
