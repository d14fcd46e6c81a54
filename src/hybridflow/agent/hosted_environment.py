"""The environment of one trajectory, in a worker process or in this one, and its methods as tools.

chat agent ──reset, step, score, close──► HostedEnvironment ──► worker process ──► the user's Environment
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hybridflow.agent.episode import Episode, TrajectoryFailed
from hybridflow.environments.base import Observation, Step, step_of
from hybridflow.environments.load import load_environment
from hybridflow.processes.errors import CallFailed, CallRaised
from hybridflow.processes.local import HostsLike, ObjectLike
from hybridflow.tools.function_tool import tool_methods
from hybridflow.tools.toolset import MethodTool

FACTORY = "hybridflow.environments.load:open_environment"


@dataclass(frozen=True)
class EnvironmentSpec:
    """An environment by name, with its options and the tools that it has."""

    name: str
    options: Mapping[str, Any]
    tools: Mapping[str, Mapping[str, Any]]
    """Schemas of its methods that are tools, by the names of the methods."""

    @classmethod
    def of(cls, name: str, options: Mapping[str, Any]) -> EnvironmentSpec:
        """Make one, to check that it can be made; ConfigError where it cannot."""
        return cls(name, options, tool_methods(type(load_environment(name, options)())))


class HostedEnvironment:
    """The environment of one trajectory; every failure is a TrajectoryFailed with its cause."""

    def __init__(self, target: ObjectLike, deadline_s: float) -> None:
        self._target = target
        self._deadline_s = deadline_s

    @classmethod
    async def open(
        cls, spec: str, options: Mapping[str, Any], episode: Episode, hosts: HostsLike, deadline_s: float
    ) -> HostedEnvironment:
        """Make the environment of an episode."""
        words = (spec, dict(options), episode.group_seed, episode.seed)
        try:
            target = await hosts.create(FACTORY, *words, deadline_s=deadline_s)
        except CallFailed as error:
            raise failure_of(error, f"{spec} could not be made") from error
        return cls(target, deadline_s)

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        """Return the first observation."""
        observation: Observation = await self._call("reset", dict(row))
        return observation

    async def step(self, text: str) -> Step:
        """Return the answer to a turn of the model; a bare text is a step without a reward."""
        try:
            return step_of(await self._call("step", text))
        except TypeError as error:
            raise TrajectoryFailed("environment", str(error)) from error

    async def score(self) -> float | None:
        """Return the reward for the whole trajectory, or None."""
        score = await self._call("score")
        if score is None:
            return None
        return float(score)

    async def close(self) -> None:
        """Close the environment; errors are ignored."""
        with suppress(CallFailed):  # its trajectory has ended, and has its outcome
            await self._target.call("close", deadline_s=self._deadline_s)
        await self._target.close()

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            return await self._target.call(method, *args, deadline_s=self._deadline_s)
        except CallFailed as error:
            raise failure_of(error, f"{method}() of the environment") from error

    def tool(self, name: str, schema: Mapping[str, Any]) -> MethodTool:
        """Return the method of this name as a tool of the model."""
        return MethodTool(name, schema, self._target)


def failure_of(error: CallFailed, what: str) -> TrajectoryFailed:
    """Return the failure of a trajectory whose code in a worker process has failed."""
    how = {"deadline": "took too long", "infrastructure": "lost its process"}.get(error.cause, "failed")
    told = f"{what} {how}: {error}"
    if isinstance(error, CallRaised):
        told += f"\n{error.traceback_text}"
    return TrajectoryFailed(error.cause, told)
