"""Tools by name: a file or module of functions marked with `@tool`, and verl's YAML of tool classes.

function_tool_path, tool_config_path ──load──► ToolSpec for each tool: its schema, and how an object is made
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hybridflow.data.plugin import blaming, load_class, load_entries, load_module, load_object
from hybridflow.errors import ConfigError
from hybridflow.processes.local import in_thread
from hybridflow.tools.base import AfterLoss, ToolAnswer, answer_of, checked_after_loss, finite_reward
from hybridflow.tools.base_tool import BaseTool
from hybridflow.tools.function_tool import CALL_ID, mark_of, schema_of, takes_id
from hybridflow.tools.schemas import OpenAIFunctionToolSchema


class ToolInstance:
    """One trajectory's instance of a `BaseTool`, which may serve other trajectories, too."""

    def __init__(self, tool: BaseTool, instance_id: str) -> None:
        self._tool = tool
        self._instance_id = instance_id

    async def execute(
        self, arguments: dict[str, Any], execute_kwargs: Mapping[str, Any], call_id: str
    ) -> ToolAnswer:
        """Answer a call."""
        kwargs = _with_id(self._tool.execute, execute_kwargs, call_id)
        return answer_of(await self._tool.execute(self._instance_id, arguments, **kwargs))

    async def outcome(self, call_id: str) -> list[ToolAnswer]:
        """Return the answer of a call that was cut off, or none."""
        return _answers(await self._tool.outcome(self._instance_id, call_id))

    async def finish(
        self, score: bool, calc_reward_kwargs: Mapping[str, Any], release_kwargs: Mapping[str, Any]
    ) -> float:
        """Return the reward of the trajectory where `score` asks for it, and forget the trajectory."""
        try:
            if not score:
                return 0.0
            return finite_reward(await self._tool.calc_reward(self._instance_id, **calc_reward_kwargs))
        finally:
            await self._tool.release(self._instance_id, **release_kwargs)


async def call_function(
    path: str, arguments: dict[str, Any], execute_kwargs: Mapping[str, Any], call_id: str
) -> ToolAnswer:
    """Call "module:function"; a synchronous one in a thread, so that an event loop goes on meanwhile."""
    function = load_object(path, key="tool")
    return answer_of(await _called(function, **arguments, **_with_id(function, execute_kwargs, call_id)))


async def function_outcome(path: str, call_id: str) -> list[ToolAnswer]:
    """Return the answer of a call of "module:function" that was cut off, or none."""
    mark = mark_of(load_object(path, key="tool"))
    assert mark is not None and mark.outcome is not None, "checked as the tool was loaded"
    return _answers(await _called(mark.outcome, call_id))


async def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    return await in_thread(function, *args, **kwargs)


def _with_id(function: Callable[..., Any], kwargs: Mapping[str, Any], call_id: str) -> Mapping[str, Any]:
    return {**kwargs, CALL_ID: call_id} if takes_id(function) else kwargs


def _answers(outcome: Any) -> list[ToolAnswer]:
    return [] if outcome is None else [answer_of(outcome)]


async def begin_trajectory(tool: BaseTool, create_kwargs: Mapping[str, Any]) -> ToolInstance:
    """Return a new instance; verl's tools read `create_kwargs` in either of two ways."""
    made = await tool.create(None, create_kwargs=dict(create_kwargs), **create_kwargs)
    return ToolInstance(tool, made if isinstance(made, str) else made[0])


async def make_tool(
    path: str, config: dict[str, Any], schema: OpenAIFunctionToolSchema, create_kwargs: Mapping[str, Any]
) -> ToolInstance:
    """Return an instance of a tool "module:Class" that serves one trajectory alone."""
    return await begin_trajectory(load_object(path, key="tool")(config, schema), create_kwargs)


CLASSES_KEY = "multi_turn.tool_config_path"
TOOL_METHODS = {
    "create(self, instance_id=None, **kwargs)": ("self", "instance_id"),
    "execute(self, instance_id, parameters, **kwargs)": ("self", "instance_id", "parameters"),
    "calc_reward(self, instance_id, **kwargs)": ("self", "instance_id"),
    "release(self, instance_id, **kwargs)": ("self", "instance_id"),
}
"""How methods of a class of tools are written, and the arguments that they are called with."""
ENTRY_KEYS = {"class_name", "config", "tool_schema", "mcp"}


@dataclass(frozen=True)
class ToolSpec:
    """One tool of a run."""

    name: str
    schema: Mapping[str, Any]
    source: str
    """Where it comes from, for messages."""
    factory: Callable[..., Awaitable[ToolInstance | ToolAnswer]]
    """Begins a trajectory with the row's `create_kwargs`, or makes one call of a function."""
    arguments: tuple[Any, ...]
    """First arguments of the factory."""
    in_process: bool
    after_loss: AfterLoss = "repeat"
    shared: BaseTool | None = None
    """The one object in this process that serves all trajectories, where the tool runs here."""

    @property
    def stateful(self) -> bool:
        """Whether it begins and ends with a trajectory; a function does not."""
        return self.factory is not call_function


