"""Properties, and the result of trying one: held, failed with its input, or not offered.

    @holds("kl", "OpenRLHF #1335", "k1 k2 k3")
    def equal_policies_have_no_kl(call):
        "The estimate is 0 where both policies are equal."
        same(call(x, x, mask), zeros)

The function gets an `AdapterCall`, which calls the adapter's function of the operation with the kind (k1,
then k2, …) as its first argument and remembers its arguments, so that a failure shows its input.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hybridflow.invariants.adapter import NotOffered, TrainerAdapter

NO_ERROR = "no error"
"""What is wanted of a call that has raised one."""
Status = Literal["held", "failed", "not offered"]


class PropertyBroken(Exception):
    """A property does not hold: what came (`got`), and what was wanted, as texts."""

    def __init__(self, got: str, wanted: str) -> None:
        super().__init__(got, wanted)
        self.got = got
        self.wanted = wanted


class AdapterCall:
    """Calls one function of an adapter; its first argument is `kind`, where the operation has kinds.

    The adapter gets copies of tensors, so that nothing which it writes into them reaches a later call.
    """

    def __init__(self, adapter: Any, operation: str, kind: str = "") -> None:
        self.operation = operation
        self.kind = kind
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._function = getattr(adapter, operation, None)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Return what the function returns; NotOffered where there is none."""
        if self._function is None:
            raise NotOffered
        places = (self.kind, *arguments) if self.kind else arguments
        self._given = (places, named)
        result = self._function(
            *map(_copied, places), **{name: _copied(each) for name, each in named.items()}
        )
        if result is NotImplemented:
            raise NotOffered
        return result

    @property
    def given(self) -> str:
        """The arguments of the newest call with the names of `TrainerAdapter`, as text."""
        if self._given is None:
            return ""
        places, named = self._given
        names = list(inspect.signature(getattr(TrainerAdapter, self.operation)).parameters)[1:]
        return " ".join(
            f"{name}={shown(value)}" for name, value in {**dict(zip(names, places)), **named}.items()
        )

    def gradient(self, leaf: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Return the result, detached, and the gradient of its sum by the first argument."""
        leaf = leaf.clone().requires_grad_()
        result = self(leaf, *arguments, **named)
        if not result.requires_grad:
            raise PropertyBroken(
                "a result without a gradient", "one that torch can derive by its first argument"
            )
        (gradient,) = torch.autograd.grad(result.sum(), leaf)
        return result.detach(), gradient


@dataclass(frozen=True)
class Property:
    """A property of one operation of an adapter."""

    name: str
    sentence: str
    source: str
    """Where wrong numbers of this kind were reported, or the formula that says what is right."""
    operation: str
    kinds: tuple[str, ...]
    """The names (of estimators, losses, …) with which it is tried; one empty text where there are none."""
    check: Callable[[AdapterCall], None]


@dataclass(frozen=True)
class PropertyOutcome:
    """The result of a property with one kind."""

    property: str
    kind: str
    status: Status
    given: str = ""
    """The input that failed, with the names of `TrainerAdapter`."""
    got: str = ""
    wanted: str = ""


def holds(
    operation: str, source: str, kinds: str = ""
) -> Callable[[Callable[[AdapterCall], None]], Property]:
    """Make a function the property of its name, whose sentence is its docstring's."""

    def of(check: Callable[[AdapterCall], None]) -> Property:
        sentence = " ".join((check.__doc__ or "").split())
        return Property(check.__name__, sentence, source, operation, tuple(kinds.split()) or ("",), check)

    return of


def try_all(adapter: Any, properties: Iterable[Property]) -> Iterator[PropertyOutcome]:
    """Yield what comes of each property with each of its kinds; whatever one raises, the others go on."""
    for each in properties:
        for kind in each.kinds:
            yield _try(adapter, each, kind)


def _try(adapter: Any, each: Property, kind: str) -> PropertyOutcome:
    call = AdapterCall(adapter, each.operation, kind)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            each.check(call)
    except NotOffered:
        return PropertyOutcome(each.name, kind, "not offered")
    except PropertyBroken as broken:
        return PropertyOutcome(each.name, kind, "failed", call.given, broken.got, broken.wanted)
    except (Exception, SystemExit) as error:  # of the adapter, or of a result that is no tensor
        got = type(error).__name__
        with contextlib.suppress(Exception):  # it may not even say what it is
            got = f"{got}: {error}".partition("\n")[0]
        return PropertyOutcome(each.name, kind, "failed", call.given, got, NO_ERROR)
    return PropertyOutcome(each.name, kind, "held")


def close(got: Tensor, wanted: Tensor, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Raise PropertyBroken unless |got − wanted| ≤ atol + rtol·|wanted| everywhere; NaN is never close."""
    if got.shape != wanted.shape or not torch.allclose(got.double(), wanted.double(), rtol=rtol, atol=atol):
        raise PropertyBroken(shown(got), f"{shown(wanted)}, off by at most {atol:g} + {rtol:g} of it")


def same(got: Tensor, wanted: Tensor) -> None:
    """Raise PropertyBroken unless both are equal to the bit."""
    if not torch.equal(got, wanted.to(got.dtype)):
        raise PropertyBroken(shown(got), f"{shown(wanted)}, bit for bit")


def finite(*values: Tensor) -> None:
    """Raise PropertyBroken where a number is NaN or infinite."""
    for value in values:
        if not bool(value.isfinite().all()):
            raise PropertyBroken(shown(value), "finite numbers")


def that(truth: bool, got: Any, wanted: str) -> None:
    """Raise PropertyBroken unless `truth`."""
    if not truth:
        raise PropertyBroken(shown(got), wanted)


def shown(value: Any) -> str:
    """Return a value on one line: tensors as lists, masks as 1 and 0, numbers with six digits."""
    if isinstance(value, Tensor):
        return shown(value.detach().int().tolist() if value.dtype == torch.bool else value.detach().tolist())
    if isinstance(value, float):
        return f"{value + 0.0:.6g}" if math.isfinite(value) else str(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        inside = ", ".join(map(shown, value))
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    return repr(value)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return list(map(_copied, value)) if isinstance(value, list) else value
