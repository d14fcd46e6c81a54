"""Agents that know only a base URL and nothing of this library: a user's function, or a command.

episode ──Endpoint.record──► base URL ──► async function here, function in a worker process, or command
                                              └── a number, a dict with "score", or nothing ──► AgentResult
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any

from hybridflow.agent.endpoint import Endpoint, Recording
from hybridflow.agent.episode import AgentResult, Episode, Policy, TrajectoryFailed
from hybridflow.agent.hosted_environment import failure_of
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.data.media import MediaReader
from hybridflow.data.plugin import load_object
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import ConfigError
from hybridflow.processes.errors import CallFailed
from hybridflow.processes.local import HostsLike
from hybridflow.processes.supervisor import keeper_command
from hybridflow.rollout.server.model import TEXT_MODEL, ServedModel
from hybridflow.rollout.server.run import listen
from hybridflow.tools.base import numbers_of

FUNCTION_KEY = "actor_rollout_ref.rollout.agent.default_agent_loop"
PORT_KEY = "actor_rollout_ref.rollout.agent.endpoint_port"
LOAD = "hybridflow.data.plugin:load_object"
SHOWN = 4000
"""Characters at the end of a command's output that are read."""


class BlackBoxes:
    """Makes agents that share one server."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        hosts: HostsLike,
        address: tuple[str, int],
        max_model_len: int,
        tool_parser: str,
        deadline_s: float,
        reader: MediaReader | None = None,
        pictures_refused: str = TEXT_MODEL,
    ) -> None:
        """Agents find the model at `address` (port 0: a free one); `hosts` call functions that block. The
        pictures of requests are read by the `reader`; without one they are refused, with the reason.

        ConfigError where the port is taken.
        """
        try:
            listen(*address).close()
        except ConfigError as error:
            raise ConfigError(f"{PORT_KEY}={address[1]}: {error}") from error
        model = ServedModel(
            "policy",
            tokenizer,
            len(tokenizer),
            max_model_len,
            tool_parser,
            reader=reader,
            pictures_refused=pictures_refused,
        )
        self._endpoint = Endpoint(model, template, host=address[0], port=address[1])
        self._hosts = hosts
        self._deadline_s = deadline_s

    def function(self, spec: str) -> FunctionAgent:
        """Return the agent that is a function `run(base_url, row)`; ConfigError where there is none."""
        return FunctionAgent(spec, self._endpoint, self._hosts, self._deadline_s)

    def command(self, words: Sequence[str]) -> CommandAgent:
        """Return the agent that is a command."""
        return CommandAgent(words, self._endpoint)


class FunctionAgent:
    """A function `run(base_url, row)` of the user's, `async` or not."""

    def __init__(self, spec: str, endpoint: Endpoint, hosts: HostsLike, deadline_s: float) -> None:
        """`spec` is path/to/file.py:function or package.module:function; ConfigError where there is none.

        An `async` function is awaited in this event loop. Another one is called by `hosts`, and its process
        is ended after `deadline_s` seconds.
        """
        self._spec = spec
        self._function = load_object(spec, key=FUNCTION_KEY)
        self._endpoint = endpoint
        self._hosts = hosts
        self._deadline_s = deadline_s

    async def run(self, episode: Episode, policy: Policy) -> AgentResult:
        """Run one episode by the function."""
        async with self._endpoint.record(policy) as recording:
            try:
                row = await sent_row(self._endpoint.model, episode.row.row)
                returned = await self._call(f"{recording.url}/v1", row)
            except Exception:  # a user's code: anything may come out of it
                _raise_cause(recording)
                raise
            return _result(self._spec, returned, recording)

    async def _call(self, base_url: str, row: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(base_url, row)
        deadline = self._deadline_s
        try:
            target = await self._hosts.create(LOAD, self._spec, key=FUNCTION_KEY, deadline_s=deadline)
            try:
                return await target.call("__call__", base_url, row, deadline_s=deadline)
            finally:
                await target.close()
        except CallFailed as error:
            raise failure_of(error, self._spec) from error


class CommandAgent:
    """A command that finds the model by its environment variables.

    OPENAI_BASE_URL and ANTHROPIC_BASE_URL are the trajectory's, with keys that mean nothing; HYBRIDFLOW_ROW
    is a file with the data row as JSON. Its result is the JSON that it writes to the file HYBRIDFLOW_RESULT,
    or else the last line of its output where that is an object with a "score".
    """

    def __init__(self, command: Sequence[str], endpoint: Endpoint) -> None:
        self._command = list(command)
        self._endpoint = endpoint

    async def run(self, episode: Episode, policy: Policy) -> AgentResult:
        """Run one episode by the command, and end it with all processes that it has started."""
        with tempfile.TemporaryDirectory(prefix="hybridflow_agent_") as folder:
            async with self._endpoint.record(policy) as recording:
                row = await sent_row(self._endpoint.model, episode.row.row)
                returned = await self._output(Path(folder), recording, row)
                return _result(" ".join(self._command), returned, recording)

    async def _output(self, folder: Path, recording: Recording, row: Mapping[str, Any]) -> Any:
        """Return the output of the command; TrajectoryFailed where it fails."""
        files = {name: folder / name for name in ("row.json", "result.json", "out", "err")}
        files["row.json"].write_text(json.dumps(dict(row), default=_plain), encoding="utf-8")
        variables = {
            "OPENAI_BASE_URL": f"{recording.url}/v1",
            "OPENAI_API_KEY": "none",
            "ANTHROPIC_BASE_URL": recording.url,
            "ANTHROPIC_API_KEY": "none",
            "HYBRIDFLOW_ROW": str(files["row.json"]),
            "HYBRIDFLOW_RESULT": str(files["result.json"]),
        }
        with files["out"].open("wb") as out, files["err"].open("wb") as err:
            process = await asyncio.create_subprocess_exec(
                *keeper_command(self._command),
                env={**os.environ, **variables},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            try:
                status = await process.wait()
            finally:
                if process.returncode is None:
                    process.terminate()
                await process.wait()
        if status:
            _raise_cause(recording)
            said = _end_of(files["err"]) or _end_of(files["out"])
            raise TrajectoryFailed(
                "environment", f"{' '.join(self._command)} ended with status {status}\n{said}"
            )
        if files["result.json"].exists():
            return json.loads(files["result.json"].read_text(encoding="utf-8"))
        last = _end_of(files["out"]).rpartition("\n")[2]
        with suppress(ValueError):
            said = json.loads(last)
            if isinstance(said, dict) and "score" in said:  # a bare number may be the agent's answer
                return said
        return None


async def sent_row(model: ServedModel, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as an agent is given it, with pictures as it can send them; MediaError for one that cannot
    be read.
    """
    if model.reader is None:
        return dict(row)
    return await asyncio.to_thread(model.reader.as_sent, dict(row))


def _raise_cause(recording: Recording) -> None:
    """Raise our own error that left the agent without an answer, where there is one."""
    if recording.failure is not None:
        raise recording.failure


def _result(agent: str, returned: Any, recording: Recording) -> AgentResult:
    """Return what an agent's own value means; TrajectoryFailed where it is none, or a call had no answer."""
    if isinstance(recording.failure, TrajectoryFailed):
        raise recording.failure
    metrics = {}
    score = returned
    if isinstance(returned, Mapping):
        metrics = numbers_of(returned)
        metrics.pop("score", None)
        score = returned.get("score")
    if score is not None and not (isinstance(score, Real) and math.isfinite(score)):
        raise TrajectoryFailed(
            "environment",
            f"the agent {agent} returned {returned!r}: wanted a finite number, a dict with one as 'score', "
            "or None for the run's reward function",
        )
    reward = None if score is None else float(score)
    return AgentResult(reward, outcome=recording.outcome, messages=recording.messages, metrics=metrics)


def _end_of(file: Path) -> str:
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - SHOWN))
        return opened.read().decode(errors="replace").strip()


def _plain(value: Any) -> Any:
    """Return what JSON has for a value of numpy's, else its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
