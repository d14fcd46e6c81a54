r"""An answer as tokens: numbers, letters, commands, words and signs, in one spelling for each.

LaTeX that changes no value (`\left`, `\,`, `$`, fonts) is left out, and signs that mean the same are one:
`\dfrac` is `\frac`, `−` is `-`, `\cdot` is `*`, `\land` is "and". Words are what stands in `\text`, and runs
of letters that are no product of variables.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

Kind = Literal["number", "letter", "command", "word", "sign", "begin", "end"]

MAX_LENGTH = 4000
"""Characters of an answer that is read. A longer one is compared as text only."""


class UnreadableExpression(ValueError):
    """The text is no expression of the kind that is read here."""


class Token(NamedTuple):
    """A piece of an answer."""

    kind: Kind
    text: str
    spaced: bool = False
    """Whether white space stood before it."""


_UNICODE = {
    "-": "−–—‐‑﹣－",
    "/": "÷∕⁄",
    "'": "′",
    "%": "％",
    r"\cdot ": "×·∙⋅",
    r"\sqrt ": "√",
    r"\sqrt[3] ": "∛",
    r"\infty ": "∞",
    r"^\circ ": "°º",
    r"\le ": "≤⩽",
    r"\ge ": "≥⩾",
    r"\ne ": "≠",
    r"\approx ": "≈",
    r"\pm ": "±",
    r"\mp ": "∓",
    r"\ldots ": "…⋯",
    r"\cup ": "∪",
    r"\cap ": "∩",
    r"\in ": "∈",
    r"\emptyset ": "∅",
    r"\reals ": "ℝ",
    r"\langle ": "⟨",
    r"\rangle ": "⟩",
    r"\lfloor ": "⌊",
    r"\rfloor ": "⌋",
    r"\lceil ": "⌈",
    r"\rceil ": "⌉",
    r"\neg ": "¬",
    r"\land ": "∧",
    r"\lor ": "∨",
    r"\forall ": "∀",
    r"\exists ": "∃",
    r"\to ": "→",
    **{f"^{{{digit}}}": char for digit, char in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    **{f"_{{{digit}}}": char for digit, char in enumerate("₀₁₂₃₄₅₆₇₈₉")},
}
"""What Unicode's characters are in LaTeX."""
_GREEK_NAMES = """
    alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi
    psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega
"""
_FRACTIONS = {char: Fraction(unicodedata.numeric(char)).limit_denominator(8) for char in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_GREEK_LETTERS = dict(zip("αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ", _GREEK_NAMES.split()))
_TRANSLATION = str.maketrans(
    {char: latex for latex, chars in _UNICODE.items() for char in chars}
    | {char: f"\\{name} " for char, name in _GREEK_LETTERS.items()}
    | {char: f"\\frac{{{part.numerator}}}{{{part.denominator}}}" for char, part in _FRACTIONS.items()}
)

GREEK = frozenset(_GREEK_LETTERS.values()) - {"pi"} | {
    "varepsilon",
    "vartheta",
    "varphi",
    "Upsilon",
    "ell",
    "hbar",
}
"""Commands that are letters; pi is a number."""
_FUNCTIONS = """
    sin cos tan sec csc cot arcsin arccos arctan arccot sinh cosh tanh coth ln log lg exp gcd lcm max min
"""
FUNCTIONS = frozenset(_FUNCTIONS.split())
_SPELLED = FUNCTIONS | GREEK | {"pi", "sqrt", "infty"}
"""Names that are commands without a backslash, too."""

_COMMANDS = {
    "frac": "dfrac tfrac cfrac nicefrac sfrac",
    "binom": "dbinom tbinom",
    "le": "leq leqslant",
    "ge": "geq geqslant",
    "ne": "neq",
    "ldots": "dots cdots dotsc dotsb dotsm dotso",
    "emptyset": "varnothing",
    "infty": "infinity inf infin",
    "approx": "approxeq simeq",
    "circ": "degree degrees",
    "arcsin": "asin",
    "arccos": "acos",
    "arctan": "atan",
    "varepsilon": "epsilon",
    "varphi": "phi",
    "reals": "R",
    "neg": "lnot",
    "to": "rightarrow longrightarrow",
    "implies": "Rightarrow Longrightarrow",
    "iff": "Leftrightarrow Longleftrightarrow leftrightarrow",
    "setminus": "backslash smallsetminus",
}
_SAME = {other: name for name, others in _COMMANDS.items() for other in others.split()}
_SIGN_COMMANDS = {
    "*": "cdot times ast cdotp",
    "/": "div slash",
    "|": "vert lvert rvert mid",
    "\\{": "lbrace",
    "\\}": "rbrace",
    "[": "lbrack",
    "]": "rbrack",
    ":": "colon",
    "<": "lt",
    ">": "gt",
    "and": "land wedge And",
    "or": "lor vee",
    "'": "prime",
    "%": "percent",
    "\\$": "dollar",
    "£": "pounds",
    "€": "euro",
}
_SIGNS = {name: sign for sign, names in _SIGN_COMMANDS.items() for name in names.split()}
_NO_MEANING = """
    left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr displaystyle textstyle
    scriptstyle limits nolimits quad qquad thinspace medspace thickspace enspace rm bf it sf tt boldmath boxed
    fbox mathbf boldsymbol bm pmb mathit mathsf mathcal mathnormal vec hat widehat ensuremath mathop hfill
    text textbf textit textrm textnormal textsf mbox hbox mathrm operatorname underline large Large LARGE huge
    Huge small normalsize
"""
_LEFT_OUT = frozenset(_NO_MEANING.split())
_SHORT_WORDS = frozenset({"yes", "no", "odd", "one", "two", "six", "ten", "red", "all"})
"""Answers of two or three letters that are no products."""
JOINTS = frozenset({",", "and", "or"})
"""Signs between the items of a list."""
_WORD_SIGNS = {"and": "and", "or": "or", "percent": "%", "percentage": "%", "pct": "%"}

THOUSANDS = re.compile(r"(?<![\d.])[1-9]\d{0,2}(?:,\d{2,3})*,\d{3}(?![\d,]\d|\d)")
"""A number whose commas may part thousands (or, as in India, hundreds of thousands)."""
_GAP = re.compile(
    r"(?<=\d)(?:(?:\\! ?)?(?:\{\s*,\s*\}|,)(?:\\! ?)+|\s?\{\s*,\s*\}|\\[,;: !]|~|\\thinspace ?)"
    r"(?=\d{3}(?!\d))"
)
r"""What parts thousands and nothing else: `{,}`, `,\!`, `\,` and the like."""
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?: \d{3})+(?![\d/]| \d)")

