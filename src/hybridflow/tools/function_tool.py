"""`@tool`: a typed function, or a method of an environment, becomes a tool with a JSON schema.

@tool ──marks──► function ──schema_of──► {"type": "function", "function": {"name", "parameters", …}}

The schema is made of the signature (types; an argument with a default is not required) and of the docstring
(its text before the arguments, and the description of each argument, in Google's or Sphinx's form).
"""

from __future__ import annotations

import inspect
import re
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, overload

from hybridflow.errors import ConfigError
from hybridflow.tools.base import AfterLoss, checked_after_loss

Function = TypeVar("Function", bound=Callable[..., Any])

TYPES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    dict: "object",
    Mapping: "object",
}
CALL_ID = "call_id"
"""The argument of a tool that is not the model's: the id of the call."""
LISTS = (list, tuple, set, Sequence)
SECTION = re.compile(r"^(?:(?:Args|Arguments|Parameters|Returns|Yields|Raises|Examples?):\s*$|:\w+)", re.M)
GOOGLE_BLOCK = re.compile(r"^(?:Args|Arguments|Parameters):\s*\n((?:[ \t]+.*\n?|\n)*)", re.M)
GOOGLE = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:(.*(?:\n[ \t]+.*|\n(?=\n))*)", re.M)
SPHINX = re.compile(r"^:param\s+(?:[^:\n]*\s)?(\w+):(.*(?:\n[ \t]+.*)*)", re.M)


@dataclass(frozen=True)
class ToolMark:
    """Mark that `@tool` leaves on a function; a field that is None is taken from the function itself."""

    name: str | None = None
    description: str | None = None
    schema: Mapping[str, Any] | None = None
    in_process: bool = False
    after_loss: AfterLoss | None = None
    """None: repeat, and for a method that of its environment."""
    outcome: Callable[[str], Any] | None = None


@overload
def tool(function: Function, /) -> Function: ...


@overload
def tool(
    function: str | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    schema: Mapping[str, Any] | None = None,
    in_process: bool = False,
    after_loss: AfterLoss | None = None,
    outcome: Callable[[str], Any] | None = None,
) -> Callable[[Function], Function]: ...


def tool(
    function: Callable[..., Any] | str | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    schema: Mapping[str, Any] | None = None,
    in_process: bool = False,
    after_loss: AfterLoss | None = None,
    outcome: Callable[[str], Any] | None = None,
) -> Any:
    """Mark a function, or a method of an environment, as a tool: `@tool`, `@tool("name")`, `@tool(name=…)`.

    The function itself is unchanged. It returns what the model reads: a text, anything that JSON can write, a
    `ToolAnswer`, or a tuple (answer, reward) or (answer, reward, metrics). `schema` replaces the one that is
    made of the signature, for a function whose arguments have no JSON types. A function runs in a worker
    process, which is killed at the deadline of a call; with `in_process` in the driver, in a thread that
    cannot be killed, or on the event loop if it is `async`.

    An argument `call_id: str` is not the model's: it is the id of the call, the same when the call is made
    again. `after_loss` says what becomes of a call that was cut off, with `ask` by `outcome(call_id)`: what
    the tool has returned, or None where it was not carried out.
    Raises ConfigError for another `after_loss`.
    """
    if isinstance(function, str):
        name = function
    if after_loss is not None:  # a method's environment may have an outcome of its own
        checked_after_loss(after_loss, f"@tool({name or ''})", can_ask=True)
    mark = ToolMark(name, description, schema, in_process, after_loss, outcome)

    def marked(function: Function) -> Function:
        function.__tool__ = mark  # type: ignore[attr-defined]
        return function

    return marked(function) if callable(function) else marked


function_tool = tool
"""verl's name of the same decorator."""


def mark_of(function: Any) -> ToolMark | None:
    """Return the mark of a function that is a tool, or None."""
    mark = getattr(function, "__tool__", None)
    return mark if isinstance(mark, ToolMark) else None


def tool_methods(cls: type) -> Mapping[str, dict[str, Any]]:
    """Return the schema of each method of a class that is marked with `@tool`, by the name of the method.

    The name by which the model calls it is in the schema. Raises ConfigError as `schema_of` does.
    """
    return {name: schema_of(method) for name, method in inspect.getmembers(cls) if mark_of(method)}


def takes_id(function: Callable[..., Any]) -> bool:
    """Return whether a function is to be given the id of each call."""
    return CALL_ID in inspect.signature(function).parameters


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return OpenAI's schema of a function: {"type": "function", "function": {…}}.

    Known types are str, int, float, bool, None, Any, Literal, list, tuple, set, dict, and unions of these.
    Raises ConfigError for an argument without a type, of another type, or of the form *args or **kwargs.
    """
    mark = mark_of(function) or ToolMark()
    if mark.schema is not None:
        return dict(mark.schema)
    place = f"{inspect.getsourcefile(function)}: tool {function.__qualname__}"
    description, described = _read_docstring(inspect.getdoc(function) or "")
    hints = _hints_of(function, place)
    properties: dict[str, Any] = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", CALL_ID):
            continue
        where = f"{place}, argument {parameter.name!r}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"{where}: got the form {parameter}, wanted an argument with a name and a type")
        if parameter.name not in hints:
            raise ConfigError(f"{where}: it has no type; write, for example, {parameter.name}: str")
        properties[parameter.name] = _json_type(hints[parameter.name], where)
        if parameter.name in described:
            properties[parameter.name]["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    name = mark.name or function.__name__
    described_as = mark.description or description
    return {
        "type": "function",
        "function": {"name": name, "description": described_as, "parameters": parameters},
    }


def _hints_of(function: Callable[..., Any], place: str) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except (NameError, TypeError) as error:
        raise ConfigError(f"{place}: its types cannot be read: {error}") from error


def _json_type(hint: Any, where: str) -> dict[str, Any]:
    origin = get_origin(hint) or hint
    inner = get_args(hint)
    if hint is Any:
        return {}
    if origin is Literal:
        kinds = {TYPES[type(value)] for value in inner if type(value) in TYPES}
        return {"enum": list(inner)} | ({"type": kinds.pop()} if len(kinds) == 1 else {})
    if origin in (Union, types.UnionType):
        options = [_json_type(each, where) for each in inner]
        if all(set(option) == {"type"} for option in options):
            return {"type": [option["type"] for option in options]}
        return {"anyOf": options}
    if origin in TYPES:
        return {"type": TYPES[origin]}
    if origin in LISTS:
        return {"type": "array", **({"items": _json_type(inner[0], where)} if inner else {})}
    raise ConfigError(
        f"{where}: got the type {hint}, wanted str, int, float, bool, list, dict, Literal, or a union"
    )


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the text before the arguments, and the description of each argument."""
    description = SECTION.split(text, maxsplit=1)[0].strip()
    block = GOOGLE_BLOCK.search(text)
    found = GOOGLE.findall(textwrap.dedent(block[1]) if block else "") + SPHINX.findall(text)
    return description, {name: " ".join(words.split()) for name, words in found}
