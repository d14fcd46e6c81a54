"""Values that a format writes without quotes, such as Qwen3-Coder's, read by the schema of their tool.

A text stays as it was written where the schema takes a text. It is read as JSON where the schema takes
none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hybridflow.tools.parsers.calls import read_json
from hybridflow.tools.parsers.source import Unreadable

TELLING = frozenset({"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"})
"""Keys of a schema that say what values there may be."""
DEEPEST = 32
"""Schemas within schemas that are looked at; what is deeper fits."""
LITERALS = {"true": True, "false": False, "none": None}
"""Words that are read as JSON's in any case of letters, as chat templates in Python write them."""
Schema = Mapping[str, Any]


def value_of(text: str, name: str, parameters: Schema | None) -> Any:
    """Return the value of the argument `name` of a tool whose arguments have the schema `parameters`.

    - `null` where the schema takes it is null; else the text itself, where the schema takes a text.
    - Else what the text is as JSON, or as True, False or None of Python, where that fits.
    - Else the text, of which the tool's check then says what is wrong.

    Where nothing is known of the argument (an unknown tool or argument, a schema without a type), JSON is
    read as JSON. But texts in quotes, and numbers that JSON would write in another way, stay as they were
    written.
    """
    root = parameters or {}
    schema = properties_of(root).get(name)
    if schema is None:
        schema = root.get("additionalProperties")
    if not isinstance(schema, Mapping) or not TELLING & schema.keys():
        return _untyped(text)
    if text.strip() == "null" and fits(None, schema, root):
        return None
    if fits(text, schema, root):
        return text
    value = _as_json(text)
    return value if fits(value, schema, root) else text


def properties_of(parameters: Schema) -> Schema:
    """Return the schemas of single arguments, by their names; none where there is something else."""
    known = parameters.get("properties")
    return known if isinstance(known, Mapping) else {}


def _as_json(text: str) -> Any:
    """Return what a text is as JSON or as a literal of Python, else the text."""
    literal = text.strip().lower()
    if literal in LITERALS:
        return LITERALS[literal]
    try:
        return read_json(text)
    except Unreadable:
        return text


def _untyped(text: str) -> Any:
    try:
        value = read_json(text)
    except Unreadable:
        return text
    if isinstance(value, str):
        return text
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and json.dumps(value) != text.strip():
        return text
    return value


def fits(value: Any, schema: Any, root: Schema) -> bool:
    """Return whether a schema takes a value, by its types and its lists of values alone.

    `root` is the schema in which a `$ref` finds its target; a target that is not in it takes everything.
    """
    return _fits(value, schema, root, {}, 0)


def _fits(value: Any, schema: Any, root: Schema, seen: dict[int, bool], depth: int) -> bool:
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return schema is not False
    if id(schema) in seen:  # one that asks for itself says nothing new
        return seen[id(schema)]
    seen[id(schema)] = False
    answers = []
    if "$ref" in schema:
        target = _target(schema["$ref"], root)
        answers.append(target is None or _fits(value, target, root, seen, depth + 1))
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        answers.append(any(_is_of(value, name) for name in names))
    if "const" in schema:
        answers.append(_is_same(value, schema["const"]))
    if isinstance(schema.get("enum"), list):
        answers.append(any(_is_same(value, each) for each in schema["enum"]))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            answers.append(any(_fits(value, each, root, seen, depth + 1) for each in schema[key]))
    if isinstance(schema.get("allOf"), list):
        answers.append(all(_fits(value, each, root, seen, depth + 1) for each in schema["allOf"]))
    seen[id(schema)] = all(answers)
    return seen[id(schema)]


def _is_of(value: Any, name: Any) -> bool:
    """Return whether a value is of a type of JSON; a type that there is not takes everything."""
    if name == "string":
        return isinstance(value, str)
    if name == "boolean":
        return isinstance(value, bool)
    if name == "null":
        return value is None
    if name == "array":
        return isinstance(value, list)
    if name == "object":
        return isinstance(value, dict)
    if name in ("integer", "number"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (name == "number" or isinstance(value, int) or value.is_integer())
    return True


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two values are the same in JSON, where true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _target(reference: Any, root: Schema) -> Any:
    """Return the schema at a place in `root`, such as #/$defs/Name, or None where there is none."""
    place: Any = root
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for part in filter(None, reference[1:].split("/")):
        place = place.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place
