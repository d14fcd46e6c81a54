"""Sums of products too large for a small model's head, and a calculator to call.

"37 * 84 + 52 * 19 = ?" ──► calculator("37 * 84 + 52 * 19") ──► "4096" ──► "#### 4096" ──► reward 1
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any, Literal

from hybridflow.environments.base import Environment, Step
from hybridflow.environments.demonstrations import demonstrate_call
from hybridflow.errors import ConfigError
from hybridflow.tools import tool
from hybridflow.tools.calculator import calculate


class Calculator(Environment):
    """A sum of `products` products of two numbers of `digits` digits.

    The reward is 1 where the last number of the answer is right. `answers="random"` is the control: the
    calculator gives numbers by chance, so that calling it teaches nothing. Metric: `acc`.
    """

    def __init__(
        self, products: int = 2, digits: int = 2, answers: Literal["right", "random"] = "right"
    ) -> None:
        if products < 1 or not 1 <= digits <= 9:
            raise ConfigError(
                f"calculator: got products={products} and digits={digits}, wanted at least 1 product, 1 to 9 "
                "digits"
            )
        if answers not in ("right", "random"):
            raise ConfigError(f"calculator: got answers={answers!r}, wanted right or random")
        self.products = products
        self.digits = digits
        self.answers = answers

    def reset(self, row: Mapping[str, Any]) -> str:
        """Draw the question that the group's seed decides."""
        rng = random.Random(self.seed)
        numbers = [rng.randrange(10 ** (self.digits - 1), 10**self.digits) for _ in range(2 * self.products)]
        products = [f"{first} * {second}" for first, second in zip(numbers[::2], numbers[1::2], strict=True)]
        self.expression = " + ".join(products)
        return f"{self.expression} = ?"

    @tool
    def calculator(self, expression: str) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: Numbers with + - * / and parentheses, for example 3 * 4 + 5.
        """
        value = calculate(expression)
        if self.answers == "random":
            chance = random.Random(f"{self.step_seed} {expression}")
            value = str(chance.randrange(self.products * 10 ** (2 * self.digits)))
        return value

    def step(self, text: str) -> Step:
        """Compare the last number of the answer with the result, and end."""
        numbers = re.findall(r"-?\d+", text)
        right = numbers[-1:] == [calculate(self.expression)]
        return Step(reward=float(right), done=True, extra={"acc": float(right)})

    def demonstrate(self, rng: random.Random, well_formed: float = 0.3) -> list[dict[str, str]]:
        """Return a conversation about a question of its own, whose call is well formed only in part."""
        self.seed = rng.getrandbits(32)
        question = self.reset({})
        call = ("calculator", "expression", self.expression)
        value = self.calculator(self.expression)
        return demonstrate_call(question, call, value, f"#### {value}", rng, well_formed)
