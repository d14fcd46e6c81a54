"""Formulas of functions for readers: as their papers have them, with a run's numbers, papers and place.

what the source of our function says + numbers of the run ──formula_of──► Formula
a user's own function ──own_formula──► Formula, with its docstring in place of the equation
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.algorithms.catalog import Description
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
    function: Description,
    numbers: Iterable[Number] = (),
    *,
    name: str = "",
    equation: str = "",
    notes: tuple[str, ...] = (),
) -> Formula:
    """Return the formula of one of our functions; `equation` is the one in force where it has several."""
    numbers = tuple(numbers)
    equation = equation or function.formula
    with_numbers = filled_in(equation, numbers)
    if with_numbers == equation:
        with_numbers = ""
    file, _, line = function.place.rpartition(":")
    return Formula(
        name=name or function.name,
        equation=equation,
        with_numbers=with_numbers,
        numbers=numbers,
        sources=tuple(f"https://arxiv.org/abs/{paper}" for paper in function.papers),
        place=_place(Path(file), int(line)),
        notes=notes,
    )


def own_formula(function: Callable[..., Any], numbers: Iterable[Number]) -> Formula:
    """Return the description of a user's own function: its docstring, its signature and its numbers."""
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


ALTERNATIVES = re.compile(r"= ([^=;]*?), or ([^=;]*?) without `(\w+)`")
"""What a formula says where an argument is set or true, what it says else, and the argument."""


def filled_in(formula: str, numbers: Iterable[Number]) -> str:
    """Return a formula with values in place of symbols, and the alternative that holds.

    A value that is no number leaves its symbol.
    """
    values = {number.name: number.value for number in numbers}

    def chosen(found: re.Match[str]) -> str:
        value = values[found[3]]
        return f"= {found[2] if value is None or value is False else found[1]}"

    formula = ALTERNATIVES.sub(chosen, formula)
    texts = {
        number.symbol or number.name: f"({number.shown})" if number.value < 0 else number.shown
        for number in numbers
        if isinstance(number.value, (int, float)) and not isinstance(number.value, bool)
    }
    # a symbol is a whole word: the λ of λ_critic is none
    return re.sub(r"\w+", lambda found: texts.get(found[0], found[0]), formula)


def place(function: Callable[..., Any]) -> str:
    """Return the file:line of a function, relative to the current folder if it is below that."""
    function = inspect.unwrap(function)
    try:
        return _place(Path(inspect.getsourcefile(function) or "?"), inspect.getsourcelines(function)[1])
    except (OSError, TypeError):  # a callable object, or no source on this machine
        return "(no source)"


def _place(file: Path, line: int) -> str:
    file = file.resolve()
    return f"{file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}:{line}"


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


class ExplainedRun:
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
