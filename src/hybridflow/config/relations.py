"""The relations between two keys, evaluated and reported: declared in `schema.py`'s words on the key itself.

    resolved config ──Relations.problems──► one line each: what was got, what is wanted, what to set
    keys that are set ──Relations.notes──► one line for keys that this run does not read

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

from hybridflow.config.convert import WrongKeyRead
from hybridflow.config.schema import KeyRelation
from hybridflow.config.tree import KeyInfo, field_of, keys_of

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
        if self.sign == "<":
            return value is not None and bool(value < self.values[0])
        if self.sign == ">":
            return value is not None and bool(value > self.values[0])
        found = any(
            isinstance(value, bool) == isinstance(each, bool) and value == each for each in self.values
        )
        return found == (self.sign == "=")

    def __str__(self) -> str:
        return f"{self.path}{self.sign}{' or '.join(shown(value) for value in self.values)}"


@cache
def _conditions(text: str, block: str) -> tuple[KeyCondition, ...]:
    """Return the conditions of a text, of which one has to hold, with paths that are whole."""
    found = []
    for part in text.split(" or "):
        match = re.fullmatch(r"([\w.]*)(!=|=|<|>|)(.*)", part)
        assert match, f"{part} is a condition"
        path, sign, values = match.groups()
        if path.startswith("."):
            path = f"{block}{path}".lstrip(".")
        found.append(KeyCondition(path, sign, tuple(map(_read, values.split("|"))) if sign else ()))
    return tuple(found)


def _read(text: str) -> Any:
    constants = {"true": True, "false": False, "null": None}
    if text in constants:
        return constants[text]
    with suppress(ValueError):
        return float(text)
    return text


def shown(value: Any) -> str:
    """Return a value as it is written on a command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and value.is_integer() else str(value)


class Relations:
    """The relations of one run's keys; `unbuilt` are the blocks of roles that the run does not have."""

    def __init__(self, config: Any, unbuilt: Iterable[str] = ()) -> None:
        self._config = config
        self._keys = keys_of(type(config))
        self._unbuilt = tuple(f"{block}." for block in unbuilt)

    def problems(self, follows: Mapping[str, str]) -> Iterator[str]:
        """Yield one line for each relation that is broken.

        `follows` are the keys that have the value of another one where they are left out: what is wrong with
        that value is reported for the other key alone.
        """
        for info in self._keys.values():
            for relation in (each for each in info.relations if each.kind != "surprises"):
                line = ""
                with suppress(WrongKeyRead):
                    value = self._value(info.path)
                    told_there = info.path in follows and value == self._value(follows[info.path])
                    if not told_there and self._is_read(info):
                        line = self._broken(info, relation, value)
                if line:
                    yield line

    def notes(self, given: Set[str]) -> Iterator[str]:
        """Yield one line for the keys that are set and not read for the same reason, and for each key that
        means something else in this run than it seems to.
        """
        unread: dict[tuple[str, str], list[str]] = {}
        surprising: list[str] = []
        for path, info in ((path, self._info(path)) for path in sorted(given)):
            if info is None:
                continue
            for relation, conditions in self._readers(info):
                if not self._holds(conditions):
                    unread.setdefault((self._wanted(conditions), relation.why), []).append(path)
                    break
            else:
                value = self._value(info.path)
                told = [each for each in info.relations if each.kind == "surprises"]
                surprising.extend(self._broken(info, relation, value) for relation in told)
        for (wanted, why), paths in unread.items():
            verb = "is" if len(paths) == 1 else "are"
            yield f"{', '.join(paths)} {verb} read only with {wanted}{f': {why}' if why else ''}"
        yield from filter(None, surprising)

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
            elif found is not _ABSENT:
                found = getattr(found, field_of(name), _ABSENT)
        return found

    def _is_read(self, info: KeyInfo) -> bool:
        """Return whether the run reads the key, as far as relations and roles say."""
        if info.path.startswith(self._unbuilt):
            return False
        return all(self._holds(conditions) for _, conditions in self._readers(info))

    def _readers(self, info: KeyInfo) -> Iterator[tuple[KeyRelation, tuple[KeyCondition, ...]]]:
        """Yield the conditions under which a key is read; it is always read for a condition on itself."""
        for block, relation in info.readers:
            conditions = _conditions(relation.other, block)
            if info.path not in {each.path for each in conditions}:
                yield relation, conditions

    def _holds(self, conditions: Iterable[KeyCondition]) -> KeyCondition | None:
        """Return the first of the conditions that holds, or None."""
        for condition in conditions:
            value = self._value(condition.path)
            info = self._info(condition.path)
            if value is not _ABSENT and (info is None or self._is_read(info)) and condition.holds(value):
                return condition
        return None

    def _written(self, conditions: Iterable[KeyCondition]) -> list[str]:
        """Return conditions as a command line sets them."""
        return [
            f"{each}=true" if not each.sign and self._value(each.path) is False else str(each)
            for each in conditions
        ]

    def _wanted(self, conditions: tuple[KeyCondition, ...]) -> str:
        """Return conditions that do not hold, and what is in the place of one that stands alone."""
        wanted = self._written(conditions)
        if len(wanted) > 1:
            return " or ".join(wanted)
        return f"{wanted[0]}, and it is {shown(self._value(conditions[0].path))}"

    def _broken(self, info: KeyInfo, relation: KeyRelation, value: Any) -> str:
        """Return the line about a relation that is broken; '' where it is not."""
        block = info.path.rpartition(".")[0]
        others = _conditions(relation.other, block)
        if all(self._value(each.path) is _ABSENT for each in others):
            return ""
        got = f"{info.path}={shown(value)}"
        if relation.kind not in ("excludes", "needs", "surprises"):
            return self._out_of_bounds(got, relation, value, others[0].path)
        (own,) = _conditions(f"{info.path}{relation.at}", block)
        holding = self._holds(others)
        if not own.holds(value) or (holding is None) == (relation.kind != "needs"):
            return ""
        ways = [] if own.holds(info.default) else [f"{info.path}={shown(info.default)}"]
        if holding is None:
            ways = [*self._written(others), *ways]
            clash = f"{got} needs {self._wanted(others)}"
        else:
            theirs = self._keys.get(holding.path)
            if theirs is not None and not holding.holds(theirs.default):
                ways.append(f"{theirs.path}={shown(theirs.default)}")
            clash = f"{got} with {holding.path}={shown(self._value(holding.path))}"
        if relation.kind == "surprises":
            return f"{clash}: {relation.why}"
        return f"{clash}: {relation.why}; set {relation.way or ' or '.join(ways) or f'another {info.path}'}"

    def _out_of_bounds(self, got: str, relation: KeyRelation, value: Any, other: str) -> str:
        limit = self._value(other)
        if value is None or limit is None:
            return ""
        against = f"{other}={shown(limit)}{f', {relation.why}' if relation.why else ''}"
        if relation.kind == "at_least" and value < limit:
            return f"{got} is less than {against}: set it to {shown(limit)} or more"
        if relation.kind == "at_most" and value > limit > 0:
            return f"{got} is more than {against}: set it to {shown(limit)} or less"
        if relation.kind == "less_than" and value >= limit > 0:
            return f"{got} is not below {against}: set it lower"
        if relation.kind == "divides" and limit % value:
            near = max(size for size in range(1, min(value, limit) + 1) if limit % size == 0)
            return f"{got} does not divide {against}: set a divisor, for example {near}"
        return ""
