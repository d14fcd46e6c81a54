"""Declaration of a key: its default, its one-line meaning, its bounds and its relations to other keys.

    kv_cache: str = key("auto", "Where keys and values are held.", read_by(".name=native"))
    exact: bool = key(False, "Exact mode.", excludes(".skip.enable", "dumped log-probs are of other weights"))

A relation names another key, or a condition on it; `relations.py` says how conditions are written, evaluates
all relations, and reports what is wrong:

    excludes, needs      the key cannot go with, or without, the other one in this condition
    at_most, less_than   the number is bounded by that of the other key, where that is 1 or more
    at_least, divides    the number is at least that of the other key, or divides it
    surprises            where the key is set, a note says what follows from it in this condition
    read_by              the key, or all keys of the block, are read in this condition only: elsewhere a note
                         says so where they are set, and no other relation of them is reported
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal


@dataclass(frozen=True)
class KeyRelation:
    """A relation of a key to another one."""

    kind: Literal["excludes", "needs", "at_most", "at_least", "less_than", "divides", "surprises", "read_by"]
    other: str
    """Condition on the other key (excludes, needs, read_by), or its path."""
    why: str = ""
    at: str = ""
    """The own values for which the relation holds, as the second half of a condition: `=true`, `>0`,
    `!=null`; '' means any value but null, false, 0 and what is empty.
    """
    way: str = ""
    """What to set; '' means the default of each of the two keys, where that ends the conflict."""


excludes = partial(KeyRelation, "excludes")
needs = partial(KeyRelation, "needs")
at_most = partial(KeyRelation, "at_most")
at_least = partial(KeyRelation, "at_least")
less_than = partial(KeyRelation, "less_than")
divides = partial(KeyRelation, "divides")
surprises = partial(KeyRelation, "surprises")
read_by = partial(KeyRelation, "read_by")


@dataclass(frozen=True)
class KeyDeclaration:
    """What is declared of a key beside its type and its default."""

    meaning: str = ""
    relations: tuple[KeyRelation, ...] = ()
    minimum: float | None = None
    """Inclusive bounds of a number, and of each number of a list."""
    maximum: float | None = None
    above: float | None = None
    """Exclusive bounds."""
    below: float | None = None
    fewest: int | None = None
    """Bounds of the number of entries of a list."""
    most: int | None = None
    schemes: tuple[str, ...] = ()
    """Schemes that an address may have, such as http; ("*",): any."""
    argument: str = ""
    """Name of the argument of advantage estimators or policy losses that the key sets, where there is no
    symbol or the key has another name.
    """
    symbol: str = ""
    """What equations call that argument."""
    otherwise: str = ""
    """The key of the same block that sets the argument while this one is null."""


def key(default: Any, meaning: str, *relations: KeyRelation, **declared: Any) -> Any:
    """Declare a configuration key; `declared` are the further fields of `KeyDeclaration`.

    A mutable default (list, dict) is copied for each instance. `default=MISSING` makes the key mandatory.
    """
    metadata = {"declared": KeyDeclaration(meaning, relations, **declared)}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def group(cls: type[Any], *relations: KeyRelation, **defaults: Any) -> Any:
    """Declare a nested block of keys; `defaults` replace some of the block's own. Of relations a block may
    have `read_by` alone.
    """
    metadata = {"declared": KeyDeclaration(relations=relations)}
    return field(default_factory=lambda: cls(**defaults), metadata=metadata)
