"""Declaration of a key: its default, its one-line meaning, its bounds and its relations to other keys.

    kv_cache: str = key("auto", "Where keys and values are held.", read_by(".name=native"))
    exact: bool = key(False, "Exact mode.", excludes(".skip.enable", "dumped log-probs are of other weights"))

A relation names another key with a condition on it. `relations.py` says how conditions are written, evaluates
all relations, and tells what is wrong.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Any, Literal

RelationKind = Literal["excludes", "needs", "at_most", "at_least", "less_than", "divides", "read_by"]


@dataclass(frozen=True)
class KeyRelation:
    """A relation of a key to another one."""

    kind: RelationKind
    other: str
    """Condition on the other key (excludes, needs, read_by), or its path."""
    why: str = ""
    at: str = ""
    """The own values for which the relation holds, as the second half of a condition: `=true`, `>0`,
    `!=null`; '' stands for any value but null, false, 0 and what is empty.
    """
    way: str = ""
    """What to set; '' stands for the default of each of the two keys, where that ends the conflict."""


def excludes(other: str, why: str, *, at: str = "", way: str = "") -> KeyRelation:
    """The key cannot go with the other one in this condition."""
    return KeyRelation("excludes", other, why, at, way)


def needs(other: str, why: str, *, at: str = "", way: str = "") -> KeyRelation:
    """The key cannot go without the other one in this condition."""
    return KeyRelation("needs", other, why, at, way)


def at_most(other: str, why: str = "") -> KeyRelation:
    """The number is at most that of the other key; there, null and numbers below 1 are no limit."""
    return KeyRelation("at_most", other, why)


def at_least(other: str, why: str = "") -> KeyRelation:
    """The number is at least that of the other key."""
    return KeyRelation("at_least", other, why)


def less_than(other: str, why: str = "") -> KeyRelation:
    """The number is below that of the other key; there, null and numbers below 1 are no limit."""
    return KeyRelation("less_than", other, why)


def divides(other: str, why: str = "") -> KeyRelation:
    """The number divides that of the other key."""
    return KeyRelation("divides", other, why)


def read_by(other: str, why: str = "") -> KeyRelation:
    """The key, or all keys of the block, are read only in this condition: else a note says so where they are
    set, and no other relation of them is told. `why` says what is read in their place.
    """
    return KeyRelation("read_by", other, why)


def key(
    default: Any,
    meaning: str,
    *relations: KeyRelation,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    fewest: int | None = None,
    most: int | None = None,
    schemes: tuple[str, ...] = (),
    argument: str = "",
    symbol: str = "",
    otherwise: str = "",
) -> Any:
    """Declare a configuration key.

    `minimum`/`maximum` are inclusive bounds, `above` and `below` exclusive ones, checked by the converter on
    numbers and on each number of a list; `fewest` and `most` bound the entries of a list. `schemes` are those
    that the address may have, such as http; ("*",) any. A mutable default (list, dict) is copied for each
    instance. `default=MISSING` makes the key mandatory.

    `symbol` is what equations call the argument of advantage estimators or policy losses that the key sets,
    and `argument` its name where there is no symbol or the key has another name. While the key is null, the
    key `otherwise` of the same block sets the argument.
    """
    metadata = {
        "meaning": meaning,
        "relations": relations,
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
        "below": below,
        "fewest": fewest,
        "most": most,
        "schemes": schemes,
        "argument": argument,
        "symbol": symbol,
        "otherwise": otherwise,
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def group(cls: type[Any], *relations: KeyRelation, **defaults: Any) -> Any:
    """Declare a nested block of keys; `defaults` replace some of the block's own. Of relations a block may
    have `read_by` alone.
    """
    return field(default_factory=lambda: cls(**defaults), metadata={"relations": relations})


__all__ = [
    "MISSING",
    "KeyRelation",
    "at_least",
    "at_most",
    "divides",
    "excludes",
    "group",
    "key",
    "less_than",
    "needs",
    "read_by",
]
