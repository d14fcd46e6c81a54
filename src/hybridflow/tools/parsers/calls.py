"""Tool calls in JSON: which objects are calls, and when none can have been lost."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.tools.parsers.source import Unreadable

NO_JSON = (ValueError, RecursionError)
"""What `json` raises for a text that is no JSON, or that is nested too deeply to be read."""
ARGUMENTS = ("arguments", "parameters")
"""Keys under which a call has its arguments: that of most formats, and Llama's. No other is guessed at."""
KEYS = frozenset({"name", *ARGUMENTS, "id", "type"})
SHOWN = 40
"""Characters of a wrong text that a message repeats."""


@dataclass(frozen=True)
class ToolCall:
    """Call that a model wrote."""

    name: str
    arguments: str
    """A JSON object, as text."""
    id: str = ""
    """Name that the model gave the call, where its format has one."""


def read_json(text: str) -> Any:
    """Return the value of a JSON text; line ends and tabs may stand in strings as they are.

    Raises Unreadable for anything else: also for NaN, for a number too large for a float, and for an object
    that has a key twice, since one of its values would be lost.
    """
    try:
        return json.loads(
            text,
            strict=False,
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except Unreadable:
        raise
    except RecursionError as error:
        raise Unreadable("its JSON is nested too deeply") from error
    except ValueError as error:
        raise Unreadable(f"its JSON is wrong ({error})") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Unreadable(f"it has the key {shown(twice)} twice")
    return made


def _refuse_constant(name: str) -> Any:
    raise Unreadable(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Unreadable(f"the number {shown(text)} is too large")
    return value


def call_of(value: Any) -> ToolCall:
    """Return the call that a JSON value encodes.

    It is an object with a `name` and, under `arguments` or `parameters`, an object or the JSON text of one;
    `id` and `type` may stand beside them, and all of it in OpenAI's {"type": "function", "function": {…}}.
    Raises Unreadable for any other key, which may be a misspelt part of the call: no call has less than was
    written.
    """
    if not isinstance(value, dict):
        raise Unreadable("it is no JSON object with name and arguments")
    written = value
    if isinstance(value.get("function"), dict):
        _check_keys(value, frozenset({"function", "id", "type"}))
        written = {**value["function"]}
        if "id" not in written and "id" in value:
            written["id"] = value["id"]
    _check_keys(written, KEYS)
    if "name" not in written:
        raise Unreadable("it has no name")
    keys = [key for key in ARGUMENTS if key in written]
    if len(keys) > 1:
        raise Unreadable("it has both arguments and parameters")
    arguments = written[keys[0]] if keys else {}
    return made_call(written["name"], arguments, written.get("id"))


def calls_of(value: Any) -> list[ToolCall]:
    """Return the calls that a JSON value encodes: that of an object, or those of a list of objects.

    Raises Unreadable as `call_of` does, and for an empty list.
    """
    if not isinstance(value, list):
        return [call_of(value)]
    if not value:
        raise Unreadable("its list of calls is empty")
    return [call_of(each) for each in value]


def _check_keys(value: Mapping[str, Any], known: frozenset[str]) -> None:
    unknown = [shown(key) for key in value if key not in known]
    if unknown:
        raise Unreadable(
            f"it has the unknown key {', '.join(unknown[:3])}, where only name and arguments are read"
        )
    if value.get("type", "function") != "function":
        raise Unreadable(f"it has the type {shown(value['type'])}, wanted function")


def made_call(name: Any, arguments: Any, call_id: Any = "") -> ToolCall:
    """Return a call; `arguments` are an object or the JSON text of one. Raises Unreadable."""
    if not isinstance(name, str) or not name or not _can_be_sent(name):
        raise Unreadable("its name is no text")
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    if not isinstance(arguments, dict):
        raise Unreadable(f"the arguments of {shown(name)} are no JSON object")
    if not isinstance(call_id, str) or not _can_be_sent(call_id):
        call_id = ""
    try:
        return ToolCall(name, as_json(arguments), call_id)
    except RecursionError as error:
        raise Unreadable("its JSON is nested too deeply") from error


def as_json(arguments: Mapping[str, Any]) -> str:
    """Return arguments as JSON that can be sent; half a surrogate pair stays an escape."""
    text = json.dumps(arguments, ensure_ascii=False)
    return text if _can_be_sent(text) else json.dumps(arguments)


def shown(value: Any) -> str:
    """Return a wrong value as messages show it: cut, and in quotes where it is a text."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def parameters_of(tools: Sequence[Any]) -> dict[str, Mapping[str, Any]]:
    """Return the JSON schema of the arguments of each tool, by the tools' names.

    `tools` are in OpenAI's form, as mappings or as objects of pydantic; what is of another form is left out.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        if hasattr(tool, "model_dump"):
            tool = tool.model_dump(exclude_none=True)
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            found[function["name"]] = parameters if isinstance(parameters, Mapping) else {}
    return found


def _can_be_sent(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
