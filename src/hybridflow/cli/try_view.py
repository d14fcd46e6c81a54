"""`hybridflow try`: a conversation with an environment in the terminal, where a person is the policy.

a line ──► a call of a tool, as name(argument=value) or in the hermes format ──► the tool's answer
       └─► anything else ──► step ──► observation, reward, done
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from hybridflow.config.agent import AgentConfig, MultiTurnConfig
from hybridflow.environments.base import Environment, Observation, step_of
from hybridflow.environments.load import load_environment
from hybridflow.errors import ConfigError
from hybridflow.observability.progress import progress
from hybridflow.processes.errors import CallRaised, CallTooLong
from hybridflow.processes.local import LocalObject
from hybridflow.tools import tool_methods
from hybridflow.tools.function_tool import takes_id
from hybridflow.tools.parsers.calls import ToolCall, call_of, read_json
from hybridflow.tools.parsers.hermes import HermesParser
from hybridflow.tools.parsers.source import Unreadable
from hybridflow.tools.toolset import MethodTool, OpenTools

T = TypeVar("T")

CALL_DEADLINE = AgentConfig().call_deadline
"""Seconds that a call of the environment may take, as in a run."""
DEADLINE_KEY = "agent.call_deadline"
MANY = 1_000_000
"""Calls of a line, and characters of an answer: a person is not limited."""
WRITTEN_CALL = re.compile(r"\s*([A-Za-z_]\w*)\(")


def show_try(spec: str, options: Mapping[str, Any], seed: int, row: Mapping[str, Any]) -> None:
    """Run one trajectory with a person. Raises ConfigError for what the environment raises."""
    environment = load_environment(spec, options, key="environment")()
    environment.seed = seed
    environment.step_seed = seed
    with asyncio.Runner() as runner:
        Game(environment, runner).play(row)


class Game:
    """One trajectory of an environment with a person; an exception of the environment ends it."""

    def __init__(self, environment: Environment, runner: asyncio.Runner) -> None:
        self.environment = environment
        self.runner = runner
        self.total = 0.0
        self.target = LocalObject(environment)
        cls = type(environment)
        methods = [
            MethodTool(name, schema, self.target, takes_id=takes_id(getattr(cls, name)))
            for name, schema in tool_methods(cls).items()
        ]
        keys = MultiTurnConfig(max_parallel_calls=MANY, max_tool_response_length=MANY)
        self.tools = OpenTools(methods, keys, CALL_DEADLINE)
        self.usage = {}
        """How each tool is called, by its name."""
        for tool in methods:
            arguments = ", ".join(f"{each}=…" for each in tool.schema["function"]["parameters"]["properties"])
            self.usage[tool.name] = f"{tool.name}({arguments})"

    def play(self, row: Mapping[str, Any]) -> None:
        """Talk until the environment is done, or the input ends."""
        try:
            self._show(self._ask("reset", row))
            if self.usage:
                print(f"tools: {', '.join(self.usage.values())}")
            done = False
            while not done:
                try:
                    line = input("> ")
                except EOFError:
                    print()
                    break
                done = self._take_turn(line)
            score = self._ask("score")
            if score is not None:
                self.total += score
                print(f"score {score:g}")
            print(f"{'done' if done else 'stopped'}, reward {self.total:g}")
        finally:
            self._ask("close")

    def _take_turn(self, line: str) -> bool:
        """Answer one line; return whether the trajectory ends."""
        calls = read_calls(line)
        if calls:
            for answer in self._wait_for("a tool", self.tools.call(calls)):
                print(*["[image]"] * len(answer.images), answer.text)
                self.total += answer.reward
            return False
        if usage := self.usage.get(line.strip()):
            print(f"{line.strip()} is a tool: call it as {usage}")
            return False
        written = WRITTEN_CALL.match(line)
        if HermesParser.starts[0] in line or (written and written[1] in self.usage):
            print("malformed call, wanted name(argument=value), or JSON with name and arguments")
            return False
        step = step_of(self._ask("step", line))
        if not step.done:
            self._show(step.observation)
        elif isinstance(step.observation, str) and step.observation:
            print(step.observation)
        self.total += step.reward
        extra = "".join(f", {name} {value}" for name, value in step.extra.items())
        print(f"[reward {step.reward:g}{extra}]")
        return step.done

    def _ask(self, method: str, *arguments: Any) -> Any:
        name = f"{type(self.environment).__name__}.{method}"
        try:
            return self._wait_for(name, self.target.call(method, *arguments, deadline_s=CALL_DEADLINE))
        except CallRaised as error:
            raise ConfigError(f"{name} raised\n{error.traceback_text}") from error
        except CallTooLong as error:
            raise ConfigError(f"{name}: {error}, as a run's {DEADLINE_KEY} would have it") from error

    def _wait_for(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """Await a call, and show its name meanwhile."""
        words = f"waiting for {name}, at most {CALL_DEADLINE:g} s ({DEADLINE_KEY})"
        with progress.shown(), progress.phase(words):
            return self.runner.run(work)

    def _show(self, observation: Observation) -> None:
        if isinstance(observation, str):
            print(observation)
        elif isinstance(observation, (list, tuple)) and all(
            isinstance(each, Mapping) for each in observation
        ):
            messages = [each for each in observation if "role" in each]
            for message in messages or [{"role": "user", "content": observation}]:
                print(f"{message['role']}: {_written(message.get('content'))}")
        else:
            print(f"({type(observation).__name__} of token ids, which need a model's tokenizer to be read)")


def _written(content: Any) -> str:
    """Return a content as text, with the kind of a picture in its place."""
    if not isinstance(content, (list, tuple)):
        return content or ""
    return "".join(str(part.get("text") or f"[{part.get('type')}]") for part in content)


def read_calls(line: str) -> list[ToolCall]:
    """Return the calls in a line: between hermes tags, their bare JSON, or `name(argument=value)`."""
    parser = HermesParser()
    calls = [part for part in parser.feed(line) + parser.end() if isinstance(part, ToolCall)]
    if calls:
        return calls
    try:
        return [call_of(read_json(line))]
    except Unreadable:
        written = _written_call(line)
    return [] if written is None else [written]


def _written_call(line: str) -> ToolCall | None:
    """Return the call that a line writes as Python, whose arguments are named and plain values."""
    try:
        call = ast.parse(line.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            return None
        if any(each.arg is None for each in call.keywords):  # **{…}
            return None
        arguments = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        return ToolCall(call.func.id, json.dumps(arguments))
    except (SyntaxError, ValueError, TypeError, RecursionError):
        return None


def read_options(pairs: list[str]) -> dict[str, Any]:
    """Return `key=value` words as keyword arguments, with values in YAML; ConfigError for other words."""
    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        raise ConfigError(f"--options: got {wrong[0]!r}, wanted key=value, as in largest=5")
    return {key: yaml.safe_load(value) for key, _, value in (pair.partition("=") for pair in pairs)}


def read_row(text: str, seed: int) -> dict[str, Any]:
    """Return the data row in a JSON object, or in a file of one, with the fields that every row has.

    Raises ConfigError where there is no JSON object.
    """
    wanted = f"--row: got {text!r}, wanted a JSON object or a file that holds one"
    try:
        given = json.loads(text if text[:1] in "{[" else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{wanted}: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError(wanted)
    extra_info = {"index": 0, "split": "train", "seed": seed, **(given.get("extra_info") or {})}
    return {"raw_prompt": given.get("prompt", []), **given, "extra_info": extra_info}
