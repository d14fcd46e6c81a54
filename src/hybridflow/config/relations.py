"""The relations between two keys, evaluated and told: declared in `schema.py`'s words on the key itself.

    resolved config ──relation_problems──► one line each: what was got, what is wanted, what to set
    resolved config, keys that are set ──unread_notes──► one line for keys that this run does not read

A condition is `path` (set to anything but null, false, 0 or what is empty), `path=a|b`, `path!=a`, `path<n`
or `path>n`. A path that begins with a dot is one of the same block. Conditions joined by ` or ` hold where
one of them does. A condition on a key that is not read does not hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from hybridflow.config.schema import KeyRelation
from hybridflow.config.tree import KeyInfo, field_of, keys_of
from hybridflow.config.wrong import WrongKeyRead

_ABSENT = object()
"""The value of a key that this kind of run does not have."""


@dataclass(frozen=True)
class KeyCondition:
    """A condition on one key."""

    path: str
    sign: str
    values: tuple[Any, ...]

    def holds(self, value: Any) -> bool:
        """Return whether the value of the key fulfils the condition."""
        if self.sign == "":
            return bool(value)
        if self.sign in ("<", ">"):
            if value is None:
                return False
            return bool(value < self.values[0] if self.sign == "<" else value > self.values[0])
        return any(_same(value, each) for each in self.values) == (self.sign == "=")

    def __str__(self) -> str:
        if self.sign == "":
            return self.path
        return f"{self.path}{self.sign}{' or '.join(shown(value) for value in self.values)}"


Conditions = tuple[KeyCondition, ...]


@cache
def _conditions(text: str, block: str) -> Conditions:
    """Return the conditions of a text, of which one has to hold, with paths that are whole."""
    found = []
    for part in text.split(" or "):
        match = re.fullmatch(r"([\w.]*)(!=|=|<|>|)(.*)", part)
        assert match, f"{part} is a condition"
        path, sign, values = match.groups()
        if path.startswith("."):
            path = f"{block}{path}".lstrip(".")
        found.append(KeyCondition(path, sign, tuple(map(_read, values.split("|")))))
    return tuple(found)


def _read(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if text == "null":
        return None
    try:
        return float(text)
    except ValueError:
        return text


def _same(value: Any, wanted: Any) -> bool:
    return isinstance(value, bool) == isinstance(wanted, bool) and bool(value == wanted)


def shown(value: Any) -> str:
    """Return a value as it is written on a command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if value == int(value) else str(value)
    return str(value)


