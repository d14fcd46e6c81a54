"""The schema as a flat list of dotted paths, and operations on nested dicts and nested frozen dataclasses.

PPOConfig (a class) ──keys_of──► {"data.train_batch_size": KeyInfo, …}
nested dict ──flatten──► [("data.train_batch_size", 64), …] ──set_path──► nested dict
config ──with_values(config, {"critic.model.path": …})──► a changed copy
config ──argument_values──► {"gamma": 1.0, "clip_low": 0.2, …}, which estimators and losses are called with
"""

from __future__ import annotations

import copy
import dataclasses
import keyword
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from hybridflow.config.schema import KeyDeclaration, KeyRelation

C = TypeVar("C")

_HINTS: dict[type, dict[str, Any]] = {}


def type_hints(cls: type) -> dict[str, Any]:
    """Return the types of a class's fields, worked out once."""
    if cls not in _HINTS:
        _HINTS[cls] = get_type_hints(cls)
    return _HINTS[cls]


def field_of(name: str) -> str:
    """Return the name of the field that holds a key: a word of Python's own has `_` behind it (`async_`)."""
    return f"{name}_" if keyword.iskeyword(name) else name


def name_of(f: dataclasses.Field[Any]) -> str:
    """Return a field's name as users write it; the inverse of `field_of`."""
    return f.name.removesuffix("_")


@dataclass(frozen=True, kw_only=True)
class KeyInfo(KeyDeclaration):
    """One key of the schema: its dotted path, type and default at this place, and what is declared of it.

    Of its relations, those by which it is read are its `readers`; `otherwise` is a dotted path.
    """

    path: str
    type: Any
    default: Any
    readers: tuple[tuple[str, KeyRelation], ...] = ()
    """Conditions under which it is read, its own and those of the blocks around it, each with the block that
    paths of the condition begin in.
    """

    @property
    def is_free(self) -> bool:
        """True for a dict[str, Any]: the user names the keys below it."""
        return get_origin(self.type) is dict


_KEYS: dict[type[Any], Mapping[str, KeyInfo]] = {}
_BLOCKS: dict[type[Any], frozenset[str]] = {}


def keys_of(root: type[Any]) -> Mapping[str, KeyInfo]:
    """Return every key of a configuration class by dotted path, in the order of declaration."""
    if root not in _KEYS:
        _KEYS[root] = types.MappingProxyType({info.path: info for info in _walk(root, root(), "", ())})
    return _KEYS[root]


def _walk(
    cls: type[Any], instance: Any, prefix: str, around: tuple[tuple[str, KeyRelation], ...]
) -> Iterator[KeyInfo]:
    hints = type_hints(cls)
    for f in dataclasses.fields(cls):
        path = f"{prefix}{name_of(f)}"
        value = getattr(instance, f.name)
        declared: KeyDeclaration = f.metadata.get("declared", KeyDeclaration())
        own = [each for each in declared.relations if each.kind == "read_by"]
        readers = (*around, *((prefix.rstrip("."), each) for each in own))
        if dataclasses.is_dataclass(hints[f.name]):
            yield from _walk(type(value), value, path + ".", readers)
            continue
        fields = {each.name: getattr(declared, each.name) for each in dataclasses.fields(declared)}
        fields["relations"] = tuple(each for each in declared.relations if each not in own)
        if declared.symbol and not declared.argument:
            fields["argument"] = name_of(f)
        if declared.otherwise:
            fields["otherwise"] = prefix + declared.otherwise
        yield KeyInfo(path=path, type=hints[f.name], default=value, readers=readers, **fields)


def blocks_of(root: type[Any]) -> frozenset[str]:
    """Return the dotted paths that hold other keys, such as `actor_rollout_ref.actor`."""
    if root not in _BLOCKS:
        split = [path.split(".") for path in keys_of(root)]
        _BLOCKS[root] = frozenset(".".join(parts[:i]) for parts in split for i in range(1, len(parts)))
    return _BLOCKS[root]


