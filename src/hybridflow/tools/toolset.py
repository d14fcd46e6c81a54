"""All tools of a run, and those of one trajectory.

Toolset (checked before the run) ──open(hosts, tools_kwargs)──► OpenTools ──call──► answers, one a call
                                                                     └────close──► reward
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import jsonschema

from hybridflow.config.agent import AgentConfig, MultiTurnConfig
from hybridflow.errors import ConfigError, DataError
from hybridflow.processes.errors import CallFailed, CallRaised
from hybridflow.processes.local import HostsLike, LocalHosts, ObjectLike
from hybridflow.tools.base import AfterLoss, Tool, ToolAnswer, ToolFailed, answer_of, answer_of_failure
from hybridflow.tools.function_tool import CALL_ID
from hybridflow.tools.parsers.calls import NO_JSON, ToolCall
from hybridflow.tools.parsers.typed import fits
from hybridflow.tools.tool_config import ToolSpec, function_outcome, load_classes, load_functions

if TYPE_CHECKING:  # the room `protocol` imports torch, and `hybridflow try` starts without it
    from hybridflow.protocol.spans import SpanLog

logger = logging.getLogger(__name__)

T = TypeVar("T")
Kwargs = Mapping[str, Mapping[str, Any]]


class HostedTool:
    """One tool of one trajectory (a `Tool`), wherever it runs."""

    def __init__(self, spec: ToolSpec, hosts: HostsLike, kwargs: Kwargs, deadline_s: float) -> None:
        self.name = spec.name
        self.schema = spec.schema
        self.after_loss = spec.after_loss
        self.has_state = spec.stateful
        self._spec = spec
        self._hosts = hosts
        self._kwargs = kwargs
        self._deadline_s = deadline_s
        self._object: ObjectLike | None = None

    async def open(self, create_kwargs: Mapping[str, Any]) -> None:
        """Begin the trajectory, where the tool has a state."""
        if self._spec.stateful:
            try:
                self._object = await self._make(create_kwargs, deadline_s=self._deadline_s)
            except CallFailed as error:
                raise ToolFailed(error.cause, f"the tool {self.name} could not begin: {error}") from error

    async def call(self, arguments: dict[str, Any], deadline_s: float, call_id: str) -> ToolAnswer:
        """Answer a call; what the tool raises is an answer. Raises ToolFailed for a lost process."""
        words = (arguments, self._kwargs.get("execute_kwargs", {}), call_id)
        try:
            if self._object is None:
                made = await self._make(*words, deadline_s=deadline_s)
                answer: ToolAnswer = made.value()
            else:
                answer = await self._object.call("execute", *words, deadline_s=deadline_s)
        except CallFailed as error:
            logger.debug("the tool %s failed", self.name, exc_info=True)
            return answer_of_failure(self.name, error, deadline_s)
        return answer

    async def outcome(self, call_id: str, deadline_s: float) -> ToolAnswer | None:
        """Return the answer of a call that was cut off, or None where it was not carried out."""
        try:
            if self._object is None:
                made = await self._make(call_id, deadline_s=deadline_s, factory=function_outcome)
                answers: list[ToolAnswer] = made.value()
            else:
                answers = await self._object.call("outcome", call_id, deadline_s=deadline_s)
        except CallFailed as error:
            raise _no_outcome(self.name, call_id, error) from error
        return answers[0] if answers else None

    async def close(self, score: bool = False) -> float:
        """End the trajectory, and return its reward by the tool."""
        made = self._object
        if made is None:
            return 0.0
        self._object = None
        ends = [self._kwargs.get(name, {}) for name in ("calc_reward_kwargs", "release_kwargs")]
        try:
            return float(await made.call("finish", score, *ends, deadline_s=self._deadline_s))
        except CallFailed as error:
            raise ToolFailed(error.cause, f"the tool {self.name} could not end: {error}") from error
        finally:
            await made.close()

    async def _make(
        self, *further: Any, deadline_s: float, factory: Callable[..., Any] | None = None
    ) -> ObjectLike:
        hosts = self._hosts
        if self._spec.in_process:
            hosts = LocalHosts()
        factory = factory or self._spec.factory
        name = f"{factory.__module__}:{factory.__name__}"
        return await hosts.create(name, *self._spec.arguments, *further, deadline_s=deadline_s)


class MethodTool:
    """A method of an environment that the model calls as a tool."""

    has_state = True

    def __init__(
        self,
        method: str,
        schema: Mapping[str, Any],
        target: ObjectLike,
        after_loss: AfterLoss = "repeat",
        *,
        takes_id: bool = False,
    ) -> None:
        """With `takes_id` it is given the id of each call."""
        self.name = schema["function"]["name"]
        self.schema = schema
        self.after_loss = after_loss
        self._method = method
        self._target = target
        self._takes_id = takes_id

    async def open(self, create_kwargs: Mapping[str, Any]) -> None:
        """Do nothing: the environment is open."""

    async def call(self, arguments: dict[str, Any], deadline_s: float, call_id: str) -> ToolAnswer:
        """Call the method; what it raises is reported to the model. Raises ToolFailed for a lost process."""
        if self._takes_id:
            arguments = {**arguments, CALL_ID: call_id}
        try:
            found = await self._target.call(self._method, deadline_s=deadline_s, **arguments)
            return await asyncio.to_thread(answer_of, found)  # pictures take a while
        except CallFailed as error:
            return answer_of_failure(self.name, error, deadline_s)
        except (TypeError, ValueError) as error:  # what it returned is no answer
            return answer_of_failure(self.name, CallRaised.by(error), deadline_s)

    async def outcome(self, call_id: str, deadline_s: float) -> ToolAnswer | None:
        """Ask the environment for the answer of a call that was cut off."""
        try:
            found = await self._target.call("outcome", call_id, deadline_s=deadline_s)
            return None if found is None else await asyncio.to_thread(answer_of, found)
        except CallFailed as error:
            raise _no_outcome(self.name, call_id, error) from error

    async def close(self, score: bool = False) -> float:
        """Do nothing: the environment is closed by its trajectory."""
        return 0.0


class OpenTools:
    """The tools of one trajectory, in an order that is the same for all."""

    def __init__(self, tools: Sequence[Tool], keys: MultiTurnConfig, deadline_s: float) -> None:
        """`keys` limit the calls of a turn and their answers, `deadline_s` each call, in seconds."""
        self.schemas = [tool.schema for tool in tools]
        self._keys = keys
        self._deadline_s = deadline_s
        self._tools = {tool.name: tool for tool in tools}
        self._checkers = {tool.name: _checker(tool.schema) for tool in tools}

    async def open(self, tools_kwargs: Mapping[str, Kwargs]) -> None:
        """Begin the trajectory. Raises ToolFailed; what has begun is then ended."""
        try:
            for name, tool in self._tools.items():
                await tool.open(tools_kwargs.get(name, {}).get("create_kwargs", {}))
        except BaseException:
            with suppress(ToolFailed):
                await self.close(score=False)
            raise

    async def call(
        self, calls: Sequence[ToolCall], log: SpanLog | None = None, turn: str = ""
    ) -> list[ToolAnswer]:
        """Return an answer for each call of a turn, in their order; they are made side by side, and each is
        noted in `log`, where there is one. Their ids begin with that of the `turn`.

        A call that cannot be made, or fails, has an answer that says so. Raises ToolFailed, after all have
        ended, where the process of one was lost.
        """
        most = self._keys.max_parallel_calls
        answers = await _all(
            self._noted_answer(call, log, f"{turn}.{number}") for number, call in enumerate(calls[:most])
        )
        left_out = f"This call was not made: a turn may have {most}."
        answers += [ToolAnswer(left_out, problem="too_many") for _ in calls[most:]]
        length = self._keys.max_tool_response_length
        side = self._keys.tool_response_truncate_side
        return [replace(answer, text=cut(_readable(answer.text), length, side)) for answer in answers]

    async def close(self, score: bool = True) -> float:
        """End the trajectory and return the sum of the tools' rewards.

        Raises ToolFailed, after all have ended.
        """
        return sum(await _all(tool.close(score) for tool in self._tools.values()))

    async def _noted_answer(self, call: ToolCall, log: SpanLog | None, call_id: str) -> ToolAnswer:
        if log is None:
            return await self._answer(call, call_id)
        with log.span("tool", tool=call.name) as span:
            span.texts["arguments"] = call.arguments
            answer = await self._answer(call, call_id)
            span.attributes["reward"] = answer.reward
            span.error = answer.problem
            span.texts["answer"] = answer.text
        return answer

    async def _answer(self, call: ToolCall, call_id: str) -> ToolAnswer:
        tool = self._tools.get(call.name)
        if tool is None:
            names = ", ".join(self._tools) or "none"
            return ToolAnswer(f"There is no tool {call.name!r}. The tools are: {names}.", problem="unknown")
        try:
            arguments = json.loads(call.arguments)
        except NO_JSON as error:
            return _malformed(call, f"are no JSON: {error}")
        if not isinstance(arguments, dict):
            return _malformed(call, "are no JSON object")
        checker = self._checkers[call.name]
        arguments = _integers_as_texts(arguments, checker.schema)
        if wrong := jsonschema.exceptions.best_match(checker.iter_errors(arguments)):
            return _malformed(call, f"do not fit: {wrong.message}")
        return await tool.call(arguments, self._deadline_s, call_id)


@dataclass(frozen=True)
class Toolset:
    """The tools of a run."""

    specs: Mapping[str, ToolSpec] = field(default_factory=dict)
    """The tools by their names."""
    keys: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    """Which tools there are, and the limits on the calls of one turn."""
    deadline_s: float = AgentConfig.call_deadline
    """Seconds that a call may take, and that a tool may take to begin and to end a trajectory."""

    @classmethod
    def load(cls, keys: MultiTurnConfig, deadline_s: float = AgentConfig.call_deadline) -> Toolset:
        """Read and check the tools.

        Raises ConfigError for what cannot be loaded, and for a name that two of them have.
        """
        functions = load_functions(keys.function_tool_path) if keys.function_tool_path else []
        classes = load_classes(keys.tool_config_path) if keys.tool_config_path else []
        specs: dict[str, ToolSpec] = {}
        toolset = cls(specs, keys, deadline_s)
        try:
            for spec in chain(functions, classes):
                other = specs.setdefault(spec.name, spec)
                if other is not spec:
                    raise ConfigError(
                        f"two tools are called {spec.name!r}: {other.source}, and {spec.source}"
                    )
                _check_schema(spec)
        except BaseException:
            toolset.close()
            raise
        return toolset

    async def open(
        self,
        hosts: HostsLike,
        tools_kwargs: Mapping[str, Kwargs] | None = None,
        further: Sequence[Tool] = (),
        journaled: Callable[[Tool], Tool] | None = None,
    ) -> OpenTools:
        """Begin one trajectory.

        `hosts` makes objects in worker processes or, `LocalHosts`, in this one. `tools_kwargs`
        is the row's `extra_info.tools_kwargs`: {tool: {create_kwargs, execute_kwargs, calc_reward_kwargs,
        release_kwargs}}. `further` are tools of the trajectory alone, such as methods of its environment.
        `journaled` keeps what the tools of the run do in the trajectory's journal.
        Raises ToolFailed, DataError for `tools_kwargs` of another form, and ConfigError where one of
        `further` has the name of a tool of the run.
        """
        kwargs = _read_kwargs(tools_kwargs)
        tools: list[Tool] = [
            HostedTool(spec, hosts, kwargs.get(spec.name, {}), self.deadline_s)
            for spec in self.specs.values()
        ]
        if journaled is not None:
            tools = [journaled(tool) for tool in tools]
        both = {tool.name for tool in tools} & {tool.name for tool in further}
        if both:
            raise ConfigError(f"tools of the run and of the environment have the same names: {sorted(both)}")
        opened = OpenTools([*tools, *further], self.keys, self.deadline_s)
        await opened.open(kwargs)
        return opened

    def close(self) -> None:
        """Free what tools in this process hold, at the end of the run."""
        for spec in self.specs.values():
            if spec.shared is not None:
                spec.shared.close()


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Wait until all have ended, and raise the first error only then, so that none goes on unseen."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def cut(text: str, length: int, side: Literal["left", "middle", "right"]) -> str:
    """Return `length` characters of a longer text with a mark where others are missing.

    `side` is the part that is kept, as in verl: the beginning (left), the end (right), or half of each.
    """
    if len(text) <= length:
        return text
    if side == "left":
        return text[:length] + "...(truncated)"
    if side == "right":
        return "(truncated)..." + text[len(text) - length :]
    half = length // 2
    return text[:half] + "...(truncated)..." + text[len(text) - half :]


def _read_kwargs(tools_kwargs: Any) -> dict[str, Kwargs]:
    """Return a row's keyword arguments by tool; a column of a table is None in rows without them."""
    try:
        return {
            name: {key: dict(each) for key, each in (given or {}).items() if each is not None}
            for name, given in (tools_kwargs or {}).items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(
            f"extra_info.tools_kwargs: got {tools_kwargs!r}, wanted {{tool: {{create_kwargs: {{…}}, …}}}}"
        ) from error


def _readable(text: str) -> str:
    """Return a text that a tokenizer takes: halves of surrogate pairs become question marks."""
    return text.encode(errors="replace").decode()


def _checker(schema: Mapping[str, Any]) -> jsonschema.protocols.Validator:
    """Return the checker of arguments; other arguments than those of the schema do not fit."""
    parameters = {"additionalProperties": False, **schema["function"].get("parameters", {})}
    return jsonschema.Draft202012Validator(parameters)


def _check_schema(spec: ToolSpec) -> None:
    try:
        jsonschema.Draft202012Validator.check_schema(spec.schema["function"].get("parameters", {}))
    except jsonschema.SchemaError as error:
        raise ConfigError(f"{spec.source}: the schema of its parameters is wrong: {error.message}") from error


def _integers_as_texts(arguments: dict[str, Any], schema: Any) -> dict[str, Any]:
    """Return the arguments with integers as texts where a text is wanted, such as a postal code.

    An integer has one way to be written. Other numbers have several, as 1.10 is 1.1: their text is lost.
    """
    properties = schema.get("properties", {})
    changed = {}
    for name, value in arguments.items():
        of = properties.get(name, True)
        if type(value) is int and not fits(value, of, schema) and fits(str(value), of, schema):
            changed[name] = str(value)
    return arguments | changed


def _no_outcome(name: str, call_id: str, error: CallFailed) -> ToolFailed:
    told = f"the tool {name} could not say whether it has carried out its call {call_id}: {error}"
    return ToolFailed(error.cause, told)


def _malformed(call: ToolCall, what: str) -> ToolAnswer:
    return ToolAnswer(f"The arguments of {call.name} {what}.", problem="malformed")
