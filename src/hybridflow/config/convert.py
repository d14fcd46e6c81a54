"""Conversion of nested dicts into the frozen dataclasses, with all mistakes reported together.

{"data": {"seed": "x"}} ──convert(PPOConfig, tree)──► PPOConfig, or one ConfigError with a line for each key

`WRONG` is the value of a key that could not be read: whatever asks for it is not looked at, and all else is.
A value of a wrong type, or a key whose name is nearly that of another, leaves open what the user means. What
follows from such a key is left open too, so no line blames a default that the user did not choose.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin
from urllib.parse import urlsplit

from hybridflow.config.schema import KeyDeclaration
from hybridflow.config.tree import keys_of, name_of, to_tree, type_hints, type_name
from hybridflow.errors import ConfigError

C = TypeVar("C")

__all__ = ["convert", "raise_all", "suggest", "to_tree"]


class WrongKeyRead(Exception):
    """Something depends on a key that has no usable value."""


class Wrong:
    """Placeholder for the value of a wrong key: any use of it raises WrongKeyRead."""

    def __getattr__(self, name: str) -> NoReturn:
        raise WrongKeyRead

    def __copy__(self) -> Wrong:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Wrong:
        return self


def _raises(self: Wrong, *arguments: object) -> NoReturn:
    raise WrongKeyRead


for _name in (
    *("bool", "eq", "ne", "lt", "le", "gt", "ge", "hash", "iter", "len", "contains", "getitem", "call"),
    *("str", "repr", "format", "int", "float", "index", "fspath", "neg", "add", "radd", "sub", "rsub"),
    *("mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "or", "ror"),
):
    setattr(Wrong, f"__{_name}__", _raises)

WRONG = Wrong()


class _Mismatch(Exception):
    """A value that does not have the wanted type; the text says what else was wrong with it."""


def convert(root: type[C], tree: Mapping[str, Any], known_problems: Iterable[str] = ()) -> C:
    """Build `root` from nested dicts; keys that are absent take their defaults.

    Raises ConfigError that lists `known_problems` and every unknown key (and those near it), wrong type and
    value out of bounds.
    """
    problems = list(known_problems)
    config = convert_what_fits(root, tree, problems, set())
    raise_all(problems)
    return config


def convert_what_fits(root: type[C], tree: Mapping[str, Any], problems: list[str], wrong: set[str]) -> C:
    """Build `root` as `convert` does, with defaults for what is wrong; add a line on each to `problems`, and
    to `wrong` the keys that have no usable value, or may be meant by one that does not exist.
    """
    return _convert_block(root, tree, root(), "", problems, wrong, list(keys_of(root)))


def raise_all(problems: list[str]) -> None:
    """Raise one ConfigError that holds every line of `problems`; return where there is none."""
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        listed = "".join(f"\n  - {line}" for line in problems)
        error = ConfigError(f"{len(problems)} problems in the configuration:{listed}")
        error.problems = tuple(problems)
        raise error


def suggest(path: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """Return the known dotted paths nearest to `path`, by their whole text or by their last word."""
    last = path.rsplit(".", 1)[-1].lower()
    scored: list[tuple[float, str]] = []
    for candidate in known:
        whole = difflib.SequenceMatcher(None, path.lower(), candidate.lower()).ratio()
        tail = difflib.SequenceMatcher(None, last, candidate.rsplit(".", 1)[-1].lower()).ratio()
        if whole >= 0.8 or tail >= 0.72:
            scored.append((whole + 1.5 * tail, candidate))
    best = max((score for score, _ in scored), default=0.0)
    near = sorted((-score, candidate) for score, candidate in scored if score >= best - 0.35)
    return [candidate for _, candidate in near[:limit]]


def unknown_key(path: str, known: Iterable[str]) -> str:
    """Return the line for a key that does not exist."""
    near = suggest(path, known)
    if near:
        return f"unknown key {path}; did you mean {' or '.join(near)}?"
    return f"unknown key {path}; `hybridflow config` lists every key"


def _convert_block(
    cls: type[C],
    tree: Any,
    base: C,
    prefix: str,
    problems: list[str],
    wrong: set[str],
    known: list[str],
) -> C:
    if not isinstance(tree, Mapping):
        wrong.update(path for path in known if path.startswith(prefix))
        problems.append(
            f"{prefix.rstrip('.') or 'configuration'}: got {_shown(tree)}, wanted a block of keys"
        )
        return base
    hints = type_hints(cls)
    fields = {name_of(f): f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in tree:
        if name not in fields:
            problems.append(unknown_key(f"{prefix}{name}", known))
            wrong.update(suggest(f"{prefix}{name}", known))
    values: dict[str, Any] = {}
    for name, f in fields.items():
        path = f"{prefix}{name}"
        default = getattr(base, f.name)
        if name not in tree:
            values[f.name] = copy.deepcopy(default)
        elif dataclasses.is_dataclass(hints[f.name]):
            values[f.name] = _convert_block(
                type(default), tree[name], default, path + ".", problems, wrong, known
            )
        else:
            values[f.name] = default
            declared = f.metadata.get("declared", KeyDeclaration())
            try:
                values[f.name] = _convert_value(hints[f.name], tree[name])
                _check_bounds(values[f.name], declared)
            except _Mismatch as mismatch:
                wanted = f"{type_name(hints[f.name])}{_bounds(declared)}"
                problem = f"{path}: got {_shown(tree[name])}, wanted {wanted}"
                if str(mismatch):
                    problem += f" ({mismatch})"
                problems.append(problem)
                wrong.add(path)
    return cls(**values)


def _convert_value(hint: Any, value: Any) -> Any:
    origin = get_origin(hint)
    args = get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(args, value)
    if origin is Literal:
        if any(type(value) is type(arg) and value == arg for arg in args):
            return value
        near = difflib.get_close_matches(str(value), [str(arg) for arg in args], n=1)
        raise _Mismatch("".join(f"did you mean {name!r}?" for name in near))
    if origin is list:
        if not isinstance(value, (list, tuple)):
            raise _Mismatch
        return [_convert_value(args[0], item) for item in value]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _Mismatch
        return {str(name): _convert_value(args[1], item) for name, item in value.items()}
    return _convert_scalar(hint, value)


def _convert_union(args: tuple[Any, ...], value: Any) -> Any:
    if value is None and type(None) in args:
        return None
    # a value that already has one of the types stays as it is: str | list[str] does not split a string
    for arg in args:
        if arg in (str, int, float, bool) and type(value) is arg:
            return _convert_scalar(arg, value)
    hint_text = ""
    for arg in args:
        if arg is type(None):
            continue
        try:
            return _convert_value(arg, value)
        except _Mismatch as mismatch:
            hint_text = hint_text or str(mismatch)
    raise _Mismatch(hint_text)


def _convert_scalar(hint: Any, value: Any) -> Any:
    if hint is bool or hint is int:
        if type(value) is not hint:
            raise _Mismatch
        return value
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise _Mismatch
        try:
            number = float(value)  # YAML reads 1e-6 as a string
        except ValueError:
            raise _Mismatch from None
        if math.isnan(number):
            raise _Mismatch
        return number
    if hint is str:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)  # experiment_name=7 is read as a number
        if not isinstance(value, str):
            raise _Mismatch
        return value
    if hint is type(None) and value is None:
        return None
    raise _Mismatch


def _check_bounds(value: Any, key: KeyDeclaration) -> None:
    """Raise _Mismatch where the value, or an entry of the list that it is, is out of the key's bounds."""
    if isinstance(value, list):
        if not (key.fewest or 0) <= len(value) <= (key.most or len(value)):
            raise _Mismatch
        for entry in value:
            _check_bounds(entry, key)
    elif isinstance(value, str):
        if key.schemes and not _is_address(value, key.schemes):
            raise _Mismatch
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        if not (key.minimum is None or value >= key.minimum) or not (key.above is None or value > key.above):
            raise _Mismatch
        if not (key.maximum is None or value <= key.maximum) or not (key.below is None or value < key.below):
            raise _Mismatch


def _is_address(text: str, schemes: Sequence[str]) -> bool:
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018  raises for one that is no number
    except ValueError:
        return False
    return bool(parts.hostname) and (parts.scheme in schemes or schemes == ("*",))


def _bounds(key: KeyDeclaration) -> str:
    """Return the bounds of a key as text, such as ` ≥ 1`; '' where it has none."""
    signs = {"≥": key.minimum, ">": key.above, "≤": key.maximum, "<": key.below}
    said = " and ".join(f"{sign} {bound}" for sign, bound in signs.items() if bound is not None)
    if key.fewest is not None:
        said += f" with {key.fewest} {'entries' if key.most == key.fewest else 'or more entries'}"
    if key.schemes:
        addresses = " or ".join(f"{scheme.replace('*', 'SCHEME')}://…" for scheme in key.schemes)
        said += f"that is an address {addresses}"
    return f" {said}" if said else ""


def _shown(value: Any) -> str:
    return "null" if value is None else f"{value!r} ({type(value).__name__})"
