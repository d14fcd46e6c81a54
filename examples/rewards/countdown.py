"""Reward of Countdown: 1 if the expression makes the target of all numbers, 0.1 for another expression.

The expression is the last <answer>…</answer>. It is parsed and computed in fractions; nothing of it is run.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

FORMAT_SCORE = 0.1
LONGEST = 200
"""Characters of an expression; a longer one is none."""
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def compute_score(
    data_source: str, solution_str: str, ground_truth: dict[str, Any], extra_info: Any = None
) -> float:
    """Score one response; `ground_truth` has the target and the numbers."""
    found = _ANSWER.findall(solution_str)
    if not found or len(found[-1]) > LONGEST:
        return 0.0
    used: list[int] = []
    try:
        value = evaluate(ast.parse(found[-1].strip(), mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return 0.0
    right = value == int(ground_truth["target"])
    return 1.0 if right and sorted(used) == sorted(map(int, ground_truth["numbers"])) else FORMAT_SCORE


def evaluate(node: ast.expr, used: list[int]) -> Fraction:
    """Return an expression's value, and add its numbers to `used`. Raises ValueError for anything else."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](evaluate(node.left, used), evaluate(node.right, used))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    raise ValueError(f"{ast.dump(node)} is no arithmetic")