class Relations:
    """The relations of one run's keys; `unbuilt` are the blocks of roles that the run does not have."""

    def __init__(self, config: Any, unbuilt: Iterable[str] = ()) -> None:
        self._config = config
        self._keys = keys_of(type(config))
        self._unbuilt = tuple(f"{block}." for block in unbuilt)

    def problems(self, follows: Mapping[str, str]) -> Iterator[str]:
        """Yield one line for each relation that is broken.

        `follows` are the keys that have the value of another one where they are left out: what is wrong with
        that value is told of the other key alone.
        """
        for info in self._keys.values():
            followed = follows.get(info.path)
            for relation in info.relations:
                line = ""
                with suppress(WrongKeyRead):
                    value = self._value(info.path)
                    told_there = followed is not None and value == self._value(followed)
                    if not told_there and self._is_read(info):
                        line = self._broken(info, relation, value)
                if line:
                    yield line

    def notes(self, given: Set[str]) -> Iterator[str]:
        """Yield one line for the keys that are set and of which this condition makes that none is read."""
        unread: dict[tuple[Conditions, str], list[str]] = {}
        for path in sorted(given):
            info = self._info(path)
            with suppress(WrongKeyRead):
                for relation, conditions in self._readers(info) if info else ():
                    if not self._holds(conditions):
                        unread.setdefault((conditions, relation.why), []).append(path)
                        break
        for (conditions, why), paths in unread.items():
            yield (
                f"{', '.join(paths)} {'is' if len(paths) == 1 else 'are'} read only with "
                f"{self._wanted(conditions)}{f': {why}' if why else ''}"
            )

    def _info(self, path: str) -> KeyInfo | None:
        """Return the key at a path; of what the user names below a key, that key."""
        while path and path not in self._keys:
            path = path.rpartition(".")[0]
        return self._keys.get(path)

    def _value(self, path: str) -> Any:
        found = self._config
        for name in path.split("."):
            if isinstance(found, Mapping):
                found = found.get(name)
            else:
                found = getattr(found, field_of(name), _ABSENT)
            if found is _ABSENT:
                break
        return found

    def _is_read(self, info: KeyInfo) -> bool:
        """Return whether the run reads the key, as far as relations and roles say."""
        if info.path.startswith(self._unbuilt):
            return False
        return all(self._holds(conditions) for _, conditions in self._readers(info))

    def _readers(self, info: KeyInfo) -> Iterator[tuple[KeyRelation, Conditions]]:
        """Yield the conditions under which a key is read; it is always read for a condition on itself."""
        for block, relation in info.readers:
            conditions = _conditions(relation.other, block)
            if info.path not in {each.path for each in conditions}:
                yield relation, conditions

    def _holds(self, conditions: Conditions) -> bool:
        return any(self._holding(each) for each in conditions)

    def _holding(self, condition: KeyCondition) -> bool:
        value = self._value(condition.path)
        if value is _ABSENT:
            return False
        info = self._info(condition.path)
        return (info is None or self._is_read(info)) and condition.holds(value)

    def _broken(self, info: KeyInfo, relation: KeyRelation, value: Any) -> str:
        """Return the line about a relation that is broken; '' where it is not."""
        block = info.path.rpartition(".")[0]
        if relation.kind in ("excludes", "needs"):
            (own,) = _conditions(f"{info.path}{relation.at}", block)
            if not own.holds(value):
                return ""
            conditions = _conditions(relation.other, block)
            if all(self._value(each.path) is _ABSENT for each in conditions):
                return ""
            if relation.kind == "needs" and not self._holds(conditions):
                return self._missing(info, own, value, relation, conditions)
            if relation.kind == "excludes":
                for each in filter(self._holding, conditions):
                    return self._conflict(info, own, value, relation, each)
            return ""
        return self._out_of_bounds(info, relation, value, block)

    def _conflict(
        self, info: KeyInfo, own: KeyCondition, value: Any, relation: KeyRelation, other: KeyCondition
    ) -> str:
        ways = [f"{info.path}={shown(info.default)}"] if not own.holds(info.default) else []
        theirs = self._info(other.path)
        if theirs is not None and theirs.path == other.path and not other.holds(theirs.default):
            ways.append(f"{other.path}={shown(theirs.default)}")
        return (
            f"{info.path}={shown(value)} with {other.path}={shown(self._value(other.path))}: {relation.why}; "
            f"set {relation.way or ' or '.join(ways) or f'another {info.path}'}"
        )

    def _missing(
        self,
        info: KeyInfo,
        own: KeyCondition,
        value: Any,
        relation: KeyRelation,
        wanted: Conditions,
    ) -> str:
        ways = [" or ".join(str(each) for each in wanted)]
        if not own.holds(info.default):
            ways.append(f"{info.path}={shown(info.default)}")
        return (
            f"{info.path}={shown(value)} needs {self._wanted(wanted)}: {relation.why}; "
            f"set {relation.way or ', or '.join(ways)}"
        )

    def _wanted(self, conditions: Conditions) -> str:
        """Return conditions that do not hold, and what is in their place."""
        wanted = " or ".join(
            f"{each.path}=true" if self._value(each.path) is False and not each.sign else str(each)
            for each in conditions
        )
        if len(conditions) > 1:
            return wanted
        return f"{wanted}, and it is {shown(self._value(conditions[0].path))}"

    def _out_of_bounds(self, info: KeyInfo, relation: KeyRelation, value: Any, block: str) -> str:
        (other,) = _conditions(relation.other, block)
        limit = self._value(other.path)
        if value is None or limit is None or limit is _ABSENT:
            return ""
        got = f"{info.path}={shown(value)}"
        against = f"{other.path}={shown(limit)}"
        why = f", {relation.why}" if relation.why else ""
        if relation.kind == "at_least" and value < limit:
            return f"{got} is less than {against}{why}: set it to {shown(limit)} or more"
        if relation.kind == "at_most" and value > limit > 0:
            return f"{got} is more than {against}{why}: set it to {shown(limit)} or less"
        if relation.kind == "less_than" and value >= limit > 0:
            return f"{got} is not below {against}{why}: set it lower"
        if relation.kind == "divides" and limit % value:
            near = max(size for size in range(1, min(value, limit) + 1) if limit % size == 0)
            return f"{got} does not divide {against}{why}: set a divisor, for example {near}"
        return ""