_BOLD = re.compile(r"^\*\*|\*\*(?=\.*$)")
_DOUBLED = re.compile(r"\\\\(?=[A-Za-z])")
"""A backslash that was escaped once too often, as in `\\\\frac`."""

_SENTENCE = re.compile(r"(?:[A-Za-z]{2,}[,']?\s+)+[A-Za-z]{2,}[.!]?")
"""Several words, which are no products of letters though they may be short."""
_REWRITTEN = (
    (re.compile(r"(?<=\d) in\.?$"), " inches"),
    (re.compile(r"\bper cent\b"), "percent"),
    (re.compile(r"\\(?:(?:text)?color|[hv]?phantom|[hv]space\*?)\s*\{[^{}]*\}"), ""),
    (re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}"), r"\\frac{\1}{\2}"),
    (re.compile(r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}"), r"\\binom{\1}{\2}"),
    (
        re.compile(
            r"\\[dt]?frac\s*\{\s*(\\(?:text|mathrm)\s*\{[^{}]*\})\s*\}\s*\{\s*(\\(?:text|mathrm)[^$]*?)\}(?=\$?\.?$)"
        ),
        r"\1/\2",
    ),
)
"""Texts in another spelling: inches, what is not seen, `{a \\over b}`, and a fraction of units at the end."""

_TOKEN = re.compile(
    r"""(?P<space>\s+|~|\\[,;:!>\ ]|\\q?quad)
    |\\(?P<begin>begin|end)\s*\{(?P<environment>\w+)\*?\}(?:\{[^{}]*\}|\[[^][]*\])?
    |\\(?P<textual>text|textbf|textit|textrm|textnormal|textsf|mbox|hbox|mathrm|operatorname)\*?\s*
        \{(?P<content>[^{}]*)\}
    |\\math(?:bb|cal)\s*\{?(?P<set>[A-Z])\b\}?
    |\\(?:left|right)\s*\.
    |\\(?P<command>[A-Za-z]+)
    |(?P<newline>\\\\)(?:\[[^][]*\])?
    |\\(?P<escaped>.)
    |(?P<repeating>\d*\.\d*)\\(?:overline|bar|dot)\s*\{?(?P<period>\d+)\}?
    |(?P<number>(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+(?![\dA-Za-z]))?)
    |(?P<letters>[A-Za-z]+)
    |(?P<joined>\.\.\.+|[<>!:=]=|\*\*|\+/-)
    |(?P<sign>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_JOINED: dict[str, tuple[Kind, str]] = {
    "<=": ("command", "le"),
    ">=": ("command", "ge"),
    "!=": ("command", "ne"),
    "...": ("command", "ldots"),
    ":=": ("sign", "="),
    "==": ("sign", "="),
    "**": ("sign", "^"),
    "+/-": ("command", "pm"),
}
_IN_WORDS = re.compile(
    r"(?P<space>\s+)|(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<letters>[^\W\d_]+(?:['’-][^\W\d_]+)*)|(?P<sign>.)",
    re.DOTALL,
)


def tokens_of(text: str, units: frozenset[str], *, thousands: bool = True) -> list[Token]:
    """Read the tokens of an answer.

    `units` are runs of letters that are a word, and no product, though they are short. `thousands` says
    whether the comma of `1,234` parts thousands; else it parts two numbers. Raises Unreadable for a text that
    is longer than MAX_LENGTH.
    """
    text = unicodedata.normalize("NFKC", text.translate(_TRANSLATION)).strip()
    if len(text) > MAX_LENGTH:  # one character may expand to many
        raise UnreadableExpression("too long")
    text = _BOLD.sub("", text.strip("`"))
    for pattern, spelling in _REWRITTEN:
        text = pattern.sub(spelling, text)
    if "\\begin" not in text:
        text = _DOUBLED.sub(r"\\", text)
    text = _SPACED_THOUSANDS.sub(lambda number: number[0].replace(" ", ""), _GAP.sub("", text))
    if thousands:
        text = THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    if _SENTENCE.fullmatch(text) and not any(word in _SPELLED for word in text.split()):
        return _words(text, lone_letters=False)
    tokens: list[Token] = []
    spaced = False
    for found in _TOKEN.finditer(text):
        if found["space"] is not None:
            spaced = True
            continue
        if found["textual"] is not None:
            tokens += _words(found["content"], lone_letters=found["textual"] in ("mathrm", "operatorname"))
        else:
            tokens += _tokens(found, spaced, units)
        spaced = False
    return tokens


def _tokens(found: re.Match[str], spaced: bool, units: frozenset[str]) -> list[Token]:
    """Return the tokens of one match outside of `\\text`: none, one, or one for each letter of a product."""
    group = found.lastgroup
    if group is None:  # a bracket that is not printed
        return []
    text = found[group]
    if group == "environment":
        return [Token("begin" if found["begin"] == "begin" else "end", text, spaced)]
    if group == "set":
        return [Token("command", "reals" if text == "R" else f"set {text}", spaced)]
    if group == "period":
        return [Token("number", f"{found['repeating']}({text})", spaced)]
    if group == "number":
        return [Token("number", text, spaced)]
    if group == "letters":
        name = _SAME.get(text, text)
        if len(text) > 1 and name in _SPELLED:
            return [Token("command", name, spaced)]
        if text in _WORD_SIGNS:
            return [Token("sign", _WORD_SIGNS[text], spaced)]
        if text in units or len(text) > 3 or text.casefold() in _SHORT_WORDS:
            return [Token("word", text, spaced)]
        return [Token("letter", letter, spaced and not place) for place, letter in enumerate(text)]
    if group == "command":
        name = _SAME.get(text, text)
        if name in _LEFT_OUT:
            return []
        if name in _SIGNS:
            return [Token("sign", _SIGNS[name], spaced)]
        return [Token("command", name, spaced)]
    if group == "joined":
        kind, name = _JOINED[text[:3]]
        return [Token(kind, name, spaced)]
    if group == "escaped":
        if text not in "{}$%_&#|":  # \( \) \[ \] begin and end a formula
            return []
        return [Token("sign", f"\\{text}" if text in "{}$" else text, spaced)]
    return [] if text == "$" else [Token("sign", text, spaced)]


def _words(content: str, *, lone_letters: bool) -> list[Token]:
    r"""Read the content of `\text` and the like.

    A single letter is a word (a unit, or a choice), except for the constants e and i; in `\mathrm`, names of
    functions are commands.
    """
    tokens: list[Token] = []
    for found in _IN_WORDS.finditer(content):
        if found["number"] is not None:
            tokens.append(Token("number", found["number"], True))
        elif found["letters"] is not None:
            run = found["letters"]
            name = _SAME.get(run, run)
            if lone_letters and len(run) > 1 and name in _SPELLED:
                tokens.append(Token("command", name, True))
            elif run in _WORD_SIGNS:
                tokens.append(Token("sign", _WORD_SIGNS[run], True))
            elif content.strip() in ("e", "i"):
                tokens.append(Token("letter", run, True))
            else:
                tokens.append(Token("word", run, True))
        elif found["sign"] is not None and found["sign"] not in "$\\~":
            tokens.append(Token("sign", found["sign"], True))
    return tokens


def written(tokens: Sequence[Token]) -> str:
    """Return the text of tokens in one spelling, for comparing what cannot be computed.

    Groups of one token are as good as the token; the case of letters does not count where there are words.
    """
    texts = [token.text for token in tokens]
    pieces: list[str] = []
    before = ""
    for place, (kind, text, _) in enumerate(tokens):
        if text == "{" and texts[place + 2 : place + 3] == ["}"]:
            continue
        if text == "}" and place > 1 and texts[place - 2] == "{":
            continue
        if kind == "command":
            text = f"\\{text}"
        if pieces and kind != "sign" and before in ("command", "word", kind) and before != "letter":
            pieces.append(" ")
        pieces.append(text)
        before = kind
    joined = "".join(pieces)
    if any(token.kind == "word" for token in tokens):
        return joined.casefold()
    return joined
