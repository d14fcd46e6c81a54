r"""Units, currencies, percent and degrees behind (or before) a number.

One rule for every reward of mathematics: a unit that only one side gives does not count; units of one kind
are converted (5 m is 500 cm); different kinds are different answers. Percent and degrees also are numbers:
50\% is 1/2 as well as 50.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from hybridflow.data.answers.tokens import FUNCTIONS, GREEK, Token


@dataclass(frozen=True)
class Unit:
    """A unit that stands with a number; the product or quotient of several units is one."""

    kind: tuple[tuple[str, int], ...] = ()
    """What it measures, with exponents; empty for words that are in no table."""
    size: Fraction = Fraction(1)
    """Its size in the first unit of its kind in the table."""


_TABLE: dict[tuple[str, int], dict[str, Fraction]] = {
    ("length", 1): {
        "m meter meters metre metres": Fraction(1),
        "km kilometer kilometers kilometre kilometres": Fraction(1000),
        "dm": Fraction(1, 10),
        "cm centimeter centimeters centimetre centimetres": Fraction(1, 100),
        "mm millimeter millimeters millimetre millimetres": Fraction(1, 1000),
        "in inch inches": Fraction(254, 10_000),
        "ft foot feet": Fraction(3048, 10_000),
        "yd yard yards": Fraction(9144, 10_000),
        "mi mile miles": Fraction(1_609_344, 1000),
    },
    ("length", 3): {
        "l liter liters litre litres": Fraction(1, 1000),
        "ml milliliter milliliters millilitre millilitres": Fraction(1, 10**6),
        "gal gallon gallons": Fraction(3_785_411_784, 10**12),
    },
    ("mass", 1): {
        "g gm gram grams": Fraction(1),
        "kg kilogram kilograms": Fraction(1000),
        "mg milligram milligrams": Fraction(1, 1000),
        "lb lbs pound pounds": Fraction(45_359_237, 100_000),
        "oz ounce ounces": Fraction(45_359_237, 1_600_000),
    },
    ("time", 1): {
        "s sec secs second seconds": Fraction(1),
        "min mins minute minutes": Fraction(60),
        "h hr hrs hour hours": Fraction(3600),
        "day days": Fraction(86_400),
        "week weeks": Fraction(604_800),
        "year years yr yrs": Fraction(31_556_952),
        "month months": Fraction(31_556_952, 12),
    },
    ("dollars", 1): {"\\$ usd dollar dollars": Fraction(1), "cent cents ¢": Fraction(1, 100)},
    ("euros", 1): {"€ eur euro euros": Fraction(1)},
    ("pounds", 1): {"£ gbp": Fraction(1)},
    ("yen", 1): {"¥ yen": Fraction(1)},
    ("rupees", 1): {"₹ rs inr rupee rupees": Fraction(1)},
    ("percent", 1): {"%": Fraction(1, 100)},
    ("degrees", 1): {"circ deg degree degrees": Fraction(1)},
    ("celsius", 1): {"°c celsius": Fraction(1)},
    ("fahrenheit", 1): {"°f fahrenheit": Fraction(1)},
    ("radians", 1): {"rad radian radians": Fraction(1)},
}
_UNITS = {
    name: Unit((kind,), size)
    for kind, names in _TABLE.items()
    for spelled, size in names.items()
    for name in spelled.split()
}
_SPEED = (("length", 1), ("time", -1))
_UNITS |= {"mph": Unit(_SPEED, Fraction(1_609_344, 3_600_000)), "kph": Unit(_SPEED, Fraction(1000, 3600))}
_UNITS["kmh"] = _UNITS["kph"]
_SHORT = "cm mm km dm ft yd mi kg mg gm lb lbs oz ml mph kph kmh sec min hr hrs sq cu usd USD Rs deg per"
SHORT_UNITS = frozenset(_SHORT.split())
r"""Runs of two or three letters that are a unit also outside of `\text`, and no product of letters."""

_CURRENCIES = frozenset({"\\$", "€", "£", "¥", "₹"})
_CURRENCY_WORDS = frozenset({"rs", "usd", "eur", "us"})
_MULTIPLES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 1000,
    "lakh": 10**5,
    "crore": 10**7,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_PARTS = {"halves": 2, "thirds": 3, "fifths": 5, "sixths": 6, "eighths": 8, "tenths": 10}
_PARTS |= {"hundredths": 100, "thousandths": 1000}
"""Words that divide what stands before them; quarters may be coins."""
_DENIALS = frozenset({"not", "no", "never", "wrong", "incorrect", "false"})
_DENIALS |= {"negative", "below", "factorial", "tens", "score", "k"}
"""Words behind a number that make it another answer."""
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3, "²": 2, "³": 3}


def split_unit(tokens: Sequence[Token]) -> tuple[list[Token], Unit | None]:
    """Part the tokens of a number from its unit: what is left, and the unit, or None where it has none.

    Words behind the number are its unit, whatever they are, but for those that multiply it (5 million). An
    answer that begins with words and has no number before them has none.
    """
    number = _with_rate(tokens)
    if number and number[0].kind == "word" and not _is_currency_word(number[0]):
        return number, None
    names: list[str] = []
    while len(number) > 1:
        taken = _unit_at_end(number)
        if taken is None:
            break
        names.insert(0, taken[1])
        del number[len(number) - taken[0] :]
    while number and names and names[0] in ("/", "*", "."):  # a sign of the number, as in 5 * 3 m
        number.append(Token("sign", names.pop(0)))
    first = int(bool(number) and number[0].text == "-")  # a sign may stand before the currency
    while len(number) > first + 1 and (number[first].text in _CURRENCIES or _is_currency_word(number[first])):
        names.append(number.pop(first).text)
    if number and names and names[0] in _MULTIPLES:
        number += [Token("sign", "*"), Token("number", str(_MULTIPLES[names.pop(0)]))]
    elif number and names and names[0] in _PARTS:
        number += [Token("sign", "/"), Token("number", str(_PARTS[names.pop(0)]))]
    if not names:
        return number, None
    if not _DENIALS.isdisjoint(names) or names[0] in ("squared", "cubed"):  # of the number, and no unit's
        return list(tokens), None
    return _joined(number, _unit(names))


def _with_rate(tokens: Sequence[Token]) -> list[Token]:
    """Return the tokens with the letters of a rate at their end as words: h or s behind a unit and a slash,
    as in km/h, and m and s behind a number without letters, as in 10 m/s; the time may be squared.
    """
    found = list(tokens)
    end = next(
        (len(found) - place for place, token in enumerate(reversed(found[-5:])) if token.text in ("h", "s")),
        0,
    )
    ends = "".join(token.text for token in found[end:])
    if end < 4 or found[end - 2].text != "/" or ends not in ("", "^2", "^{2}"):
        return found
    above = found[end - 3]
    before = found[: end - 3]
    is_metre = above.text == "m" and above.spaced and found[end - 1].text == "s" and _is_number(before)
    if is_metre or (above.kind == "word" and above.text in _UNITS):
        found[end - 3] = above._replace(kind="word")
        found[end - 1] = found[end - 1]._replace(kind="word")
    return found


def _is_number(tokens: Sequence[Token]) -> bool:
    """Return whether tokens end in a number, a bracket or pi, and have no letters and no words."""
    last = tokens[-1]
    has_names = any(token.kind in ("letter", "word") or token.text in GREEK for token in tokens)
    return not has_names and (last.kind == "number" or last.text in (")", "]", "}", "!", "pi"))


def _joined(number: list[Token], unit: Unit) -> tuple[list[Token], Unit]:
    """Return 2 h 30 with the unit min as 2 * 60 + 30, where both units are of one kind."""
    words = [place for place, token in enumerate(number) if token.kind == "word"]
    if len(words) != 1 or not unit.kind or words[0] + 1 == len(number):
        return number, unit
    larger, other = split_unit(number[: words[0] + 1])
    if other is None or other.kind != unit.kind:
        return number, unit
    factor = other.size / unit.size
    signs = ["*", str(factor.numerator), "/", str(factor.denominator), "+"]
    scale = [Token("number" if each.isdigit() else "sign", each) for each in signs]
    return [Token("sign", "("), *larger, Token("sign", ")"), *scale, *number[words[0] + 1 :]], unit


def _is_currency_word(token: Token) -> bool:
    return token.kind == "word" and token.text.casefold() in _CURRENCY_WORDS


def _unit_at_end(tokens: list[Token]) -> tuple[int, str] | None:
    """Return how many tokens at the end are a piece of a unit, and the piece; None for another end."""
    texts = [token.text for token in tokens[-4:]]
    last = tokens[-1]
    if last.kind == "word":
        return 1, last.text.casefold()
    if last.text in _CURRENCIES | {"%", "¢"}:
        return 1, last.text
    of_angle = any(token.kind == "command" and token.text in FUNCTIONS for token in tokens)
    for pattern in (["^", "circ"], ["^", "{", "circ", "}"], ["circ"]):
        if texts[-len(pattern) :] == pattern and len(tokens) > len(pattern) and not of_angle:
            return len(pattern), "circ"
    for length, place in ((2, -1), (4, -2)):  # ^2 and ^{2}
        if len(tokens) > length and tokens[-length - 1].kind == "word" and texts[-length] == "^":
            exponent = texts[place]
            if exponent in ("2", "3") and (length == 2 or texts[-3] == "{"):
                return length, f"^{exponent}"
    is_joint = last.text in ("/", "*", ".") and len(tokens) > 1
    if is_joint and (tokens[-2].kind == "word" or last.text != "."):
        return 1, last.text
    return None


def _unit(names: list[str]) -> Unit:
    """Return the unit of its pieces; one that has a word of no table has no kind."""
    exponents: dict[str, int] = {}
    size = Fraction(1)
    sign = 1
    power = 1
    pieces = [name for name in names if name != "."]  # of an abbreviation
    for place, name in enumerate(pieces):
        following = pieces[place + 1] if place + 1 < len(pieces) else ""
        if name == "circ" and following in ("c", "f"):
            pieces[place + 1] = f"°{following}"
            continue
        if name in ("/", "per"):
            sign = -1
        elif name in _POWERS and following in _UNITS:
            power = _POWERS[name]
        elif name in _UNITS:
            unit = _UNITS[name]
            if following.startswith("^") or following in _POWERS:
                power *= _POWERS.get(following) or int(following[1:])
            for kind, exponent in unit.kind:
                exponents[kind] = exponents.get(kind, 0) + exponent * power * sign
            size *= unit.size ** (power * sign)
            power = 1
        elif not name.startswith("^") and name not in _POWERS and name != "*":
            return Unit()
    return Unit(tuple(sorted(item for item in exponents.items() if item[1])), size)
