"""What a policy loss is to those who call it: a function, and as data what it wants of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput, LossScale


@dataclass(frozen=True)
class PolicyLoss:
    """A loss with what it needs, as data. Its keyword-only arguments are parameters of the run or columns of the batch, by name."""

    function: Callable[..., LossOutput]
    agg_mode: str = "token-mean"
    """The aggregation of its paper, in force where none is asked for."""
    select: Callable[..., dict[str, Tensor]] | None = None
    """For a loss that must see the whole mini-batch first: (log_prob, old_log_prob, advantages, response_mask, generator, **parameters)
    -> columns [B, R] that the loss then takes by name."""
    keeps_groups: bool = False
    """True: the rows of one prompt must be in one micro-batch."""

    @property
    def keywords(self) -> frozenset[str]:
        """Names of the arguments it takes by keyword, beside those that every loss has."""
        named = inspect.signature(self.function).parameters.values()
        return frozenset(p.name for p in named if p.kind is p.KEYWORD_ONLY)

    def __call__(
        self,
        log_prob: Tensor,
        old_log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        scale: LossScale,
        rollout_is_weights: Tensor | None = None,
        *,
        available: Mapping[str, Any],
    ) -> LossOutput:
        """Call the function with what it names out of `available`."""
        chosen = {name: available[name] for name in self.keywords if name in available}
        return self.function(log_prob, old_log_prob, advantages, response_mask, scale, rollout_is_weights, **chosen)
