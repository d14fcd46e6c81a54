"""The environment of one trajectory, in a worker process or in this one, and its methods as tools.

chat agent ──reset, step, score, close──► HostedEnvironment ──► worker process ──► the user's Environment
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hybridflow.agent.episode import Episode, TrajectoryFailed
from hybridflow.data.pictures import MediaError, pack_parts
from hybridflow.environments.base import Observation, Step, step_of
from hybridflow.environments.load import load_environment
from hybridflow.processes.errors import CallFailed, CallRaised
from hybridflow.processes.local import HostsLike, ObjectLike
from hybridflow.tools.base import AfterLoss, Tool
from hybridflow.tools.function_tool import CALL_ID, mark_of, takes_id, tool_methods
from hybridflow.tools.toolset import MethodTool

FACTORY = "hybridflow.environments.load:open_environment"


@dataclass(frozen=True)
class EnvironmentSpec:
    """An environment by name, with its options and the tools that it has."""

    name: str
    options: Mapping[str, Any]
    cls: type[Any]

    @classmethod
    def of(cls, name: str, options: Mapping[str, Any]) -> EnvironmentSpec:
        """Make one, to check that it can be made; ConfigError where it cannot."""
        return cls(name, options, type(load_environment(name, options)()))

    @cached_property
    def tools(self) -> Mapping[str, Mapping[str, Any]]:
        """Schemas of its methods that are tools, by the names of the methods."""
        return tool_methods(self.cls)

    @property
    def after_loss(self) -> AfterLoss | None:
        """Policy for a step that was cut off; None: it does not say."""
        policy: AfterLoss | None = self.cls.after_loss
        return policy

    @property
    def has_state(self) -> bool:
        """Whether another object of it can go on from what `state()` gives."""
        return hasattr(self.cls, "state") and hasattr(self.cls, "restore")

    def after_loss_of(self, method: str) -> AfterLoss:
        """Return the policy for a call of a method that is a tool, where it was cut off."""
        mark = mark_of(getattr(self.cls, method))
        return (mark and mark.after_loss) or self.after_loss or "repeat"

    def takes_id(self, method: str) -> bool:
        """Return whether a method is to be given the id of each call."""
        return takes_id(getattr(self.cls, method))

    async def made(self, episode: Episode, hosts: HostsLike, deadline_s: float) -> ObjectLike:
        """Make the environment of an episode. Raises TrajectoryFailed."""
        words = (self.name, dict(self.options), episode.group_seed, episode.seed)
        try:
            return await hosts.create(FACTORY, *words, deadline_s=deadline_s)
        except CallFailed as error:
            raise failure_of(error, f"{self.name} could not be made") from error


class HostedEnvironment:
    """The environment of one trajectory; every failure is a TrajectoryFailed with its cause."""

    def __init__(self, spec: EnvironmentSpec, target: ObjectLike, deadline_s: float, name: str) -> None:
        """`name` begins the ids of its calls."""
        self.spec = spec
        self.deadline_s = deadline_s
        self._target = target
        self._name = name
        self._numbers = Counter[str]()

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
            await self._target.call("close", deadline_s=self.deadline_s)
        await self._target.close()

    def tools(self) -> list[Tool]:
        """Return its methods that are tools of the model."""
        spec = self.spec
        return [
            MethodTool(name, schema, self._target, spec.after_loss_of(name), takes_id=spec.takes_id(name))
            for name, schema in spec.tools.items()
        ]

    async def _call(self, method: str, *args: Any) -> Any:
        number = self._numbers[method]
        self._numbers[method] += 1
        return await self._made(method, f"{self._name}.{method}.{number}", *args)

    async def _made(self, method: str, call_id: str, *args: Any) -> Any:
        """Make a call, which has this id."""
        kwargs = {CALL_ID: call_id} if self.spec.takes_id(method) else {}
        try:
            answer = await self._target.call(method, *args, deadline_s=self.deadline_s, **kwargs)
            return await packed(answer)
        except CallFailed as error:
            raise failure_of(error, f"{method}() of the environment") from error
        except MediaError as error:
            told = f"{method}() of the environment gave a picture that cannot be read: {error}"
            raise TrajectoryFailed("environment", told) from error


async def packed(answer: Any) -> Any:
    """Return an environment's answer with data URLs in the place of pictures, which a journal can hold.

    Parts of text and pictures without a role become a user's message. MediaError for a picture that cannot
    be read.
    """
    if isinstance(answer, Step):
        return replace(answer, observation=await packed(answer.observation))
    if not isinstance(answer, Sequence) or not all(isinstance(each, Mapping) for each in answer):
        return answer
    if answer and all("type" in each and "role" not in each for each in answer):
        answer = [{"role": "user", "content": answer}]
    if not any(isinstance(message.get("content"), list | tuple) for message in answer):
        return answer
    return await asyncio.to_thread(_packed_messages, answer)


def _packed_messages(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages whose contents have packed media."""
    return [
        {**message, "content": pack_parts(message["content"])}
        if isinstance(message.get("content"), list | tuple)
        else message
        for message in messages
    ]


def failure_of(error: CallFailed, what: str) -> TrajectoryFailed:
    """Return the failure of a trajectory whose code in a worker process has failed."""
    how = {"deadline": "took too long", "infrastructure": "lost its process"}.get(error.cause, "failed")
    told = f"{what} {how}: {error}"
    if isinstance(error, CallRaised):
        told += f"\n{error.traceback_text}"
    return TrajectoryFailed(error.cause, told)
