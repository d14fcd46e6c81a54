"""The value of an expression: a fraction where it can be one, else a number of arbitrary precision.

Work is bounded by the size of numbers and the count of operations, and not by a clock: `9^{9^{9^9}}` is
refused before it is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from typing import Any

from hybridflow.data.answers.expressions import Constant, Expression, Operation, Variable

MAX_BITS = 1 << 17
"""Size of a whole number that is computed: 39,000 digits, room for 10,000!."""
MAX_WORK = 1 << 22
"""Bits of all numbers together that one expression may take."""
MAX_TERMS = 2000
"""Terms of a sum or product."""
MAX_MAGNITUDE = 6000
"""Largest power of ten, and its inverse the smallest, among numbers that are no fractions."""
MAX_OPERATIONS = 40_000
"""Operations on numbers of 80 digits that one comparison may take; one on longer numbers counts for more."""
_MAX_GAMMA_DIGITS = 400
_MAX_GAMMA = 10_000
"""Bounds on a factorial of a number that is not whole: its digits, and the number."""
_MAX_ANGLE = 100
"""Largest power of ten of which a sine is computed."""
TOLERANCE = Fraction(1, 10**6)
"""How far, in its own worth, a decimal may be from the number that it rounds."""


class NoValue(ValueError):
    """The expression has no value here: a division by zero, a number beyond all bounds."""


class NoFraction(NoValue):
    """The expression is no fraction: it has variables, or is irrational."""


class WorkSpent(NoValue):
    """The work that one comparison may take is done."""


class Fractions:
    """Computes the value of expressions as fractions, up to a bound on the work."""

    def __init__(self) -> None:
        self.work = 0

    def value(self, expression: Expression, variables: Mapping[str, int]) -> Fraction:
        """Return the value. Raises NoFraction or NoValue."""
        if isinstance(expression, Constant):
            return expression.value
        if isinstance(expression, Variable):
            if expression.name not in variables:
                raise NoFraction(f"{expression.name} has no value")
            return Fraction(variables[expression.name])
        if expression.name in ("sum", "prod"):
            return self.repeated(expression, variables)
        operands = [self.value(operand, variables) for operand in expression.operands]
        if expression.name not in _EXACT:
            raise NoFraction(f"{expression.name} gives no fraction")
        try:
            result = _EXACT[expression.name](*operands)
        except ZeroDivisionError as error:
            raise NoValue("a division by zero") from error
        self.work += _bits(result) + 64
        if self.work > MAX_WORK:
            raise WorkSpent("too much work")
        return result

    def repeated(self, expression: Operation, variables: Mapping[str, int]) -> Fraction:
        """Return the value of a sum or product over whole numbers."""
        variable, start, stop, body = expression.operands
        assert isinstance(variable, Variable), "the parser reads a name there"
        total = Fraction(expression.name == "prod")
        for number in _terms(self.value(start, variables), self.value(stop, variables)):
            term = self.value(body, {**variables, variable.name: number})
            total = total * term if expression.name == "prod" else total + term
            self.work += _bits(total) + 64
            if self.work > MAX_WORK:
                raise WorkSpent("too much work")
        return total


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _terms(start: Fraction, stop: Fraction) -> range:
    if start.denominator != 1 or stop.denominator != 1 or stop - start > MAX_TERMS:
        raise NoValue("a sum without whole bounds, or of too many terms")
    return range(int(start), int(stop) + 1)


def _whole(value: Fraction, limit: int) -> int:
    if value.denominator != 1:
        raise NoFraction("wanted a whole number")
    if not 0 <= value <= limit:
        raise NoValue("a number beyond all bounds")
    return int(value)


def _product(*factors: Fraction) -> Fraction:
    total = Fraction(1)
    for factor in factors:
        if _bits(total) + _bits(factor) > MAX_BITS:
            raise NoValue("a number beyond all bounds")
        total *= factor
    return total


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if base == 0 and exponent <= 0:
        raise NoValue("zero to the power of zero or less")
    if base in (0, 1):
        return base
    if exponent.denominator != 1:
        if exponent.denominator > 64:
            raise NoFraction("a root of a high order")
        base = _root(base, exponent.denominator)
        exponent = Fraction(exponent.numerator)
    if base == -1:
        return Fraction(-1 if exponent.numerator % 2 else 1)
    bits = math.log2(abs(base.numerator)) + math.log2(base.denominator)
    if base != 1 and abs(exponent) > MAX_BITS / bits:
        raise NoValue("a number beyond all bounds")
    return base ** int(exponent)


def _root(value: Fraction, order: int) -> Fraction:
    """Return the real root, where it is a fraction. An odd root of a negative number is negative."""
    if value < 0:
        if order % 2 == 0:
            raise NoFraction("the root is not real")
        return -_root(-value, order)
    above = _whole_root(value.numerator, order)
    below = _whole_root(value.denominator, order)
    if above**order != value.numerator or below**order != value.denominator:
        raise NoFraction("the root is irrational")
    return Fraction(above, below)


def _whole_root(value: int, order: int) -> int:
    """Return the largest whole number whose power of this order is at most `value`, by Newton's method."""
    if order == 2:
        return math.isqrt(value)
    guess = 1 << -(-value.bit_length() // order)
    while True:
        better = ((order - 1) * guess + value // guess ** (order - 1)) // order
        if better >= guess:
            return guess
        guess = better


def _double_factorial(value: Fraction) -> Fraction:
    return Fraction(math.prod(range(_whole(value, 10_000), 1, -2)))


def _binomial(above: Fraction, below: Fraction) -> Fraction:
    whole = _whole(above, 10**9)
    chosen = _whole(below, 10**9)
    smaller = min(chosen, abs(whole - chosen))
    if smaller * whole.bit_length() > MAX_BITS:
        raise NoValue("a number beyond all bounds")
    return Fraction(math.comb(whole, chosen))


def _multiple(*values: Fraction) -> Fraction:
    if len(values) > 64:
        raise NoValue("a multiple of too many numbers")
    return Fraction(math.lcm(*(_whole(value, 1 << 1024) for value in values)))


_EXACT: dict[str, Callable[..., Fraction]] = {
    "+": lambda *terms: sum(terms, Fraction(0)),
    "*": _product,
    "inverse": lambda value: 1 / value,
    "^": _power,
    "!": lambda value: Fraction(math.factorial(_whole(value, 10_000))),
    "!!": _double_factorial,
    "binom": _binomial,
    "mod": lambda value, modulus: value % modulus,
    "gcd": lambda *values: Fraction(math.gcd(*(_whole(value, 1 << MAX_BITS) for value in values))),
    "lcm": _multiple,
    "abs": abs,
    "floor": lambda value: Fraction(math.floor(value)),
    "ceil": lambda value: Fraction(math.ceil(value)),
    "max": lambda *values: max(values),
    "min": lambda *values: min(values),
}


def same_number(
    first: Fraction, second: Fraction, first_step: Fraction | None, second_step: Fraction | None
) -> bool:
    """Whether two numbers are equal, where a decimal may be rounded or cut at its last digit.

    A step is the worth of the last digit of a number that is written as a decimal, and None for another
    number. Without decimals equal means equal. Else the numbers may differ by less than the larger step, and
    by at most `TOLERANCE` of the larger number: 0.333333 is 1/3, and 0.33 is not.
    """
    if first == second:
        return True
    step = max(first_step or Fraction(0), second_step or Fraction(0))
    difference = abs(first - second)
    return difference < step and difference <= TOLERANCE * max(abs(first), abs(second))


def step_of(expression: Expression) -> Fraction | None:
    """Return the worth of the last digit of a decimal, also with a sign or times a power of ten.

    None: an expression without decimals. In any other expression with decimals no digit is the
    last, and only `TOLERANCE` counts. Raises NoValue for powers of ten beyond all bounds.
    """
    if isinstance(expression, Constant):
        return expression.step
    if isinstance(expression, Variable):
        return None
    steps = [step_of(operand) for operand in expression.operands]
    known = [step for step in steps if step is not None]
    if not known:
        return None
    others = [operand for operand, step in zip(expression.operands, steps) if step is None]
    if expression.name == "*" and len(known) == 1 and all(map(_shifts, others)):
        return known[0] * _product(*(abs(Fractions().value(other, {})) for other in others))
    return Fraction(10) ** MAX_MAGNITUDE


def _shifts(expression: Expression) -> bool:
    """Whether a factor only moves the point: -1, or a power of ten."""
    match expression:
        case Constant(value):
            return abs(value) == 1
        case Operation("^", (Constant(value), Constant(power))):
            return value == 10 and power.denominator == 1 and abs(power) <= MAX_MAGNITUDE
        case _:
            return False


class Operations:
    """The operations that are left to a comparison."""

    def __init__(self) -> None:
        self.left = MAX_OPERATIONS

    def take(self, digits: int) -> None:
        """Count one operation on numbers of `digits` digits. Raises WorkSpent."""
        self.left -= int((digits / 80) ** 1.6) + 1
        if self.left < 0:
            raise WorkSpent("too much work")


class Digits:
    """Computes values with a number of digits, and notes the range of the numbers that come up.

    `real` says that letters are real numbers, so that odd roots of negative numbers are negative. The
    range says how many digits a comparison takes.
    """

    def __init__(self, digits: int, operations: Operations, *, real: bool) -> None:
        self.context: Any = _context()
        self.context.dps = digits
        self.operations = operations
        self.real = real
        self.largest = -math.inf
        self.smallest = math.inf

    def value(self, expression: Expression, variables: Mapping[str, Fraction]) -> Any:
        """Return the value as a number of mpmath. Raises NoValue."""
        try:
            return self.evaluated(expression, variables)
        except NoValue:
            raise
        except (ArithmeticError, TypeError, ValueError, NotImplementedError) as error:
            raise NoValue(str(error)) from error

    def noted(self, result: Any) -> Any:
        """Note the magnitude of a number, and refuse one beyond all bounds."""
        if not self.context.isfinite(result):
            raise NoValue("no finite number")
        if result:
            magnitude = int(self.context.mag(result)) * math.log10(2)
            if abs(magnitude) > MAX_MAGNITUDE:
                raise NoValue("a number beyond all bounds")
            self.largest = max(self.largest, magnitude)
            self.smallest = min(self.smallest, magnitude)
        return result

    def evaluated(self, expression: Expression, variables: Mapping[str, Fraction]) -> Any:
        context = self.context
        self.operations.take(context.dps)
        if isinstance(expression, Constant):
            return self.noted(self.converted(expression.value))
        if isinstance(expression, Variable):
            if expression.name in variables:
                return self.noted(self.converted(variables[expression.name]))
            constants = {"pi": context.pi, "e": context.e, "i": context.mpc(0, 1)}
            if expression.name not in constants:
                raise NoValue(f"{expression.name} has no value")
            return self.noted(+constants[expression.name])
        if expression.name in ("sum", "prod"):
            return self.repeated(expression, variables)
        if expression.name == "^":
            base, exponent = expression.operands
            return self.noted(self.power(self.evaluated(base, variables), exponent, variables))
        if expression.name in ("!", "!!", "binom"):
            try:
                return self.noted(self.converted(Fractions().value(expression, {})))
            except NoFraction:
                if context.dps > _MAX_GAMMA_DIGITS:
                    raise
        operands = [self.evaluated(operand, variables) for operand in expression.operands]
        return self.noted(self.applied(expression.name, operands))

    def converted(self, value: Fraction) -> Any:
        if _bits(value) > MAX_BITS:
            raise NoValue("a number beyond all bounds")
        return self.context.mpf(value.numerator) / value.denominator

    def applied(self, name: str, operands: list[Any]) -> Any:
        """Return the value of an operation on numbers."""
        context = self.context
        if name == "+":
            return context.fsum(operands)
        if name == "*":
            return context.fprod(operands)
        if name == "inverse":
            return 1 / operands[0]
        if name == "log" and len(operands) == 2:
            return context.log(operands[0]) / context.log(operands[1])
        if name in _OF_REALS and any(context.im(operand) for operand in operands):
            raise NoValue(f"{name} of a number that is not real")
        if name in ("!", "binom"):
            for operand in operands:
                part = abs(operand - context.nint(context.re(operand)))
                if abs(operand) > _MAX_GAMMA or 0 < part < 1e-20:
                    raise NoValue("a factorial that takes too long")
        if operands[0] and context.mag(operands[0]) > _MAX_ANGLE * 3.4:
            raise NoValue(f"{name} is not computed for this number")
        if name in _IN_MPMATH:
            return getattr(context, _IN_MPMATH[name])(*operands)
        if name not in _NUMERIC:
            raise NoValue(f"{name} is not computed")
        return _NUMERIC[name](context, *operands)

    def power(self, base: Any, exponent: Expression, variables: Mapping[str, Fraction]) -> Any:
        """Return a power. With `real`, the odd root of a negative number is negative."""
        context = self.context
        sign = 1
        if self.real and not context.im(base) and context.re(base) < 0:
            try:
                fraction = Fractions().value(exponent, {})
            except NoFraction:
                fraction = Fraction(1, 2)
            if fraction.denominator % 2:
                base = -context.re(base)
                sign = (-1) ** (fraction.numerator % 2)
        power = self.evaluated(exponent, variables)
        if base and abs(context.re(power * context.log(base))) > MAX_MAGNITUDE * math.log(10):
            raise NoValue("a number beyond all bounds")
        return sign * context.power(base, power)

    def repeated(self, expression: Operation, variables: Mapping[str, Fraction]) -> Any:
        """Return the value of a sum or product over whole numbers."""
        variable, start, stop, body = expression.operands
        assert isinstance(variable, Variable), "the parser reads a name there"
        bounds = [self.evaluated(bound, variables) for bound in (start, stop)]
        if any(self.context.im(bound) or bound != int(self.context.re(bound)) for bound in bounds):
            raise NoValue("a sum without whole bounds")
        total = self.context.mpf(expression.name == "prod")
        for number in _terms(*(Fraction(int(self.context.re(bound))) for bound in bounds)):
            term = self.evaluated(body, {**variables, variable.name: Fraction(number)})
            total = total * term if expression.name == "prod" else total + term
        return self.noted(total)


@cache
def _context() -> Any:
    """Return a context of mpmath of our own, imported where it is needed: most answers are fractions."""
    from mpmath.ctx_mp import MPContext

    return MPContext()


_OF_REALS = frozenset({"mod", "max", "min", "floor", "ceil"})
_IN_MPMATH = {name: name for name in ("floor", "ceil", "exp", "sin", "cos", "tan", "sinh", "cosh", "tanh")}
_IN_MPMATH |= {f"arc{name}": f"a{name}" for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")}
_IN_MPMATH |= {"binom": "binomial", "ln": "log"}
"""Functions that mpmath has, by their names there."""
_NUMERIC: dict[str, Callable[..., Any]] = {
    "!": lambda context, x: context.gamma(x + 1),
    "mod": lambda context, x, y: x - y * context.floor(x / y),
    "abs": lambda context, x: abs(x),
    "max": lambda context, *values: max(values),
    "min": lambda context, *values: min(values),
    "log": lambda context, x: context.log(x) / context.log(10),
    "lg": lambda context, x: context.log(x) / context.log(10),
    "sec": lambda context, x: 1 / context.cos(x),
    "csc": lambda context, x: 1 / context.sin(x),
    "cot": lambda context, x: context.cos(x) / context.sin(x),
    "arccot": lambda context, x: context.pi / 2 - context.atan(x),
    "coth": lambda context, x: 1 / context.tanh(x),
}
