"""The formula of a function: the equation of its docstring, the same with a run's numbers, its paper, its
place.

function + numbers of the run ──formula_of──► Formula        a list of alternatives in a docstring
──alternative──► the one in force

The equation has one home, the first paragraph of the docstring; nothing here repeats it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARXIV = re.compile(r"(?<![\d.])\d{4}\.\d{5}(?!\d|\.\d)")
SYMBOL = re.compile(
    r"`[^`]*`|[Α-Ωα-ωϵ](?:_[A-Za-z0-9Α-Ωα-ω]+)*[\u0300-\u036f]?|[A-Za-z](?:[A-Za-z0-9_\u0300-\u036f]|(?<=_)[Α-Ωα-ω])*"
)
"""A name as equations have it: a Greek letter with its subscript, or a Latin word, which may end in `_β`.

What stands in backticks is a name, not a value.
"""
SWITCHED = re.compile(
    r"= (?P<on>[^=;]+?)(?P<where> on [^,;]*)?, or (?P<off>[^;]+?) without `(?P<switch>\w+)`"
)
JOINS_BEFORE = re.compile(r"[\w½)\]]$")
JOINS_AFTER = re.compile(r"^[\w(\[]")


@dataclass(frozen=True)
class Number:
    """One number of the run that a function takes."""

    symbols: tuple[str, ...]
    """Names of it in equations, the one to show first."""
    value: Any
    key: str
    """The dotted key that sets it, or words where no key does."""
    meaning: str = ""

    @property
    def shown(self) -> str:
        """The value as a user would type it."""
        return shown(self.value)


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
    """Further paragraphs that concern this run."""
    signature: str = ""
    """Signature of a user's own function, without types."""

    def label(self, number: Number) -> str:
        """Return the symbols of a number in the equation, then its name, as in `ε_low = clip_low`; for one
        without a name the end of its key.
        """
        stands = {found[0] for found in SYMBOL.finditer(self.equation)}
        names = [symbol for symbol in number.symbols[:-1] if symbol in stands] + list(number.symbols[-1:])
        return " = ".join(names) or number.key.rpartition(".")[2]


def formula_of(
    function: Callable[..., Any],
    numbers: Iterable[Number] = (),
    *,
    name: str = "",
    equation: str = "",
    notes: tuple[str, ...] = (),
    own: bool = False,
) -> Formula:
    """Return the formula of a function; `equation` where another part of the docstring is in force, `own` for
    a user's function.
    """
    function = inspect.unwrap(function)
    numbers = tuple(numbers)
    text = equation or (paragraphs(function) or ("(no docstring)",))[0]
    values = {symbol: number.value for number in numbers for symbol in number.symbols}
    put = put_in(in_force(text, values), values)
    if put == text:
        put = ""
    signature = ""
    if own:
        signature = _signature(function)
    return Formula(
        name=name or getattr(function, "__name__", str(function)),
        equation=text,
        with_numbers=put,
        numbers=numbers,
        sources=sources(function),
        place=place(function),
        notes=notes,
        signature=signature,
    )


def _signature(function: Callable[..., Any]) -> str:
    named = [
        argument.replace(annotation=argument.empty)
        for argument in inspect.signature(function).parameters.values()
    ]
    return f"{getattr(function, '__name__', '')}{inspect.Signature(named)}"


def paragraphs(documented: object) -> tuple[str, ...]:
    """Return the paragraphs of a docstring, each on one line."""
    return tuple(_one_line(each) for each in (inspect.getdoc(documented) or "").split("\n\n") if each.strip())


def alternative(documented: object, name: str) -> str:
    """Return the entry of `name` in a docstring's list of alternatives, which is written as: `a`, `b`: this ·
    `c`: that; '' where there is none.
    """
    text = _one_line(inspect.getdoc(documented) or "")
    found = re.search(rf"`{re.escape(name)}`(?:, `[^`]+`)*:? (.*?)(?= · `|\.(?:\s|$))", text)
    return found[1] if found else ""


def sources(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the papers that the docstrings of the function's module and of the function name by arXiv id."""
    module = sys.modules.get(function.__module__)
    ids = ARXIV.findall(((module.__doc__ or "") if module else "") + " " + (inspect.getdoc(function) or ""))
    return tuple(f"https://arxiv.org/abs/{each}" for each in dict.fromkeys(ids))


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


def in_force(equation: str, values: Mapping[str, Any]) -> str:
    """Return the equation without what a switch leaves out: of `A = this on …, or that without `switch`` the
    part that holds.
    """

    def choose(found: re.Match[str]) -> str:
        switch = values.get(found["switch"])
        if not isinstance(switch, bool):
            return found[0]
        return f"= {found['on'] if switch else found['off']}{found['where'] or ''}"

    return SWITCHED.sub(choose, equation)


def put_in(equation: str, values: Mapping[str, Any]) -> str:
    """Return the equation with numbers for symbols: `γλ·L` with γ = 1.0 and λ = 0.95 becomes `1.0·0.95·L`.

    A symbol that the text defines (`λ = …`), names in backticks, and values that are no numbers stay as they
    are.
    """
    parts: list[str] = []
    done = 0
    for found in SYMBOL.finditer(equation):
        value = values.get(found[0])
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or re.match(r"\s*=(?!=)", equation[found.end() :])
        ):
            continue
        text = shown(value)
        if value < 0:
            text = f"({text})"
        between = equation[done : found.start()]
        before = between or "".join(parts[-1:])
        after = equation[found.end() :]
        parts += [between, "·" if JOINS_BEFORE.search(before) else "", text]
        if JOINS_AFTER.search(after) and not _is_number_next(after, values):
            parts.append("·")
        done = found.end()
    return "".join([*parts, equation[done:]])


def _is_number_next(after: str, values: Mapping[str, Any]) -> bool:
    """Tell whether another replaced symbol follows at once, which brings its own sign of multiplication."""
    following = SYMBOL.match(after)
    if following is None:
        return False
    value = values.get(following[0])
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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


def _one_line(text: str) -> str:
    return " ".join(text.split())
