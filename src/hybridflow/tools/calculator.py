"""A calculator: arithmetic with numbers of bounded size, and nothing else of Python.

`function_tool_path: hybridflow.tools.calculator` gives it to a run.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

from hybridflow.tools.function_tool import tool

MAX_LENGTH = 200
"""Characters of an expression; it also bounds how deeply it is nested."""
MAX_BITS = 4096
"""Size of a whole number."""

Number = int | float
OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


@tool(in_process=True)
async def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: numbers with + - * / // % ** and parentheses, for example (3 + 4) * 12
    """
    return calculate(expression)


def calculate(expression: str) -> str:
    """Return the value as text: whole numbers are exact, others have twelve digits.

    Raises ValueError, with a sentence for the model, for anything that is no arithmetic or is too large.
    """
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression is longer than {MAX_LENGTH} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except OverflowError as error:
        raise ValueError("the result is too large") from error
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            value = _value(operand)
            return -value if isinstance(node.op, ast.USub) else value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return _bounded(_apply(type(op), _value(left), _value(right)))
        case ast.BinOp(op=ast.BitXor()):
            raise ValueError("a power is written **")
    raise ValueError(f"{ast.unparse(node)!r} is no number and no operation of + - * / // % **")


def _apply(kind: type[ast.operator], left: Number, right: Number) -> Number:
    whole = isinstance(left, int) and isinstance(right, int)
    if kind is ast.Div and whole and right and left % right == 0:
        return left // right
    if kind is ast.Pow and isinstance(left, int) and left.bit_length() * abs(right) > MAX_BITS:
        raise OverflowError
    return OPERATORS[kind](left, right)


def _bounded(value: Number) -> Number:
    if isinstance(value, complex):  # a root of a negative number
        raise ValueError("the result is no real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise OverflowError
    if not math.isfinite(value):
        raise OverflowError
    return value
