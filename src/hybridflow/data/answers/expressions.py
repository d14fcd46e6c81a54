r"""Tokens of an answer as an expression: numbers, variables, and operations on them.

Read are sums, products (also without a sign), fractions, powers, roots, factorials, binomials, bars of
absolute values, floors, the functions of `tokens.FUNCTIONS`, and finite sums and products.
`UnreadableExpression` is raised for everything else, and for an expression that is nested deeper than
`MAX_DEPTH`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from hybridflow.data.answers.tokens import FUNCTIONS, GREEK, Token, UnreadableExpression, written

MAX_DEPTH = 40
"""Levels of nesting that are read."""
MAX_EXPONENT = 4000
"""The largest power of ten in a number such as 1e-19."""


@dataclass(frozen=True)
class Constant:
    """A number as it is written."""

    value: Fraction
    step: Fraction | None = None
    """The worth of its last digit, where it is written as a decimal; None for a whole number."""


@dataclass(frozen=True)
class Variable:
    """A letter, with its subscript; also the constants pi, e and i."""

    name: str


@dataclass(frozen=True)
class Operation:
    """A function of expressions: `+`, `*`, `^`, `sin`, and so on."""

    name: str
    operands: tuple[Expression, ...]


Expression = Constant | Variable | Operation

_CLOSING = {"(": ")", "[": "]", "{": "}", "lfloor": "rfloor", "lceil": "rceil"}
_ROUNDED = {"lfloor": "floor", "lceil": "ceil"}
_NAMES = GREEK | {"pi"}
_STARTS = _NAMES | FUNCTIONS | {"frac", "sqrt", "binom", "lfloor", "lceil", "infty", "sum", "prod"}
"""Commands with which an operand begins."""
_INVERTED = frozenset({"sin", "cos", "tan", "cot", "sinh", "cosh", "tanh"})
"""Functions whose power -1 is the inverse function."""
_OPENING = ("(", "[", "{")


def constant(text: str) -> Constant:
    """Read a number such as 12, 0.5, 1.6e-19, or 0.1(6) with the digits that repeat in brackets."""
    if text.isdecimal():
        return Constant(Fraction(int(text)))
    head, _, exponent = text.lower().partition("e")
    power = int(exponent or 0)
    if abs(power) > MAX_EXPONENT:
        raise UnreadableExpression("a number beyond all bounds")
    head, _, period = head.rstrip(")").partition("(")
    whole, dot, decimals = head.partition(".")
    value = Fraction(int(whole + decimals or "0"), 10 ** len(decimals)) * Fraction(10) ** power
    if period:
        return Constant(value + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(decimals)))
    if dot or power < 0:
        return Constant(value, Fraction(10) ** (power - len(decimals)))
    return Constant(value)


def parse(tokens: Sequence[Token]) -> Expression:
    """Read an expression that takes all tokens. Raises Unreadable."""
    parser = _Parser(tokens)
    expression = parser.sum()
    if parser.place != len(parser.tokens):
        raise UnreadableExpression(f"what follows is no part of an expression: {parser.text!r}")
    return expression


def negated(expression: Expression) -> Expression:
    """Return the expression times -1."""
    if isinstance(expression, Constant):
        return Constant(-expression.value, expression.step)
    return Operation("*", (Constant(Fraction(-1)), expression))


class _Parser:
    """Reads from left to right; `place` is the next token."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens = list(tokens)
        self.place = 0
        self.depth = 0
        self.bars = 0

    @property
    def kind(self) -> str:
        """Kind of the next token; empty at the end."""
        return self.tokens[self.place].kind if self.place < len(self.tokens) else ""

    @property
    def text(self) -> str:
        """Text of the next token; empty at the end."""
        return self.tokens[self.place].text if self.place < len(self.tokens) else ""

    def is_sign(self, *texts: str) -> bool:
        return self.kind == "sign" and self.text in texts

    def is_command(self, *texts: str) -> bool:
        return self.kind == "command" and self.text in texts

    def take(self, *texts: str) -> str:
        """Go past the next token, which must be one of `texts` where any are given."""
        text = self.text
        if not text or (texts and text not in texts):
            raise UnreadableExpression(f"wanted {' or '.join(texts)}, got {text!r}")
        self.place += 1
        return text

    def sum(self) -> Expression:
        terms = [self.signed(self.product)]
        while self.is_sign("+", "-"):
            terms.append(self.signed(self.product))
        if len(terms) == 1:
            return terms[0]
        return Operation("+", tuple(terms))

    def signed(self, read: Callable[[], Expression]) -> Expression:
        negative = False
        while self.is_sign("+", "-"):
            negative ^= self.take() == "-"
        expression = read()
        return negated(expression) if negative else expression

    def product(self) -> Expression:
        factors = [self.factor()]
        while True:
            if self.is_sign("*"):
                self.take()
                factors.append(self.signed(self.factor))
            elif self.is_sign("/"):
                self.take()
                factors.append(Operation("inverse", (self.signed(self.factor),)))
            elif self.kind == "letter" and self.is_power_of_ten_behind_x():
                self.take()
                factors.append(self.factor())
            elif self.is_command("bmod", "mod"):
                self.take()
                modulus = self.factor()
                factors = [Operation("mod", (_product(factors), modulus))]
            elif self.starts_operand():
                if self.kind == "number" and self.tokens[self.place - 1].kind == "number":
                    raise UnreadableExpression("two numbers side by side")
                factors.append(self.factor())
            else:
                return _product(factors)

    def is_power_of_ten_behind_x(self) -> bool:
        """Whether the letter x is a times sign, as in 1.6 x 10^{-19}."""
        around = self.tokens[self.place - 1 : self.place + 3]
        return around[0].kind == "number" and [token.text for token in around[1:]] == ["x", "10", "^"]

    def starts_operand(self) -> bool:
        if self.kind in ("number", "letter"):
            return True
        if self.kind == "sign":
            return self.text in _OPENING or (self.text == "|" and not self.bars)
        return self.is_command(*_STARTS)

    def factor(self) -> Expression:
        base = self.operand()
        for _ in range(MAX_DEPTH):
            if self.is_sign("!"):
                self.take()
                name = "!"
                if self.is_sign("!"):
                    name += self.take()
                if self.is_sign("!"):
                    raise UnreadableExpression("more than a double factorial")
                base = Operation(name, (base,))
            elif self.is_sign("%"):
                self.take()
                base = Operation("*", (base, Constant(Fraction(1, 100))))
            elif self.is_sign("^"):
                self.take()
                if self.skip_degrees():
                    base = Operation("*", (base, Variable("pi"), Constant(Fraction(1, 180))))
                else:
                    base = Operation("^", (base, self.exponent()))
            else:
                return base
        raise UnreadableExpression("nested too deeply")

    def skip_degrees(self) -> bool:
        for pattern in (["circ"], ["{", "circ", "}"]):
            if [token.text for token in self.tokens[self.place : self.place + len(pattern)]] == pattern:
                self.place += len(pattern)
                return True
        return False

    def exponent(self) -> Expression:
        """Read the exponent behind ^: a group, or a number or letter with its sign. 2^3^4 is 2^(3^4)."""
        exponent = self.signed(self.operand)
        if not self.is_sign("^"):
            return exponent
        self.take()
        self.depth += 1
        tower = Operation("^", (exponent, self.exponent()))
        self.depth -= 1
        return tower

    def argument(self) -> Expression:
        r"""Read what a command takes: a group, or one digit, letter or command, as TeX does."""
        if self.is_sign("{"):
            return self.bracketed()
        if self.kind == "number" and self.text.isdigit() and len(self.text) > 1:
            digit = self.text[0]
            self.tokens[self.place] = Token("number", self.text[1:])
            return constant(digit)
        return self.operand()

    def bracketed(self) -> Expression:
        opening = self.take()
        bars = self.bars
        self.bars = 0
        inside = self.sum()
        self.bars = bars
        self.take(_CLOSING[opening])
        return inside

    def operand(self) -> Expression:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UnreadableExpression("nested too deeply")
        operand = self.read_operand()
        self.depth -= 1
        return operand

    def read_operand(self) -> Expression:
        if self.kind == "number":
            return self.number()
        if self.kind == "letter" or self.is_command(*_NAMES, "infty"):
            return self.variable()
        if self.is_sign(*_OPENING):
            return self.bracketed()
        if self.is_sign("|"):
            self.take()
            self.bars += 1
            inside = self.sum()
            self.bars -= 1
            self.take("|")
            return Operation("abs", (inside,))
        if self.kind != "command":
            raise UnreadableExpression(f"no operand: {self.text!r}")
        if self.text in _ROUNDED:
            return Operation(_ROUNDED[self.text], (self.bracketed(),))
        if self.text in FUNCTIONS:
            return self.function()
        command = self.take()
        if command == "frac":
            above = self.argument()
            below = self.argument()
            if _starts_with_d(above) and _starts_with_d(below) and below != Variable("d"):
                raise UnreadableExpression("a derivative")
            return Operation("*", (above, Operation("inverse", (below,))))
        if command == "binom":
            above = self.argument()
            return Operation("binom", (above, self.argument()))
        if command == "sqrt":
            return self.root()
        if command in ("sum", "prod"):
            return self.repeated(command)
        raise UnreadableExpression(f"no operand: {command!r}")

    def number(self) -> Expression:
        """Read a number, or a mixed number such as 3 1/2."""
        whole = constant(self.take())
        if self.is_sign("_"):
            raise UnreadableExpression("a number with a subscript")
        if whole.step is not None or whole.value.denominator != 1:
            return whole
        ahead = self.tokens[self.place : self.place + 3]
        if self.is_command("frac"):
            place = self.place
            fraction = self.operand()
            match fraction:
                case Operation(
                    "*", (Constant(above, None), Operation("inverse", (Constant(below, None),)))
                ) if 0 < above < below:
                    return Constant(whole.value + above / below)
            self.place = place
        elif [token.kind for token in ahead] == ["number", "sign", "number"] and ahead[1].text == "/":
            above = constant(ahead[0].text).value
            below = constant(ahead[2].text).value
            if ahead[0].spaced and 0 < above < below:
                self.place += 3
                return Constant(whole.value + above / below)
        return whole

    def variable(self) -> Variable:
        name = self.take()
        if self.is_sign("_"):
            self.take()
            start = self.place
            depth = 0
            while self.place == start or depth > 0:  # one token, or a group
                depth += {"{": 1, "}": -1}.get(self.take(), 0)
            inside = [token for token in self.tokens[start : self.place] if token.text not in "{}"]
            name = f"{name}_{written(inside)}"
        while self.is_sign("'"):
            name += self.take()
        return Variable(name)

    def root(self) -> Expression:
        index: Expression = Constant(Fraction(2))
        if self.is_sign("["):
            index = self.bracketed()
        if self.is_sign("("):
            inside = self.bracketed()
        else:
            inside = self.argument()
        return Operation("^", (inside, Operation("inverse", (index,))))

    def function(self) -> Expression:
        r"""Read a function with its argument: `\sin x`, `\sin^2 2x`, `\log_2(x)`, `\gcd(a, b)`."""
        name = self.take()
        base: Expression | None = None
        power: Expression | None = None
        while self.is_sign("_", "^"):
            if self.take() == "_":
                base = self.argument()
            else:
                power = self.exponent()
        arguments = self.arguments(name)
        if base is not None:
            if name != "log":
                raise UnreadableExpression(f"{name} with a subscript")
            arguments.append(base)
        if power == Constant(Fraction(-1)) and name in _INVERTED:
            return Operation(f"arc{name}", tuple(arguments))
        call = Operation(name, tuple(arguments))
        return call if power is None else Operation("^", (call, power))

    def arguments(self, name: str) -> list[Expression]:
        if name in ("gcd", "lcm", "max", "min"):
            opening = self.take("(", "\\{")
            found = [self.sum()]
            while self.is_sign(","):
                self.take()
                found.append(self.sum())
            self.take({"(": ")", "\\{": "\\}"}[opening])
            return found
        if self.is_sign(*_OPENING):
            return [self.bracketed()]
        factors = [self.signed(self.factor)]
        while self.starts_operand() and not self.is_command(*FUNCTIONS):
            factors.append(self.factor())
        return [_product(factors)]

    def repeated(self, name: str) -> Expression:
        r"""Read the bounds `_{k=1}^{n}` of a sum or product, and the product behind them."""
        self.take("_")
        self.take("{")
        variable = self.variable()
        self.take("=")
        start = self.sum()
        self.take("}")
        self.take("^")
        stop = self.argument()
        if stop == Variable("infty"):
            raise UnreadableExpression("a series")
        return Operation(name, (variable, start, stop, self.product()))


def _product(factors: list[Expression]) -> Expression:
    if len(factors) == 1:
        return factors[0]
    return Operation("*", tuple(factors))


def _starts_with_d(expression: Expression) -> bool:
    """Whether an expression may be a part of dy/dx."""
    if isinstance(expression, Operation) and expression.name in ("*", "^"):
        return _starts_with_d(expression.operands[0])
    return expression == Variable("d")
