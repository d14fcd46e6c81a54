"""The result of an advantage estimator, and the table entry that states its requirements."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hybridflow.errors import ConfigError


@dataclass(frozen=True)
class Advantages:
    """Both [B, R] float, in units of the score, 0 outside the mask."""

    advantages: Tensor
    """How much better each token did than expected."""
    returns: Tensor
    """What the value at each token should have been."""


@dataclass(frozen=True)
class AdvantageEstimator:
    """A function with its requirements, which `of` reads from its signature."""

    function: Callable[..., Any]
    needs: tuple[str, ...]
    """Fields and parameters it cannot do without; it gets its arguments by these names."""
    takes: tuple[str, ...]
    """Further arguments that it takes where they are available."""
    takes_all: bool
    """True: it takes every field that is available."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> AdvantageEstimator:
        """Return the entry of a function: arguments without a default are needed, others are taken if
        available.

        `**rest` takes all that is available.
        """
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return cls(
            function,
            needs=tuple(p.name for p in named if p.default is p.empty),
            takes=tuple(p.name for p in named if p.default is not p.empty),
            takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
        )

    def __call__(self, available: Mapping[str, Any]) -> Advantages:
        """Call the function with what it names out of `available` (fields of the batch, `group_ids`,
        parameters).

        Raises ConfigError where a needed name is not there, and where the result is not two tensors [B, R].
        """
        missing = [name for name in self.needs if name not in available]
        if missing:
            raise ConfigError(
                f"advantage estimator {self.name} needs {', '.join(missing)}; there are "
                f"{', '.join(sorted(available))}"
            )
        names = [name for name in (*self.needs, *self.takes) if name in available]
        if self.takes_all:
            names = list(available)
        result = self.function(**{name: available[name] for name in names})
        shape = available["response_mask"].shape
        parts = result if isinstance(result, tuple) else (result,)
        if isinstance(result, Advantages):
            parts = (result.advantages, result.returns)
        if len(parts) != 2 or any(getattr(part, "shape", None) != shape for part in parts):
            raise ConfigError(
                f"advantage estimator {self.name} must return Advantages(advantages, returns), both "
                f"{tuple(shape)}; it returned {' and '.join(map(_kind, parts)) or 'nothing'}"
            )
        return Advantages(*parts)  # a user's own may return a plain pair

    @property
    def name(self) -> str:
        """Name of the function."""
        return str(getattr(self.function, "__name__", self.function))


def _kind(value: Any) -> str:
    """Return what a value is: its type, and its shape where it has one."""
    shape = getattr(value, "shape", None)
    name = f"a {type(value).__name__}"
    return name if shape is None else f"{name} {tuple(shape)}"
