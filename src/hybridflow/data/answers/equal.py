"""Whether two expressions are equal, and whether two equations have the same solutions.

Numbers are compared as fractions where both are, else with as many digits as their range takes. Expressions
with letters are equal if they are at a dozen points: letters are real numbers, and a point counts where
both sides are real. No formula is transformed, so the work is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from hybridflow.data.answers.expressions import Constant, Expression, Operation, Variable, negated
from hybridflow.data.answers.values import (
    TOLERANCE,
    Digits,
    Fractions,
    NoValue,
    Operations,
    WorkSpent,
    same_number,
    step_of,
)

_CONSTANTS = frozenset({"pi", "e", "i"})
_DIGITS = 80
_MAX_DIGITS = 15_000
_SPOILT = 25
"""Digits at the end of a result that rounding may have spoilt."""
_WHOLE = (2, 3, 4, 7, 12)
_POINTS = 8 + len(_WHOLE)


def fraction_of(expression: Expression) -> Fraction | None:
    """Return the value of an expression that is a fraction, or None."""
    try:
        return Fractions().value(expression, {})
    except NoValue:
        return None


def letters_of(expression: Expression) -> frozenset[str]:
    """Return the names of the variables of an expression; the constants pi, e and i are none."""
    return _names(expression) - _CONSTANTS


def _names(expression: Expression) -> frozenset[str]:
    if isinstance(expression, Variable):
        return frozenset({expression.name})
    if isinstance(expression, Constant):
        return frozenset()
    names = frozenset[str]().union(*map(_names, expression.operands))
    if expression.name in ("sum", "prod"):
        return names - _names(expression.operands[0])
    return names


def same_value(first: Expression, second: Expression) -> bool:
    """Whether two expressions are equal; with decimals in one of them, as `values.same_number` says."""
    if first == second:
        return True
    if "infty" in letters_of(first) | letters_of(second):
        return False  # nothing is computed with it
    try:
        steps = [step_of(expression) for expression in (first, second)]
        if not letters_of(first) | letters_of(second):
            exact = [fraction_of(expression) for expression in (first, second)]
            if exact[0] is not None and exact[1] is not None:
                return same_number(exact[0], exact[1], *steps)
        step = max((step for step in steps if step is not None), default=None)
        verdicts = [_close(values, error, step) for values, error in _at_points(first, second)]
    except NoValue:
        return False
    return bool(verdicts) and all(verdicts)


def _close(values: list[Any], error: Any, step: Fraction | None) -> bool:
    difference = abs(values[0] - values[1])
    if difference <= error:
        return True
    if step is None:
        return False
    largest = max(abs(values[0]), abs(values[1]))
    return bool(difference < error + _number(step) and difference <= largest * _number(TOLERANCE))


def _number(value: Fraction) -> Any:
    return Digits(_DIGITS, Operations(), real=True).converted(value)


def proportional(first: Expression, second: Expression, *, positive: bool = False) -> bool:
    """Whether one expression is the other times a number other than 0 (and, if asked, greater than 0).

    So the equations first = 0 and second = 0 are multiples of each other.
    """
    try:
        decimals = step_of(first) is not None or step_of(second) is not None
        pairs = [values for values, _ in _at_points(first, second)]
    except NoValue:
        return False
    known = next((values for values in pairs if values[0] and values[1]), None)
    if known is None:
        return False
    if positive and not (known[0] / known[1]).real > 0:
        return False
    tolerance = Fraction(1, 10 ** (_DIGITS - _SPOILT - 20))
    if decimals:
        tolerance = 2 * TOLERANCE
    for values in pairs:
        left = values[0] * known[1]
        right = values[1] * known[0]
        if abs(left - right) > _number(tolerance) * (abs(left) + abs(right)):
            return False
    return True


def solved_by(equation: Expression, name: str, value: Expression) -> bool:
    """Whether the one solution of equation = 0 for a letter is `value`, which does not have that letter.

    That is so where the equation is linear in the letter and holds for the value.
    """
    zero = Constant(Fraction(0))
    if name not in letters_of(equation) or not same_value(_with(equation, name, value), zero):
        return False
    at = [_with(equation, name, Constant(Fraction(number))) for number in range(3)]
    bend = Operation("+", (at[0], negated(at[1]), negated(at[1]), at[2]))
    return same_value(bend, zero) and not same_value(at[0], at[1])


def _with(expression: Expression, name: str, value: Expression) -> Expression:
    """Return the expression with a value in the place of a letter."""
    if isinstance(expression, Variable):
        return value if expression.name == name else expression
    if isinstance(expression, Constant):
        return expression
    return Operation(expression.name, tuple(_with(operand, name, value) for operand in expression.operands))


def _at_points(first: Expression, second: Expression) -> Iterator[tuple[list[Any], Any]]:
    """Yield the values of both expressions at points where both have one, with the error of these values.

    Without letters there is one point. Where fewer than two points are real, complex values count. Raises
    WorkSpent.
    """
    names = _names(first) | _names(second)
    letters = sorted(letters_of(first) | letters_of(second))
    points: list[dict[str, Fraction]] = [{}]
    if letters:
        points = [_point(number, letters) for number in range(_POINTS)]
    fields = [True, False]
    if "i" in names:
        fields = [False]
    operations = Operations()
    for real in fields:
        found: list[tuple[list[Any], Any]] = []
        for point in points:
            try:
                values, error = _values((first, second), point, operations, real=real)
            except WorkSpent:
                raise
            except NoValue:
                continue
            if not real or all(abs(value.imag) <= error for value in values):
                found.append((values, error))
        if len(found) >= min(2, len(points)):
            yield from found
            return


def _values(
    expressions: tuple[Expression, ...],
    point: Mapping[str, Fraction],
    operations: Operations,
    *,
    real: bool,
) -> tuple[list[Any], Any]:
    """Return the values with as many digits as their range takes, and their error."""
    digits = _DIGITS
    while True:
        computer = Digits(digits, operations, real=real)
        values = [computer.value(expression, point) for expression in expressions]
        span = max(computer.largest, 0.0) - min(computer.smallest, 0.0)
        wanted = 60 + 2 * int(span)
        if wanted <= digits:
            error = computer.context.mpf(10) ** int(max(computer.largest, 0.0) - digits + _SPOILT)
            return values, error
        if digits > _DIGITS or wanted > _MAX_DIGITS:
            raise NoValue("too many digits")
        digits = wanted


def _point(number: int, letters: list[str]) -> dict[str, Fraction]:
    """Return values of the letters, by the number of the point: small, larger, of either sign, and whole.

    From one point to the next the letters change their order.
    """
    point = {}
    for place, letter in enumerate(letters):
        spread = Fraction((number * 31 + place * 17 + 7) * 618_034 % 1_000_003, 1_000_003)
        if number % 2:
            place = len(letters) - 1 - place
        if number < 3:
            point[letter] = spread
        elif number < 6:
            point[letter] = 4 * spread + place
        elif number < 8:
            point[letter] = (3 * spread + Fraction(1, 10)) * (-1) ** (1 + place * (number - 6))
        else:
            point[letter] = Fraction(_WHOLE[number - 8] + 5 * place)
    return point
