"""The table entry of a policy loss: its function, and its requirements as data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter, Signature
from typing import Any

from torch import Tensor

from hybridflow.algorithms.aggregation import LossOutput
from hybridflow.algorithms.catalog import LOSS_ARGUMENTS, LOSS_INPUTS, takes_by_place
from hybridflow.algorithms.policy_losses.inputs import LossInputs
from hybridflow.errors import ConfigError


@dataclass(frozen=True)
class PolicyLoss:
    """A loss with its requirements as data.

    Its arguments are filled by name: `inputs` (`LossInputs`) or single fields of these, parameters of the
    run, and columns of the batch. Its signature is looked at once.
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

    @cached_property
    def _named(self) -> dict[str, Parameter]:
        return _named(self.function)

    @cached_property
    def _signature(self) -> Signature:
        return inspect.signature(self.function)

    @property
    def keywords(self) -> tuple[str, ...]:
        """Names of its arguments beside its inputs: parameters of the run, or columns of the batch."""
        return tuple(name for name in self._named if name not in (LOSS_INPUTS, *LOSS_ARGUMENTS))

    def arguments(self, inputs: LossInputs, others: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return what the function names out of its inputs and `others` (columns of the rows, parameters), by
        position and by name.

        `**rest` takes all that is available. A function that takes `*args`, such as one that wraps another,
        gets `LOSS_ARGUMENTS` by position, unless it names them in another order. One that takes `inputs` has
        its own `loss_agg_mode` where the run sets none. Raises ConfigError where an argument without a
        default is not there.
        """
        available = {**others, **{name: getattr(inputs, name) for name in LOSS_ARGUMENTS}}
        named = self._named
        if LOSS_INPUTS in named:
            available[LOSS_INPUTS] = inputs
            if available.get("loss_agg_mode") is None:
                available.pop("loss_agg_mode", None)
        places: list[Any] = []
        if takes_by_place(self._signature):
            places = [available[name] for name in LOSS_ARGUMENTS]
            named = {name: each for name, each in named.items() if each.kind is Parameter.KEYWORD_ONLY}
        needed = [name for name, each in named.items() if each.default is each.empty]
        missing = [name for name in needed if name not in available]
        if missing:
            raise ConfigError(
                f"policy loss {self.name} needs {', '.join(missing)}; there are "
                f"{', '.join(sorted(available))}"
            )
        names = [name for name in named if name in available]
        kinds = {each.kind for each in self._signature.parameters.values()}
        if Parameter.VAR_KEYWORD in kinds and not places:
            names = list(available)
        return places, {name: available[name] for name in names}

    def checked(self, result: Any) -> LossOutput:
        """Return the function's result. Raises ConfigError where it is no LossOutput of one number."""
        if fault := _fault(result):
            raise ConfigError(f"policy loss {self.name} returned {fault}")
        found: LossOutput = result
        return found

    @property
    def name(self) -> str:
        """Name of the function."""
        return str(getattr(self.function, "__name__", self.function))

    def select_arguments(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of `available` that its `select` takes by keyword."""
        named = {} if self.select is None else _named(self.select)
        keywords = [name for name, each in named.items() if each.kind is Parameter.KEYWORD_ONLY]
        return {name: available[name] for name in keywords if name in available}


def _fault(result: Any) -> str:
    """Return what is wrong with the result of a loss, and what was wanted, or ""."""
    if not isinstance(result, LossOutput):
        return f"a {type(result).__name__}, wanted LossOutput(loss, metrics)"
    if not isinstance(result.loss, Tensor):
        return f"a {type(result.loss).__name__} as its loss, wanted a tensor of one number, with its gradient"
    if result.loss.dim():
        shape = list(result.loss.shape)
        return f"a loss of the shape {shape}, wanted one number: `aggregate` makes one of a number a token"
    for name, ratio in result.metrics.items():
        if not isinstance(ratio, tuple) or len(ratio) != 2:
            return f"a {type(ratio).__name__} as the metric {name}, wanted a pair: numerator, denominator"
    return ""


def _named(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the arguments of a function that can be given by name."""
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return {name: each for name, each in inspect.signature(function).parameters.items() if each.kind in kinds}
