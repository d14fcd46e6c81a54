"""The formula of a function for a reader: as its paper has it, with a run's numbers, its papers, its place.

formula as data (`{gamma}` where an argument stands) + numbers of the run ──formula_of──► Formula
a user's own function ──own_formula──► Formula, with its docstring in place of the equation
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.config import PPOConfig
from hybridflow.config.tree import argument_keys, get_value, key_in_force, keys_of


@dataclass(frozen=True)
class Number:
    """One number of the run that a function takes."""

    name: str
    """The argument's name."""
    value: Any
    key: str
    """The dotted key that sets it, or words where no key does."""
    symbol: str = ""
    """What equations call it; '' for its name."""
    meaning: str = ""

    @property
    def shown(self) -> str:
        """The value as a user would type it."""
        return shown(self.value)

    @property
    def label(self) -> str:
        """The symbol and the name, as in `ε_low = clip_low`."""
        return " = ".join(dict.fromkeys(filter(None, (self.symbol, self.name))))


@dataclass(frozen=True)
class Formula:
    """The formula of one function, for a reader."""

    name: str
    equation: str
    with_numbers: str
    """The equation with this run's numbers; '' where it holds none of them."""
    numbers: tuple[Number, ...]
    sources: tuple[str, ...]
    """Addresses of the papers."""
    place: str
    """file:line of the function."""
    notes: tuple[str, ...] = ()
    """Further lines that concern this run."""
    signature: str = ""
    """Signature of a user's own function, without types."""


def formula_of(
    function: Callable[..., Any],
    formula: str,
    numbers: Iterable[Number] = (),
    *,
    name: str = "",
    papers: Iterable[str] = (),
    notes: tuple[str, ...] = (),
) -> Formula:
    """Return the formula of our function: `formula` has arguments in braces, `papers` are of arxiv.org."""
    numbers = tuple(numbers)
    equation = written(formula, numbers, with_values=False)
    with_numbers = written(formula, numbers, with_values=True)
    if with_numbers == equation:
        with_numbers = ""
    return Formula(
        name=name or _name(function),
        equation=equation,
        with_numbers=with_numbers,
        numbers=numbers,
        sources=tuple(f"https://arxiv.org/abs/{paper}" for paper in papers),
        place=place(function),
        notes=notes,
    )


def own_formula(function: Callable[..., Any], numbers: Iterable[Number]) -> Formula:
    """Return what there is to say of a user's own function: its docstring, its signature and its numbers."""
    function = inspect.unwrap(function)
    equation, *notes = [
        " ".join(text.split()) for text in (inspect.getdoc(function) or "").split("\n\n") if text
    ] or ["(no docstring)"]
    named = [
        argument.replace(annotation=argument.empty)
        for argument in inspect.signature(function).parameters.values()
    ]
    return Formula(
        name=_name(function),
        equation=equation,
        with_numbers="",
        numbers=tuple(numbers),
        sources=(),
        place=place(function),
        notes=tuple(notes),
        signature=f"{_name(function)}{inspect.Signature(named)}",
    )


def written(formula: str, numbers: Iterable[Number], *, with_values: bool) -> str:
    """Return a formula with the numbers' values for its braces, or with their symbols.

    A value that is no number leaves the symbol. `{name:this|that}` becomes `this` where the value of `name`
    is set or true, else `that`.
    """
    return formula.format_map({number.name: _Written(number, with_values) for number in numbers})


class _Written:
    """A number as a formula has it."""

    def __init__(self, number: Number, with_values: bool) -> None:
        self.number = number
        self.with_values = with_values

    def __format__(self, choice: str) -> str:
        value = self.number.value
        if choice:
            on, off = choice.split("|")
            if not self.with_values:
                return f"{on}, or {off} without `{self.number.name}`"
            return off if value is None or value is False else on
        if not self.with_values or isinstance(value, bool) or not isinstance(value, (int, float)):
            return self.number.symbol or self.number.name
        return f"({self.number.shown})" if value < 0 else self.number.shown


def place(function: Callable[..., Any]) -> str:
    """Return the file:line of a function, relative to the current folder if it is below that."""
    function = inspect.unwrap(function)
    try:
        file = Path(inspect.getsourcefile(function) or "?").resolve()
        line = inspect.getsourcelines(function)[1]
    except (OSError, TypeError):  # a callable object, or no source on this machine
        return "(no source)"
    if file.is_relative_to(Path.cwd()):
        file = file.relative_to(Path.cwd())
    return f"{file}:{line}"


def shown(value: Any) -> str:
    """Return a value as a user would type it, with a real minus sign."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        # a minus sign before the number, not one in its exponent
        return repr(value).replace("-", "−") if value < 0 else repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(shown, value))}]"
    return str(value)


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", function))


ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
PRM = "reward.process_reward_model"


class Run:
    """A configuration read by dotted keys, so that every number can say where it is set."""

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.keys = keys_of(PPOConfig)
        self.set_by_keys = argument_keys(PPOConfig)

    def __getitem__(self, key: str) -> Any:
        return get_value(self.config, key)

    def number(self, name: str, key: str, symbol: str = "") -> Number:
        """Return the number that a key sets; without a name it is called by the end of its key."""
        return Number(name or key.rpartition(".")[2], self[key], key, symbol, self.keys[key].meaning)

    def says(self, key: str) -> str:
        """Return `key=value` with the key's meaning."""
        return f"{key}={shown(self[key])}: {self.keys[key].meaning}"

    def arguments(self, names: Iterable[str], options_key: str = "") -> list[Number]:
        """Return the numbers of the arguments with these names that keys set, or the user's options."""
        options = self[options_key] if options_key else {}
        found = []
        for name in names:
            info = self.set_by_keys.get(name)
            if info is not None and name not in options:
                found.append(self.number(name, key_in_force(self.config, info), info.symbol))
        return found + [
            Number(name, value, f"{options_key}.{name}", getattr(self.set_by_keys.get(name), "symbol", ""))
            for name, value in options.items()
        ]

    def own_arguments(self, function: Callable[..., Any], options_key: str) -> list[Number]:
        """Return the numbers that a user's own function takes: by keys, by its defaults, by its options."""
        named = inspect.signature(inspect.unwrap(function)).parameters
        numbers = self.arguments(named, options_key)
        known = {number.name for number in numbers}
        return numbers + [
            Number(name, argument.default, "its own default")
            for name, argument in named.items()
            if name not in known and isinstance(argument.default, (bool, int, float))
        ]
