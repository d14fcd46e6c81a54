"""Whether an answer of mathematics is the ground truth: one verdict for every reward that compares answers.

    text ──tokens.py──► tokens ──forms.py──► form ──expressions.py──► expressions ──equal.py──► equal or not

The page on rewards states the rule. Nothing here needs a package beside mpmath, and all work is bounded by
the size of what is computed: a text beyond the bounds is equal to its own copy only.
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise

from hybridflow.data.answers.equal import fraction_of, letters_of, proportional, same_value, solved_by
from hybridflow.data.answers.expressions import Constant, Expression, Operation, Variable, negated, parse
from hybridflow.data.answers.forms import (
    Bracketed,
    Form,
    Grid,
    LetteredChoice,
    Listing,
    Proportion,
    Relation,
    SetUnion,
    Value,
    all_but,
    is_name,
    read,
    value_of,
)
from hybridflow.data.answers.stated import last_boxed
from hybridflow.data.answers.tokens import (
    MAX_LENGTH,
    THOUSANDS,
    Token,
    UnreadableExpression,
    tokens_of,
    written,
)
from hybridflow.data.answers.units import SHORT_UNITS, Unit
from hybridflow.data.answers.values import step_of

_WHOLE = re.compile(r"[-+]?[0-9]{1,999}")
_LETTERS = re.compile(r"[A-Za-z]{3,9}")
_ABOUT = re.compile(r"^([\s$]*)(?:\\(?:approx|simeq)(?![A-Za-z])|≈)")
r"""What may stand before a number that is rounded: \approx 3.5."""
_STATEMENTS = frozenset({"forall", "exists", "nexists", "neg", "to", "implies", "iff", "pmod", "notin"})
_STATEMENTS |= {"subset", "subseteq", "supset", "supseteq", "perp", "parallel", "cong", "sim"}
"""Commands of statements, which are the same only if their text is."""
_COMPUTED = frozenset({"lim", "int", "iint", "oint", "sum", "prod"})
_DEGREES = (("degrees", 1),)
_RADIANS = (("radians", 1),)
_PERCENT = (("percent", 1),)
_LOWEST = (Token("sign", "-"), Token("command", "infty"))


def same_answer(truth: str, answer: str) -> bool | None:
    """Whether an answer is the ground truth; None where one of them has mathematics that is not read here.

    Both are LaTeX or plain text, without a box or in one.
    """
    truth, answer = (_ABOUT.sub(r"\1", text) for text in (last_boxed(truth) or truth, answer))
    condensed = [_condensed(text) for text in (truth, answer)]
    if not condensed[0] or not condensed[1]:
        return False
    if condensed[0] == condensed[1]:
        return True
    if all(map(_LETTERS.fullmatch, condensed)) and sorted(condensed[0]) == sorted(condensed[1]):
        return False  # an order, HHT and HTH, and no product
    if all(map(_WHOLE.fullmatch, condensed)):  # most answers, without the work for the others
        return int(condensed[0]) == int(condensed[1])
    if max(map(len, (truth, answer))) > MAX_LENGTH:
        return False
    truths = _forms(truth)
    answers = _forms(answer)
    if any(_same(wanted, given) for wanted in truths for given in answers):
        return True
    if any(_is_unclear(form) for form in truths + answers):
        return None
    return False


def one_spelling(answer: str) -> str:
    r"""Return an answer in a spelling that equal numbers and words share, for counting equal answers.

    "$x = \frac12$.", "0.5" and "1/2" are "1/2". Names of values, units, brackets of LaTeX and the order of a
    list are left out.
    """
    if _WHOLE.fullmatch(answer):
        return str(int(answer))
    forms = []
    if len(answer) <= MAX_LENGTH:
        forms = _forms(answer)
    if not forms:
        return _condensed(answer)
    return _spelled(forms[0])


def _spelled(form: Form) -> str:
    match form:
        case Value():
            fraction = fraction_of(form.expression) if form.expression is not None else None
            if fraction is None or max(abs(fraction.numerator), fraction.denominator) > 10**MAX_LENGTH:
                return form.text
            return str(fraction)
        case Relation(signs, sides):
            stated = _stated(form, sums=False)
            if stated:
                return _spelled(stated[0])
            return "".join(f"{written(side)}{sign}" for side, sign in zip(sides, (*signs, "")))
        case Proportion(parts):
            return ":".join(map(written, parts))
        case Grid(rows):
            return "; ".join(", ".join(map(_spelled, row)) for row in rows)
        case LetteredChoice(letter, _):
            return letter
        case SetUnion(items) | Listing(items):
            return ", ".join(sorted(map(_spelled, items)))
        case Bracketed(opening, items, closing):
            spelled = list(map(_spelled, items))
            if opening == "\\{":
                return ", ".join(sorted(spelled))
            return f"{opening}{', '.join(spelled)}{closing}"


def _condensed(text: str) -> str:
    return " ".join(text.replace("$", "").split())


def _forms(text: str) -> list[Form]:
    """Return the readings of a text: where its commas may part thousands or numbers, both; 10 m/s may also be
    a product.
    """
    readings = [True]
    if THOUSANDS.search(text):
        whole = text.strip("\\$ .")
        groups = whole.split(",")
        # 1,000,000 is no list: as 1, 0, 0 it would be 1,000
        is_odd = len({*groups}) < len(groups) or any(group.startswith("0") for group in groups)
        if not (is_odd and THOUSANDS.fullmatch(whole)):
            readings = [True, False]
    forms: list[Form] = []
    for thousands in readings:
        try:
            tokens = tokens_of(text, SHORT_UNITS, thousands=thousands)
            forms.append(read(tokens))
            if any(a.text == "m" and a.spaced and b.text == "/" for a, b in pairwise(tokens)):
                product = [each._replace(spaced=each.spaced and each.text != "m") for each in tokens]
                forms.append(read(product))
        except UnreadableExpression:
            continue
    return forms


def _is_unclear(form: Form) -> bool:
    """Whether a part of a form is mathematics that is not read here, such as an integral."""
    match form:
        case Value():
            names = {token.text for token in form.tokens if token.kind in ("command", "begin")}
            sets = {name for name in names if name in ("infty", "reals") or name.startswith("set ")}
            if form.expression is not None or names == sets or "ldots" in names:
                return False
            return not names & _STATEMENTS or bool(names & _COMPUTED)
        case Relation(_, sides) | Proportion(sides):
            return any(_is_unclear(value_of(side)) for side in sides)
        case Listing(items) | Bracketed(_, items, _) | SetUnion(items):
            return any(map(_is_unclear, items))
        case Grid(rows):
            return any(_is_unclear(cell) for row in rows for cell in row)
        case LetteredChoice(_, content):
            return _is_unclear(content)


def _same(truth: Form, answer: Form) -> bool:
    """Whether two forms are the same answer. The truth decides where the two sides differ in form."""
    match truth, answer:
        case LetteredChoice(letter, content), LetteredChoice(other, said):
            return letter == other and _same(content, said)
        case LetteredChoice(letter, content), _:  # the letter, or the text of that choice
            return _is_letter(answer, letter) or _same(content, answer)
        case _, LetteredChoice(letter, content):
            return _is_letter(truth, letter) or _same(truth, content)
        case Relation() as wanted, Relation() as given:
            return _same_relations(wanted, given)
        case (SetUnion(), _) | (_, SetUnion()):
            return _same_parts(truth, answer)
        case Relation() as wanted, _:
            values = _stated(wanted, sums=False)
            return any(_same(value, answer) for value in values) or _same_parts(truth, answer)
        case _, Relation() as given:
            values = _stated(given, sums=True)
            return any(_same(truth, value) for value in values) or _same_parts(truth, answer)
        case Proportion() as wanted, Proportion() as given:
            return _same_proportions(wanted, given)
        case (Proportion() as ratio, Value() as value) | (Value() as value, Proportion() as ratio):
            return _is_quotient(value, ratio)
        case (Proportion(), _) | (_, Proportion()):
            return False
        case (Grid(), _) | (_, Grid()):
            return _same_grid(truth, answer)
        case Value() as wanted, Value() as given:
            return _same_values(wanted, given)
    if isinstance(truth, Listing) and isinstance(answer, Listing) and _joined_otherwise(truth, answer):
        return False
    if _same_collections(truth, answer):
        return True
    return Listing in (type(truth), type(answer)) and _same_parts(truth, answer)


def _is_letter(form: Form, letter: str) -> bool:
    return isinstance(form, Value) and form.text.casefold() == letter


# Values, and their units


def _same_values(truth: Value, answer: Value) -> bool:
    if not _units_agree(truth.unit, answer.unit):
        return False
    if truth.base is not None and answer.base is not None:
        try:
            return int(truth.text, truth.base) == int(answer.text, answer.base)
        except ValueError:  # no digits of the base
            return False
    if truth.text == answer.text and (truth.unit is None or answer.unit is None or truth.unit == answer.unit):
        return True
    if len(truth.text) == len(answer.text) == 1 and truth.text.isalpha():
        return truth.text.casefold() == answer.text.casefold()
    if truth.expression is None or answer.expression is None:
        return False
    return any(same_value(*pair) for pair in _with_units(truth, answer))


def _units_agree(truth: Unit | None, answer: Unit | None) -> bool:
    """Whether two units can be of one answer: one is missing or in no table, or they are of one kind."""
    if truth is None or answer is None or not truth.kind or not answer.kind:
        return True
    return truth.kind == answer.kind or {truth.kind, answer.kind} == {_DEGREES, _RADIANS}


def _with_units(truth: Value, answer: Value) -> list[tuple[Expression, Expression]]:
    """Return what to compare: the numbers in one unit, or as they are written and by their worth."""
    wanted = truth.expression
    given = answer.expression
    assert wanted is not None and given is not None, "both were read"
    kinds = [value.unit.kind if value.unit else () for value in (truth, answer)]
    if truth.unit and answer.unit and kinds[0] and kinds[1]:
        if kinds[0] != kinds[1]:
            return [(_worth(truth), _worth(answer))]
        if truth.unit.size == answer.unit.size:
            return [(wanted, given)]
        return [(_times(wanted, truth.unit.size), _times(given, answer.unit.size))]
    pairs = [(wanted, given)]
    if _PERCENT in kinds or _DEGREES in kinds:
        pairs.append((_worth(truth), _worth(answer)))
    return pairs


def _worth(value: Value) -> Expression:
    """Return the number that a value with percent or degrees is worth."""
    assert value.expression is not None, "it was read"
    if value.unit is not None and value.unit.kind == _PERCENT:
        return _times(value.expression, Fraction(1, 100))
    if value.unit is not None and value.unit.kind == _DEGREES:
        return Operation("*", (value.expression, Variable("pi"), Constant(Fraction(1, 180))))
    return value.expression


def _times(expression: Expression, factor: Fraction) -> Expression:
    return Operation("*", (expression, Constant(factor)))


# Lists, sets, tuples and intervals


def _same_collections(truth: Form, answer: Form) -> bool:
    wanted = _items(truth)
    given = _items(answer)
    if len(wanted) == 1 and isinstance(answer, Value):
        return _same(wanted[0], answer)
    if len(given) == 1 and isinstance(truth, Value):
        return _same(truth, given[0])
    brackets = [_brackets(truth), _brackets(answer)]
    if all(brackets):  # which ones matters for intervals only
        return (brackets[0] == brackets[1] or len(wanted) != 2) and _in_order(wanted, given)
    if any(brackets):
        other = answer if brackets[0] else truth
        closed = "()" not in brackets
        if isinstance(other, Bracketed) or (closed and len(wanted if brackets[0] else given) == 2):
            return False  # a set has no order, and a closed interval is no pair
        if (
            all(map(_named, _items(other)))
            and len(_items(other)) > 1
            and not _ordered(_bare(_items(other))[0])
        ):
            return False  # two values of one name are no tuple
        return _in_order(_by_name(wanted), _by_name(given))
    wanted_names, wanted = _bare(wanted)
    given_names, given = _bare(given)
    if wanted_names and given_names:
        heads = {name.partition("_")[0] for name in wanted_names + given_names}
        if len(heads) == 1 and not _ordered(wanted_names) and not _ordered(given_names):
            return _matched(wanted, given)  # x_1 and x_2 are values of x
        return _matched(_items(truth), _items(answer))
    has_ellipsis = any(isinstance(item, Value) and item.text == "\\ldots" for item in wanted + given)
    if has_ellipsis or _ordered(wanted_names or given_names):
        return _in_order(wanted, given)
    return _matched(wanted, given)


def _joined_otherwise(truth: Listing, answer: Listing) -> bool:
    """Whether one list has "and" where the other has "or". It does not matter between numbers."""
    if {truth.joint, answer.joint} != {"and", "or"}:
        return False
    for item in truth.items + answer.items:
        if isinstance(item, Relation) and not {*item.signs} <= {"=", "approx"}:
            return True
        if isinstance(item, Value) and (item.expression is None or isinstance(item.expression, Variable)):
            return True
    return _ordered(_bare(truth.items)[0])


def _items(form: Form) -> tuple[Form, ...]:
    if isinstance(form, (Listing, Bracketed)):
        return form.items
    return (form,)


def _brackets(form: Form) -> str:
    """Return the brackets of a tuple or an interval; "" for another form, also a set."""
    if isinstance(form, Bracketed) and form.opening != "\\{":
        return form.opening + form.closing
    return ""


def _bare(items: tuple[Form, ...]) -> tuple[list[str], tuple[Form, ...]]:
    """Return the names of items such as x = 1, and the values. Where only the first has a name, it is the
    name of the whole list; no names are returned where none, or only some, have one.
    """
    named = [_named(item) for item in items]
    if named and named[0] is not None and not any(isinstance(item, Relation) for item in items[1:]):
        return [named[0][0]] * len(items), (named[0][1], *items[1:])
    known = [each for each in named if each is not None]
    if len(known) < len(items):
        return [], items
    return [name for name, _ in known], tuple(value for _, value in known)


def _by_name(items: tuple[Form, ...]) -> tuple[Form, ...]:
    """Return the values of items such as y = 1, x = 2 in the order of their letters, else as they stand."""
    names, values = _bare(items)
    if names and len({*names}) == len(names) and all(len(name) == 1 for name in names):
        return tuple(value for _, value in sorted(zip(names, values), key=lambda pair: pair[0]))
    return values


def _named(form: Form) -> tuple[str, Form] | None:
    """Return the name and the value of an equation such as x = 1; None for another form."""
    if not isinstance(form, Relation) or not set(form.signs) <= {"=", "in", "approx"}:
        return None
    if not is_name(form.sides[0]):
        return None
    values = _stated(form, sums=False)
    if not values:
        return None
    return _label(form.sides[0]), values[0]


def _label(tokens: tuple[Token, ...]) -> str:
    """Return a name in one spelling; of a function of letters only its own name."""
    text = written(tokens)
    head, bracket, inside = text.partition("(")
    if head and bracket and re.fullmatch(r"[a-z](,[a-z])*\)", inside):
        return head
    return text


def _ordered(names: list[str]) -> bool:
    """Whether the names distinguish the values: x and y do, x_1 and x_2 for roots of one x do not."""
    if len(set(names)) < 2:
        return False
    numbered = [re.fullmatch(r"(.+)_(\d+)", name) for name in names]
    heads = {match[1] for match in numbered if match}
    numbers = [int(match[2]) for match in numbered if match]
    return not (len(heads) == 1 and numbers == list(range(1, len(names) + 1)))


def _in_order(wanted: tuple[Form, ...], given: tuple[Form, ...]) -> bool:
    return len(wanted) == len(given) and all(map(_same, wanted, given))


def _matched(wanted: tuple[Form, ...], given: tuple[Form, ...]) -> bool:
    """Whether each item of either side is among those of the other; equal items count once."""
    if len(given) > 2 * len(wanted) + 4:
        return False
    left = list(given)
    for item in wanted:
        equal = [each for each in given if _same(item, each)]
        if not equal:
            return False
        left = [each for each in left if each not in equal]
    return not left


def _same_parts(truth: Form, answer: Form) -> bool:
    """Compare unions of sets and solutions of inequalities: x < 1 or x > 3, and (-∞, 1) ∪ (3, ∞)."""
    wanted = _parts(truth)
    given = _parts(answer)
    if wanted is None or given is None:
        return False
    names = {name for name in (wanted[0], given[0]) if name}
    return len(names) < 2 and _matched(wanted[1], given[1])


def _parts(form: Form) -> tuple[str, tuple[Form, ...]] | None:
    """Return the sets that a form joins, with the name of the variable where it gives one."""
    match form:
        case SetUnion(items):
            return "", items
        case Bracketed():
            return "", (form,)
        case Relation(signs, sides) if set(signs) <= {"=", "in"} and is_name(sides[0]):
            try:
                inner = _parts(read(sides[-1]))
            except UnreadableExpression:
                return None
            return inner and (_label(sides[0]), inner[1])
        case Relation():
            return _solutions(form)
        case Listing(items, joint):
            found = [_solutions(item) for item in items]
            known = [each for each in found if each is not None]
            if len(known) < len(items) or len({name for name, _ in known}) > 1:
                return None
            intervals = tuple(interval for _, several in known for interval in several)
            if joint != "or" and len(intervals) == len(items) == 2:
                common = _overlap(*intervals) or _overlap(*reversed(intervals))
                intervals = (common,) if common else intervals
            return known[0][0], intervals
        case _:
            return None


def _overlap(first: Form, second: Form) -> Form | None:
    """Return what x > 3 and x < 5 have in common; None where these are no two rays that overlap."""
    match first, second:
        case (
            Bracketed(opening, (Value() as start, Value(text="\\infty"))),
            Bracketed(_, (Value(text="-\\infty"), Value() as end), closing),
        ) if start.expression is not None and end.expression is not None:
            larger = Operation("max", (start.expression, end.expression))
            if same_value(larger, end.expression) and not same_value(start.expression, end.expression):
                return Bracketed(opening, (start, end), closing)
    return None


def _solutions(form: Form) -> tuple[str, tuple[Form, ...]] | None:
    """Return the variable and the intervals of 1 < x <= 2, |x| > 3 or x != 0; None for another form."""
    if not isinstance(form, Relation):
        return None
    try:
        if form.signs == ("ne",) and is_name(form.sides[0]):
            return _label(form.sides[0]), all_but(read(form.sides[1])).items
        rising = _rising(form)
        if rising is None or len(rising.sides) not in (2, 3):
            return None
        first, second = rising.sides[:2]
        sign = rising.signs[0]
        name = second
        if len(rising.sides) == 3:
            ends = [(first, sign, rising.signs[1], rising.sides[2])]
        elif inside := _in_bars(first):
            name = inside
            ends = [(_opposite(second), sign, sign, second)]
        elif inside := _in_bars(second):
            name = inside
            ends = [(_LOWEST, "<", sign, _opposite(first)), (first, sign, "<", _LOWEST[1:])]
        elif is_name(first):
            name = first
            ends = [(_LOWEST, "<", sign, second)]
        else:
            ends = [(first, sign, "<", _LOWEST[1:])]
        if not is_name(name):
            return None
        brackets = {"<": "()", "le": "[]"}
        return _label(name), tuple(
            Bracketed(brackets[left][0], (read(low), read(high)), brackets[right][1])
            for low, left, right, high in ends
        )
    except UnreadableExpression:
        return None


def _in_bars(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
    """Return the name that stands in bars of an absolute value; nothing for other tokens."""
    if len(tokens) > 2 and tokens[0].text == tokens[-1].text == "|" and is_name(tokens[1:-1]):
        return tokens[1:-1]
    return ()


def _opposite(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
    return (Token("sign", "-"), Token("sign", "("), *tokens, Token("sign", ")"))


def _rising(relation: Relation) -> Relation | None:
    """Return a chain of inequalities with < and <= only, or None where the signs are of several kinds."""
    if set(relation.signs) <= {"<", "le"}:
        return relation
    if set(relation.signs) <= {">", "ge"}:
        turned = {">": "<", "ge": "le"}
        return Relation(
            tuple(turned[sign] for sign in reversed(relation.signs)), tuple(reversed(relation.sides))
        )
    return None


# Equations and inequalities


def _stated(relation: Relation, *, sums: bool) -> list[Form]:
    r"""Return the values that an equation states: 5 for x = 5, and 1/3 and 0.33 for x = 1/3 \approx 0.33.

    The left side is a name, or the sides are numbers, or equal expressions; an equation between other sides
    states no value. `sums` also takes x + y for a name.
    """
    if not set(relation.signs) <= {"=", "approx", "in", "equiv"}:
        return []
    sides = list(relation.sides)
    if len(sides) == 2 and is_name(sides[1]) and not is_name(sides[0], sums=True):
        sides.reverse()
    if not is_name(sides[0], sums=sums) and not _are_equal(sides, relation.signs):
        return []
    if len(sides) > 2 and not _agree(sides[1:]):
        return []
    try:
        last = read(sides[-1])
        if relation.signs[-1] != "approx" or is_name(sides[-2]):
            return [last]
        exact = read(sides[-2])
    except UnreadableExpression:
        return []
    if _rounds(last, exact):
        return [exact, last]
    return [exact]


def _agree(sides: list[tuple[Token, ...]]) -> bool:
    """Whether those sides that are numbers are about equal: x = 5 = 6 states nothing."""
    values = [form for form in map(value_of, sides) if form.expression and not letters_of(form.expression)]
    numbers = [form.expression for form in values if form.expression]
    return all(
        same_value(number, numbers[0]) or (step_of(number) is not None and _rounds(value, values[0]))
        for value, number in zip(values, numbers)
    )


def _are_equal(sides: list[tuple[Token, ...]], signs: tuple[str, ...]) -> bool:
    r"""Whether all sides before the first \approx are equal, as in 2 + 3 = 5 and x^2 - 1 = (x - 1)(x + 1)."""
    try:
        expressions = [parse(side) for side in sides]
    except UnreadableExpression:
        return False
    exact = [expressions[0]]
    for sign, expression in zip(signs, expressions[1:]):
        if sign == "approx":
            break
        exact.append(expression)
    return all(same_value(exact[0], each) for each in exact[1:])


def _rounds(rounded: Form, exact: Form) -> bool:
    """Whether a decimal is a number rounded or cut at its last digit, however few digits it has."""
    forms = [form.expression for form in (rounded, exact) if isinstance(form, Value)]
    if len(forms) < 2 or forms[0] is None or forms[1] is None:
        return False
    step = Constant(step_of(forms[0]) or Fraction(1))
    difference = Operation("abs", (Operation("+", (forms[0], negated(forms[1]))),))
    return same_value(Operation("max", (difference, step)), step)


def _same_relations(truth: Relation, answer: Relation) -> bool:
    named = [_named(truth), _named(answer)]
    if named[0] and named[1] and named[0][0] == named[1][0] and _same(named[0][1], named[1][1]):
        return True
    if truth.signs == answer.signs and _same_sides(truth, answer):
        return True
    equations = [set(relation.signs) <= {"=", "equiv"} for relation in (truth, answer)]
    if all(equations) or (set(truth.signs) == set(answer.signs) == {"ne"}):
        # whether two equations have the same solutions, as far as multiples and solving for a letter show
        wanted = _difference(truth)
        given = _difference(answer)
        if wanted is None or given is None:
            return _same_sides(truth, Relation(answer.signs, tuple(reversed(answer.sides))))
        if proportional(wanted, given):
            return True
        return _solves(truth, given) or _solves(answer, wanted)
    rising = [_rising(truth), _rising(answer)]
    if rising[0] is None or rising[1] is None:
        return _same_parts(truth, answer)
    if rising[0].signs == rising[1].signs:
        wanted = _difference(rising[0])
        given = _difference(rising[1])
        if wanted and given and proportional(wanted, given, positive=True):
            return True
        if _same_sides(rising[0], rising[1]):
            return True
    return _same_parts(truth, answer)


def _solves(solved: Relation, equation: Expression) -> bool:
    """Whether an equation such as y = 6/x is another one, solved for a letter."""
    name, value = [parse(side) for side in solved.sides]
    if not isinstance(name, Variable) or name.name in letters_of(value):
        return False
    return solved_by(equation, name.name, value)


def _difference(relation: Relation) -> Expression | None:
    """Return right minus left of a relation with two sides; None for more, or where they are not read."""
    if len(relation.sides) != 2:
        return None
    try:
        left, right = [parse(side) for side in relation.sides]
    except UnreadableExpression:
        return None
    return Operation("+", (right, negated(left)))


def _same_sides(truth: Relation, answer: Relation) -> bool:
    if len(truth.sides) != len(answer.sides):
        return False
    return all(
        _same_values(value_of(wanted), value_of(given)) for wanted, given in zip(truth.sides, answer.sides)
    )


# Ratios, times of day, and matrices


def _same_proportions(truth: Proportion, answer: Proportion) -> bool:
    clocks = [_clock(truth), _clock(answer)]
    if clocks[0] and clocks[1]:
        return _same_time(clocks[0], clocks[1])
    if len(truth.parts) != len(answer.parts):
        return False
    if any(token.text == "ldots" for part in truth.parts + answer.parts for token in part):
        return list(map(written, truth.parts)) == list(map(written, answer.parts))
    try:
        wanted = [parse(part) for part in truth.parts]
        given = [parse(part) for part in answer.parts]
    except UnreadableExpression:
        return False
    nothing = Constant(Fraction(0))
    if any(same_value(part, nothing) for part in wanted + given):
        return all(map(same_value, wanted, given))
    return all(
        same_value(Operation("*", (wanted[0], b)), Operation("*", (given[0], a)))
        for a, b in zip(wanted, given)
    )


def _is_quotient(value: Value, ratio: Proportion) -> bool:
    """Whether a value is what a ratio of two numbers is worth."""
    if len(ratio.parts) != 2 or value.expression is None:
        return False
    if any(len(part[0].text) > 1 and part[0].text.startswith("0") for part in ratio.parts if part):
        return False  # a time of day such as 00:30
    try:
        above, below = [parse(part) for part in ratio.parts]
    except UnreadableExpression:
        return False
    return same_value(Operation("*", (above, Operation("inverse", (below,)))), value.expression)


def _clock(ratio: Proportion) -> tuple[int, str, str] | None:
    """Return hour, minutes (and seconds) and "a", "p" or "" of a time of day; None where it is none."""
    text = ":".join(map(written, ratio.parts)).replace(" ", "").rstrip(".").casefold()
    found = re.fullmatch(r"(\d\d?)((?::[0-5]\d){1,2})(?:([ap])\.?m)?", text)
    if not found or int(found[1]) > 24:
        return None
    return int(found[1]), found[2], found[3] or ""


def _same_time(truth: tuple[int, str, str], answer: tuple[int, str, str]) -> bool:
    """Compare times of day: 3:30 may be in either half of the day, and 15:30 is 3:30 p.m."""
    if truth[1] != answer[1]:
        return False
    if truth[2] and answer[2]:
        return (truth[0] % 12, truth[2]) == (answer[0] % 12, answer[2])
    hours = [hour % 12 + 12 * (half == "p") if half else hour for hour, _, half in (truth, answer)]
    return truth[0] == answer[0] or hours[0] == hours[1]


def _same_grid(truth: Form, answer: Form) -> bool:
    """Compare matrices cell by cell, and a single row or column with a tuple."""
    truth = _as_grid(truth)
    answer = _as_grid(answer)
    if isinstance(truth, Grid) and isinstance(answer, Grid):
        return len(truth.rows) == len(answer.rows) and all(map(_in_order, truth.rows, answer.rows))
    vectors = []
    for form in (truth, answer):
        if isinstance(form, Grid):
            if len(form.rows) > 1 and any(len(row) > 1 for row in form.rows):
                return False
            vectors.append(tuple(cell for row in form.rows for cell in row))
        elif _brackets(form):
            vectors.append(_items(form))
        else:
            return False
    return _in_order(vectors[0], vectors[1])


def _as_grid(form: Form) -> Form:
    """Return rows in brackets, [[1, 2], [3, 4]], as a matrix."""
    if _brackets(form) == "[]" and all(_brackets(row) == "[]" for row in _items(form)):
        return Grid(tuple(_items(row) for row in _items(form)))
    return form
