r"""The form of an answer: a value, a list, a set, a tuple or interval, a relation, a ratio or a matrix.

`read` takes the tokens of an answer apart. Separators come first, then relations, unions, ratios and
brackets; what is left is a value with its unit, or words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hybridflow.data.answers.expressions import Expression, parse
from hybridflow.data.answers.tokens import FUNCTIONS, GREEK, JOINTS, Token, UnreadableExpression, written
from hybridflow.data.answers.units import Unit, split_unit

MAX_ITEMS = 200
"""Items of a list, and cells of a matrix, that are compared."""
MAX_LEVELS = 12
"""Levels of lists in lists that are read."""

_OPENING = frozenset({"(", "[", "{", "\\{", "lfloor", "lceil", "langle"})
_CLOSING = frozenset({")", "]", "}", "\\}", "rfloor", "rceil", "rangle"})
_MATRICES = frozenset({"matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix", "array", "cases"})
_LINES = frozenset({"align", "aligned", "gather", "gathered", "split", "equation", "alignedat"})
RELATIONS = frozenset({"=", "<", ">", "le", "ge", "ne", "approx", "in", "equiv"})
_BETWEEN_ITEMS = JOINTS | {";"}
_HOUR = re.compile(r"\d\d?[ap]\.?m")
_ARTICLE = re.compile(r"(?:the|an?) (?=.)")
_SPELLED_SETS = {
    "all real numbers": "reals",
    "all reals": "reals",
    "all real values": "reals",
    "empty set": "emptyset",
    "null set": "emptyset",
}
"""Sets in words, and their commands."""
_NAMING = GREEK | FUNCTIONS | {"angle", "triangle", "overline", "measuredangle", "frac"}


@dataclass(frozen=True)
class Value:
    """A number or expression, perhaps with a unit; or words."""

    tokens: tuple[Token, ...]
    """Without the unit, and without the subscript of a base."""
    unit: Unit | None
    base: int | None
    """The base in which the digits are written, where a subscript says so."""

    @cached_property
    def expression(self) -> Expression | None:
        """The tokens as an expression, or None where they are none that is read."""
        try:
            return parse(self.tokens)
        except UnreadableExpression:
            return None

    @property
    def text(self) -> str:
        """The tokens in one spelling; words without the article before them."""
        text = written(self.tokens).removeprefix("+").removesuffix(".")
        if all(token.kind == "word" for token in self.tokens):
            return _ARTICLE.sub("", text, count=1)
        return text


@dataclass(frozen=True)
class Listing:
    """Items with commas, semicolons, "and" or "or" between them, without brackets around all of them."""

    items: tuple[Form, ...]
    joint: str = ","
    """What stands between items: `or` or `and` where there is one, else a comma."""


@dataclass(frozen=True)
class Bracketed:
    r"""Items in brackets: a set in `\{ \}`, else a tuple or an interval."""

    opening: str
    items: tuple[Form, ...]
    closing: str


@dataclass(frozen=True)
class SetUnion:
    """Sets or intervals that are joined."""

    items: tuple[Form, ...]


@dataclass(frozen=True)
class Relation:
    """An equation, an inequality or a chain of them: sides, with a sign between each two."""

    signs: tuple[str, ...]
    sides: tuple[tuple[Token, ...], ...]


@dataclass(frozen=True)
class Proportion:
    """A ratio such as 1:2:3, or a time of day such as 12:30."""

    parts: tuple[tuple[Token, ...], ...]


@dataclass(frozen=True)
class Grid:
    """A matrix, or the lines of a definition by cases: rows of cells."""

    rows: tuple[tuple[Form, ...], ...]


@dataclass(frozen=True)
class LetteredChoice:
    """A lettered choice with what it says: (B) 12."""

    letter: str
    content: Form


Form = Value | Listing | Bracketed | SetUnion | Relation | Proportion | Grid | LetteredChoice

EMPTY_SET = Bracketed("\\{", (), "\\}")


def read(tokens: Sequence[Token], level: int = 0) -> Form:
    """Read the form of an answer. Raises Unreadable for nothing, for brackets without a match, and for more
    than `MAX_ITEMS` items or `MAX_LEVELS` levels.
    """
    tokens = _trimmed(tokens)
    if level > MAX_LEVELS:
        raise UnreadableExpression("too many levels")
    choice = _choice(tokens, level)
    if choice is not None:
        return choice
    for separators in (frozenset({";", "\\\\"}), JOINTS):
        pieces, between = split(tokens, separators)
        parts = [piece for piece in pieces if piece]
        if len(parts) > MAX_ITEMS:
            raise UnreadableExpression("too many items")
        if len(parts) > 1:
            items = tuple(read(each, level + 1) for part in parts for each in both_signs(part))
            return Listing(items, next((joint for joint in ("or", "and") if joint in between), ","))
    if len(variants := both_signs(tokens)) > 1:
        return Listing(tuple(read(each, level + 1) for each in variants))
    names = [token.text for token in tokens]
    if "pmod" in names:
        return _congruence(tokens, names.index("pmod"), level)
    sides, signs = split(tokens, RELATIONS)
    if signs:
        return Relation(tuple(signs), tuple(tuple(side) for side in sides))
    parts = split(tokens, ("cup",))[0]
    if len(parts) > 1:
        return SetUnion(tuple(read(part, level + 1) for part in parts))
    ratio = _spoken_ratio(tokens)
    if ratio is not None:
        return ratio
    if names[:2] == ["reals", "setminus"] and names[2:3] == ["\\{"] and _match(tokens[2:]) == len(tokens) - 3:
        removed = read(tokens[2:], level + 1)
        if isinstance(removed, Bracketed) and len(removed.items) == 1:
            return all_but(removed.items[0])
    bracketed = _bracketed(tokens, level)
    if bracketed is not None:
        return bracketed
    parts = split(tokens, (":",))[0]
    if len(parts) > 1:
        if parts[0] and all(token.kind == "word" for token in parts[0]):
            return read(tokens[len(parts[0]) + 1 :], level + 1)  # words before a colon name the answer
        return Proportion(tuple(tuple(part) for part in parts))
    return value_of(tokens)


def _congruence(tokens: list[Token], place: int, level: int) -> Form:
    """Read n = 3 (mod 7) as the equation and the modulus."""
    if place == 0 or place + 1 == len(tokens):
        raise UnreadableExpression("a congruence without its sides")
    items = (read(tokens[:place], level + 1), read(tokens[place + 1 :], level + 1))
    return Bracketed("(", items, ")")


def _spoken_ratio(tokens: list[Token]) -> Proportion | None:
    """Read 3 to 4 as 3:4, and 10 a.m. as 10:00 a.m.; None for something else."""
    words = [place for place, token in enumerate(tokens) if token.kind == "word"]
    if len(words) == 1 and 0 < words[0] < len(tokens) - 1 and tokens[words[0]].text == "to":
        return Proportion((tuple(tokens[: words[0]]), tuple(tokens[words[0] + 1 :])))
    is_hour = 1 < len(tokens) < 5 and tokens[1].spaced
    if is_hour and _HOUR.fullmatch(written(tokens).replace(" ", "").casefold()):
        return Proportion(((tokens[0],), (Token("number", "00"), *tokens[1:])))
    return None


def all_but(number: Form) -> SetUnion:
    """Return the real numbers without one."""
    infinity = Token("command", "infty")
    low = value_of([Token("sign", "-"), infinity])
    return SetUnion((Bracketed("(", (low, number), ")"), Bracketed("(", (number, value_of([infinity])), ")")))


def value_of(tokens: Sequence[Token]) -> Value:
    """Return a value with its unit, and with the base of its digits."""
    number, unit = split_unit(tokens)
    texts = [token.text for token in number]
    if len(number) in (3, 5) and number[0].kind == "number" and texts[1] == "_":
        base = "".join(texts[2:]).strip("{}")
        if base.isdigit() and len(base) < 3:
            return Value(tuple(number[:1]), unit, int(base))
    return Value(tuple(number), unit, None)


def split(
    tokens: Sequence[Token], separators: Sequence[str] | frozenset[str]
) -> tuple[list[list[Token]], list[str]]:
    """Part tokens at separators that stand in no brackets: the parts, and the separators between them."""
    parts: list[list[Token]] = [[]]
    found: list[str] = []
    depth = 0
    for token in tokens:
        if token.kind == "begin" or token.text in _OPENING:
            depth += 1
        elif token.kind == "end" or token.text in _CLOSING:
            depth -= 1
        elif depth == 0 and token.kind in ("sign", "command") and token.text in separators:
            parts.append([])
            found.append(token.text)
            continue
        parts[-1].append(token)
    if depth:
        raise UnreadableExpression("brackets without a match")
    return parts, found


def both_signs(tokens: Sequence[Token]) -> list[list[Token]]:
    r"""Return the tokens with + and with - in the place of `\pm` (`\mp`: the other way round).

    Only as they are where there is none, or where all stand in a set, whose items have them.
    """
    in_sets = 0
    outside = False
    for token in tokens:
        in_sets += (token.text == "\\{") - (token.text == "\\}")
        outside |= token.kind == "command" and token.text in ("pm", "mp") and not in_sets
    if not outside:
        return [list(tokens)]
    signs = [{"pm": "+", "mp": "-"}, {"pm": "-", "mp": "+"}]
    return [
        [
            Token("sign", each[token.text]) if token.kind == "command" and token.text in each else token
            for token in tokens
        ]
        for each in signs
    ]


def _trimmed(tokens: Sequence[Token]) -> list[Token]:
    """Return tokens without punctuation at the end, and without a group around all of them."""
    trimmed = list(tokens)
    while trimmed and trimmed[-1].kind == "sign" and trimmed[-1].text in {".", "\\\\", *_BETWEEN_ITEMS}:
        del trimmed[-1]
    for _ in range(MAX_LEVELS):
        if not trimmed or trimmed[0].text != "{" or _match(trimmed) != len(trimmed) - 1:
            break
        trimmed = trimmed[1:-1]
    if not trimmed:
        raise UnreadableExpression("nothing")
    ends = trimmed[0].text + trimmed[-1].text
    if len(trimmed) > 3 and ends in ("][", "]]", "[["):  # open ends, as they are written in France
        spelled = {"][": "()", "]]": "(]", "[[": "[)"}[ends]
        return [Token("sign", spelled[0]), *trimmed[1:-1], Token("sign", spelled[1])]
    if trimmed[0].kind == "begin" and trimmed[0].text in _LINES and trimmed[-1].kind == "end":
        return [token for token in trimmed[1:-1] if token.text != "&"]  # lines that are only aligned
    return trimmed


def _match(tokens: Sequence[Token]) -> int:
    """Return the place of the bracket that closes the first one, or -1."""
    depth = 0
    for place, token in enumerate(tokens):
        if token.kind == "begin" or token.text in _OPENING:
            depth += 1
        elif token.kind == "end" or token.text in _CLOSING:
            depth -= 1
            if depth == 0:
                return place
    return -1


def _choice(tokens: list[Token], level: int) -> LetteredChoice | None:
    r"""Read `\text{(B)} 12` or `(B) 12`, the letter of a choice with its content."""
    if len(tokens) < 4 or [tokens[0].text, tokens[2].text] != ["(", ")"]:
        return None
    is_plain = len(tokens) == 4 and tokens[3].kind == "number" and tokens[3].spaced  # and no product
    if len(tokens[1].text) > 1 or not (tokens[1].kind == "word" or (is_plain and tokens[1].text in "ABCDE")):
        return None
    return LetteredChoice(tokens[1].text.casefold(), read(tokens[3:], level + 1))


def _bracketed(tokens: list[Token], level: int) -> Form | None:
    """Read brackets or a matrix around all tokens; None where there are none."""
    names = [token.text for token in tokens]
    if all(token.kind == "word" for token in tokens):
        phrase = _ARTICLE.sub("", written(tokens), count=1)
        names = [_SPELLED_SETS.get(phrase, "")]
    if names == ["reals"]:
        infinity = Token("command", "infty")
        return Bracketed("(", (value_of([Token("sign", "-"), infinity]), value_of([infinity])), ")")
    if names == ["emptyset"]:
        return EMPTY_SET
    if _match(tokens) != len(tokens) - 1 or len(tokens) < 2:
        return None
    first = tokens[0]
    if first.kind == "begin" and first.text in _MATRICES:
        # rows and cells of a matrix; a system of equations without conditions is a list
        rows = [row for row in split(tokens[1:-1], ("\\\\",))[0] if row]
        cells = [split(row, ("&",))[0] for row in rows]
        if not 0 < sum(map(len, cells)) <= MAX_ITEMS:
            raise UnreadableExpression("no cells, or too many")
        if first.text == "cases" and all(len(row) == 1 for row in cells):
            return Listing(tuple(read(row[0], level + 1) for row in cells))
        return Grid(tuple(tuple(read(cell, level + 1) for cell in row if cell) for row in cells))
    inside = tokens[1:-1]
    if first.text == "\\{":
        return _set(inside, level)
    if first.text not in ("(", "[", "langle"):
        return None
    parts = [part for part in split(inside, _BETWEEN_ITEMS)[0] if part]
    if len(parts) > MAX_ITEMS or not parts:
        raise UnreadableExpression("brackets around nothing, or around too much")
    if len(parts) == 1 and (first.text == "(" or any(token.kind == "begin" for token in inside)):
        return read(inside, level + 1)
    ends = {"langle": "(", "rangle": ")"}
    items = tuple(read(part, level + 1) for part in parts)
    return Bracketed(ends.get(names[0], names[0]), items, ends.get(names[-1], names[-1]))


def _set(inside: list[Token], level: int) -> Form:
    r"""Read the content of `\{ \}`: items, or the condition behind a bar or colon."""
    for bar in ("|", ":"):
        parts = split(inside, (bar,))[0]
        if len(parts) == 2 and is_name(split(parts[0], ("in",))[0][0]):
            return read(parts[1], level + 1)
    parts = [part for part in split(inside, _BETWEEN_ITEMS)[0] if part]
    if len(parts) > MAX_ITEMS:
        raise UnreadableExpression("too many items")
    items = tuple(read(each, level + 1) for part in parts for each in both_signs(part))
    return Bracketed("\\{", items, "\\}")


def is_name(tokens: Sequence[Token], *, sums: bool = False) -> bool:
    """Whether one side of a relation only names what the other is worth: x, f(2), AB, (p, q).

    A name has letters, and no numbers but in subscripts and arguments. `sums` also takes x + y for a name.
    """
    place = 0
    letters = False
    while place < len(tokens):
        token = tokens[place]
        after = place and tokens[place - 1].kind in ("letter", "word")
        if token.text == "_" or (token.text == "(" and after):
            place += token.text == "_"
            place += max(_match(tokens[place:]), 0) + 1
            continue
        if token.kind == "number" or (token.text in ("+", "-") and not sums):
            return False
        if token.kind == "command" and token.text not in _NAMING:
            return False
        letters |= token.kind in ("letter", "word") or token.text in GREEK
        place += 1
    return letters