def load_functions(location: str, key: str = "multi_turn.function_tool_path") -> list[ToolSpec]:
    """Return the tools of a Python file or module: every function that is marked with `@tool`.

    Raises ConfigError if it cannot be imported, marks nothing, or a function has no schema.
    """
    module = load_module(location, key=key)
    specs = []
    for name, function in vars(module).items():
        mark = mark_of(function)
        if mark is None:
            continue
        schema = schema_of(function)
        after_loss = mark.after_loss or ToolSpec.after_loss
        checked_after_loss(after_loss, f"{key}: {location}: tool {name}", can_ask=mark.outcome is not None)
        specs.append(
            ToolSpec(
                schema["function"]["name"],
                schema,
                f"{location}:{name}",
                call_function,
                (f"{_absolute(location)}:{name}",),
                mark.in_process,
                after_loss,
            )
        )
    if not specs:
        raise ConfigError(
            f"{key}: {location} marks no function with @tool (from hybridflow.tools import tool)"
        )
    return specs


def load_classes(path: str, key: str = CLASSES_KEY) -> Iterator[ToolSpec]:
    """Give the tools of a YAML file: `tools: [{class_name, config, tool_schema, mcp}]`.

    Each tool is made once here, so that what is wrong with it is known before the run. Raises ConfigError.
    """
    for entry in read_entries(path, key):
        with blaming(entry.where):
            if entry.mcp is None:
                tools = [entry.cls(entry.config, entry.schema)]
            else:
                tools = entry.cls.connect(entry.config, entry.mcp)
        yield from (_spec_of(tool, entry) for tool in tools)


@dataclass(frozen=True)
class ToolEntry:
    """One entry of a YAML file, before anything is made of it."""

    cls: type[BaseTool]
    class_name: str
    config: dict[str, Any]
    schema: OpenAIFunctionToolSchema | None
    mcp: dict[str, Any] | None
    """What it says of MCP servers; None for a tool of another kind."""
    where: str
    """Its place, for messages."""


def read_entries(path: str, key: str = CLASSES_KEY) -> Iterator[ToolEntry]:
    """Give the entries of a YAML file of tools, with their classes loaded. Raises ConfigError."""
    for number, entry in enumerate(load_entries(path, "tools", "class_name", key=key)):
        yield _read_entry(entry, f"{key}: {path}, tool {number} ({entry['class_name']})")


def _read_entry(entry: dict[str, Any], where: str) -> ToolEntry:
    if unknown := set(entry) - ENTRY_KEYS:
        raise ConfigError(f"{where}: unknown keys {sorted(unknown)}; known are {sorted(ENTRY_KEYS)}")
    cls = load_class(entry["class_name"], key=where, methods=TOOL_METHODS)
    if not (inspect.isclass(cls) and issubclass(cls, BaseTool)):
        raise ConfigError(f"{where}: got {cls!r}, wanted a subclass of hybridflow.tools.base_tool.BaseTool")
    config = dict(entry.get("config") or {})
    schema = _read_schema(entry.get("tool_schema"), where)
    kind = config.get("type", "mcp" if "mcp" in entry else "native")
    if kind not in ("native", "mcp"):
        raise ConfigError(f"{where}: got config.type {kind!r}, wanted native or mcp")
    mcp = None
    if kind == "mcp":
        mcp = entry.get("mcp") or {}
    return ToolEntry(cls, entry["class_name"], config, schema, mcp, where)


def _spec_of(tool: BaseTool, entry: ToolEntry) -> ToolSpec:
    schema = {"type": "function"} | tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
    after_loss = tool.config.get("after_loss", type(tool).after_loss)
    checked_after_loss(after_loss, entry.where, can_ask=type(tool).outcome is not BaseTool.outcome)
    if tool.config.get("in_process", type(tool).in_process):
        return ToolSpec(tool.name, schema, entry.where, begin_trajectory, (tool,), True, after_loss, tool)
    # "module:Class" of "package.module.Class"; a path to a file has its colon already
    module, _, name = entry.class_name.rpartition(":" if ":" in entry.class_name else ".")
    arguments = (f"{_absolute(module)}:{name}", tool.config, tool.tool_schema)
    return ToolSpec(tool.name, schema, entry.where, make_tool, arguments, False, after_loss)


def _absolute(location: str) -> str:
    """Return the whole path of a file, because worker processes may run in another folder."""
    return str(Path(location).expanduser().resolve()) if location.endswith(".py") else location


def _read_schema(schema: Any, where: str) -> OpenAIFunctionToolSchema | None:
    if schema is None:
        return None
    try:
        return OpenAIFunctionToolSchema.model_validate(schema)
    except ValidationError as error:
        raise ConfigError(f"{where}: tool_schema is none of OpenAI's form: {error}") from error