def is_native(root: type[Any], path: str) -> bool:
    """Return whether `path` is a key of the schema, or is below a key whose entries the user names."""
    keys = keys_of(root)
    if path in keys:
        return True
    parts = path.split(".")
    parents = (".".join(parts[:i]) for i in range(1, len(parts)))
    return any(parent in keys and keys[parent].is_free for parent in parents)


def type_name(hint: Any) -> str:
    """Return a type as a user writes it: `int or null`, `one of 'error', 'left'`, `list of float`."""
    origin = get_origin(hint)
    args = get_args(hint)
    if hint is Any:
        return "anything"
    if hint is type(None):
        return "null"
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(arg) for arg in args)
    if origin is list:
        return f"list of {type_name(args[0])}"
    if origin is dict:
        return "block of keys"
    if args and origin is not None:
        return "one of " + ", ".join(repr(arg) for arg in args)
    return str(getattr(hint, "__name__", hint))


def to_tree(config: Any) -> dict[str, Any]:
    """Return a configuration as nested plain dicts, lists and scalars; the inverse of `convert`."""
    tree: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            tree[name_of(f)] = to_tree(value)
        else:
            tree[name_of(f)] = copy.deepcopy(value)
    return tree


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the leaves of nested dicts as (dotted path, value), with empty dicts and those of odd names."""
    leaves: list[tuple[str, Any]] = []
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and all(isinstance(k, str) and "." not in k for k in value):
            leaves.extend(flatten(value, path + "."))
        else:
            leaves.append((path, value))
    return leaves


def set_path(tree: dict[str, Any], path: str, value: Any) -> None:
    """Write `value` at a dotted path, making dicts on the way; a dict is merged into a dict there."""
    *parents, last = path.split(".")
    node = tree
    for name in parents:
        child = node.get(name)
        if not isinstance(child, dict):
            child = node[name] = {}
        node = child
    if isinstance(value, dict) and isinstance(node.get(last), dict):
        node[last] = {**node[last], **value}
    else:
        node[last] = value


def delete_path(tree: dict[str, Any], path: str) -> None:
    """Remove the entry at a dotted path, if there is one."""
    *parents, last = path.split(".")
    node: Any = tree
    for name in parents:
        if not isinstance(node, dict):
            return
        node = node.get(name)
    if isinstance(node, dict):
        node.pop(last, None)


def get_value(config: Any, path: str) -> Any:
    """Return the value at a dotted path of a configuration."""
    for name in path.split("."):
        if isinstance(config, Mapping):
            config = config[name]
        else:
            config = getattr(config, field_of(name))
    return config


def with_values(config: C, values: Mapping[str, Any]) -> C:
    """Return a copy of `config` in which the keys at these dotted paths hold these values."""
    nested: dict[str, dict[str, Any]] = {}
    changes: dict[str, Any] = {}
    for path, value in values.items():
        head, _, rest = path.partition(".")
        if rest:
            nested.setdefault(field_of(head), {})[rest] = value
        else:
            changes[field_of(head)] = value
    for head, inner in nested.items():
        changes[head] = with_values(getattr(config, head), inner)
    changed: C = dataclasses.replace(config, **changes)  # type: ignore[type-var]
    return changed


def argument_keys(root: type[Any]) -> Mapping[str, KeyInfo]:
    """Return the key of a configuration class that sets each argument, by the argument's name."""
    return {info.argument: info for info in keys_of(root).values() if info.argument}


def arguments_of_keys(root: type[Any]) -> Mapping[str, frozenset[str]]:
    """Return the arguments that each key sets, by dotted path; keys that stand in for others included."""
    found: dict[str, frozenset[str]] = {}
    for name, info in argument_keys(root).items():
        for path in filter(None, (info.path, info.otherwise)):
            found[path] = found.get(path, frozenset()) | {name}
    return found


def key_in_force(config: Any, info: KeyInfo) -> str:
    """Return the dotted path of the key that sets an argument in this run."""
    if info.otherwise and get_value(config, info.path) is None:
        return info.otherwise
    return info.path


def argument_values(config: Any) -> dict[str, Any]:
    """Return the values of the arguments that the keys of a configuration, or of a block of it, set."""
    return {
        name: get_value(config, key_in_force(config, info))
        for name, info in argument_keys(type(config)).items()
    }
