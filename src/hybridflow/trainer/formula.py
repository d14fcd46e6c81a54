"""A function of the maths as its docstring tells it: the equation, the same with a run's numbers, its source,
and where it stands.

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
JOINS_BEFORE, JOINS_AFTER = re.compile(r"[\w½)\]]$"), re.compile(r"^[\w(\[]")


@dataclass(frozen=True)
class Number:
    """One number of the run that a function takes."""

    symbols: tuple[str, ...]
    """How equations write it, the one to show first."""
    value: Any
    key: str
    """Where it is set: a dotted key, or words where no key sets it."""
    meaning: str = ""

    @property
    def shown(self) -> str:
        """The value as a user would type it."""
        return shown(self.value)


@dataclass(frozen=True)
class Formula:
    """What a reader wants of one function."""

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
    """Further paragraphs that bear on this run."""
    signature: str = ""
    """Of a user's own function, without types."""

    def label(self, number: Number) -> str:
        """Its symbols that stand in the equation, then its name: `ε_low = clip_low`; the end of its key for
        one without.
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
    """The formula of a function; `equation` where another part of the docstring is in force, `own` for a
    user's function.
    """
    function, numbers = inspect.unwrap(function), tuple(numbers)
    text = equation or (paragraphs(function) or ("(no docstring)",))[0]
    values = {symbol: number.value for number in numbers for symbol in number.symbols}
    put = put_in(in_force(text, values), values)
    return Formula(
        name=name or getattr(function, "__name__", str(function)),
        equation=text,
        with_numbers=put if put != text else "",
        numbers=numbers,
        sources=sources(function),
        place=place(function),
        notes=notes,
        signature=_signature(function) if own else "",
    )


def _signature(function: Callable[..., Any]) -> str:
    named = [
        argument.replace(annotation=argument.empty)
        for argument in inspect.signature(function).parameters.values()
    ]
    return f"{getattr(function, '__name__', '')}{inspect.Signature(named)}"


def paragraphs(documented: object) -> tuple[str, ...]:
    """The paragraphs of a docstring, each on one line."""
    return tuple(_one_line(each) for each in (inspect.getdoc(documented) or "").split("\n\n") if each.strip())


def alternative(documented: object, name: str) -> str:
    """The entry of `name` in a docstring's list of alternatives, written as: `a`, `b`: this · `c`: that; ''
    where there is none.
    """
    text = _one_line(inspect.getdoc(documented) or "")
    found = re.search(rf"`{re.escape(name)}`(?:, `[^`]+`)*:? (.*?)(?= · `|\.(?:\s|$))", text)
    return found[1] if found else ""


def sources(function: Callable[..., Any]) -> tuple[str, ...]:
    """Papers that the docstrings of the function's module and of the function name by arXiv id."""
    module = sys.modules.get(function.__module__)
    ids = ARXIV.findall(((module.__doc__ or "") if module else "") + " " + (inspect.getdoc(function) or ""))
    return tuple(f"https://arxiv.org/abs/{each}" for each in dict.fromkeys(ids))


def place(function: Callable[..., Any]) -> str:
    """file:line where the function is defined, from the current folder where it lies below that."""
    function = inspect.unwrap(function)
    try:
        file, line = (
            Path(inspect.getsourcefile(function) or "?").resolve(),
            inspect.getsourcelines(function)[1],
        )
    except (OSError, TypeError):  # a callable object, or no source on this machine
        return "(no source)"
    here = Path.cwd()
    return f"{file.relative_to(here) if file.is_relative_to(here) else file}:{line}"


def in_force(equation: str, values: Mapping[str, Any]) -> str:
    """The equation without what a switch leaves out: of `A = this on …, or that without `switch`` the part
    that holds.
    """

    def choose(found: re.Match[str]) -> str:
        switch = values.get(found["switch"])
        if not isinstance(switch, bool):
            return found[0]
        return f"= {found['on'] if switch else found['off']}{found['where'] or ''}"

    return SWITCHED.sub(choose, equation)


def put_in(equation: str, values: Mapping[str, Any]) -> str:
    """The equation with numbers for symbols: `γλ·L` with γ = 1.0 and λ = 0.95 becomes `1.0·0.95·L`.

    A symbol that the text defines (`λ = …`), names in backticks, and values that are no numbers stay as they
    are.
    """
    parts, done = list[str](), 0
    for found in SYMBOL.finditer(equation):
        value = values.get(found[0])
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or re.match(r"\s*=(?!=)", equation[found.end() :])
        ):
            continue
        between, text = equation[done : found.start()], f"({shown(value)})" if value < 0 else shown(value)
        before, after = between or "".join(parts[-1:]), equation[found.end() :]
        parts += [between, "·" if JOINS_BEFORE.search(before) else "", text]
        if JOINS_AFTER.search(after) and not _is_number_next(after, values):
            parts.append("·")
        done = found.end()
    return "".join([*parts, equation[done:]])


def _is_number_next(after: str, values: Mapping[str, Any]) -> bool:
    """Whether another replaced symbol follows at once: it brings its own sign of multiplication."""
    following = SYMBOL.match(after)
    value = values.get(following[0]) if following else None
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """A value as a user would type it, with a real minus sign."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        return repr(value).replace("-", "−") if value < 0 else repr(value)
    return f"[{', '.join(map(shown, value))}]" if isinstance(value, (list, tuple)) else str(value)


def _one_line(text: str) -> str:
    return " ".join(text.split())
