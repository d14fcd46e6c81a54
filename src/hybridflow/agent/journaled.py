"""Tools and environments of an episode whose calls are in the run's journal (`journal.py`).

call ──► in the journal? ──yes──► its answer of then; no object is made
              └ no ──► the object, made and brought to where it was ──► the call

An environment comes to where it was by `restore(state)`, or, where its calls may be repeated, by all of them
again. One that can do neither begins anew, with its episode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from hybridflow.agent.episode import Episode, TrajectoryFailed
from hybridflow.agent.hosted_environment import EnvironmentSpec, HostedEnvironment, failure_of, packed
from hybridflow.agent.journal import ANSWER, NUMBER, OBSERVATION, STEP, BegunAnew, EpisodeJournal, Form
from hybridflow.environments.base import step_of
from hybridflow.processes.errors import CallFailed
from hybridflow.processes.local import HostsLike, ObjectLike
from hybridflow.tools.base import Tool, ToolAnswer

Call = Callable[[], Awaitable[Any]]


class JournaledTool:
    """A tool of one trajectory (a `Tool`), which answers from the journal what it has answered there."""

    def __init__(
        self, tool: Tool, journal: EpisodeJournal, world: JournaledEnvironment | None = None
    ) -> None:
        """`world` is the environment whose method the tool is."""
        self.name = tool.name
        self.schema = tool.schema
        self.after_loss = tool.after_loss
        self.has_state = tool.has_state
        self._tool = tool
        self._journal = journal
        self._world = world
        self._begins: Call | None = None
        self._past: list[Call] = []
        self._lock = asyncio.Lock()

    async def open(self, create_kwargs: Mapping[str, Any]) -> None:
        """Begin the trajectory with the first call that is not in the journal."""
        self._begins = partial(self._tool.open, create_kwargs)

    async def call(self, arguments: dict[str, Any], deadline_s: float, call_id: str) -> ToolAnswer:
        """Answer one call, from the journal or by the tool."""
        make = partial(self._tool.call, arguments, deadline_s, call_id)
        again = partial(self._tool.call, dict(arguments), deadline_s, call_id)
        once = partial(
            self._journal.once,
            f"{self.name} {call_id}",
            arguments,
            ANSWER,
            partial(self._live, make),
            lost=partial(self._after_loss, deadline_s, call_id),
        )
        if self._world is not None:
            answer: ToolAnswer = await self._world.kept(again, once)
        else:
            answer = await once(found=lambda: self._past.append(again))
        return answer

    async def outcome(self, call_id: str, deadline_s: float) -> ToolAnswer | None:
        """Ask the tool."""
        return await self._tool.outcome(call_id, deadline_s)

    async def close(self, score: bool = False) -> float:
        """End the trajectory, and return its reward by the tool."""
        if not self.has_state or self._world is not None:
            return 0.0
        if score:
            close = partial(self._live, partial(self._tool.close, True))
            return await self._journal.once(f"close {self.name}", (), NUMBER, close) or 0.0
        return await self._tool.close(False)

    async def _live(self, make: Call) -> Any:
        """Make a call of the tool, which has begun and knows its earlier calls."""
        async with self._lock:
            begins = self._begins
            self._begins = None
            if begins is not None:
                await begins()
                if self.has_state and self.after_loss == "repeat":
                    for call in self._past:
                        await call()
        return await make()

    async def _after_loss(self, deadline_s: float, call_id: str) -> ToolAnswer | None:
        if self.after_loss == "repeat":
            return None
        if self.after_loss == "ask":
            found: ToolAnswer | None = await self._live(partial(self._tool.outcome, call_id, deadline_s))
            return found
        self._journal.num_unknown += 1
        told = f"It is not known whether {self.name} was carried out: its process was lost meanwhile."
        return ToolAnswer(told, problem="cut_off")


class JournaledEnvironment(HostedEnvironment):
    """An environment whose answers are in the journal."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        episode: Episode,
        hosts: HostsLike,
        deadline_s: float,
        journal: EpisodeJournal,
    ) -> None:
        self._past: list[Call] = []
        self._journal = journal
        self._lock = asyncio.Lock()
        self._object = _LateObject(partial(self._reopened, episode, hosts))
        super().__init__(spec, self._object, deadline_s, journal.name)

    def tools(self) -> list[Tool]:
        """Return its methods that are tools of the model."""
        return [JournaledTool(tool, self._journal, self) for tool in super().tools()]

    async def kept(self, again: Call, once: Callable[..., Awaitable[Any]]) -> Any:
        """Make a call with the state that it leaves; `again` makes it in an object that was made anew."""
        state = self._state if self.spec.has_state else None
        async with self._lock:
            return await once(found=lambda: self._past.append(again), state=state)

    async def _state(self) -> Any:
        try:
            return await self._target.call("state", deadline_s=self.deadline_s)
        except CallFailed as error:
            raise failure_of(error, "state() of the environment") from error

    async def _made(self, method: str, call_id: str, *args: Any) -> Any:
        make = partial(super()._made, method, call_id, *args)
        forms: dict[str, Form[Any]] = {"reset": OBSERVATION, "step": STEP, "score": NUMBER}
        once = partial(
            self._journal.once,
            call_id,
            args if method == "step" else (),
            forms[method],
            partial(_step, make) if method == "step" else make,
            lost=partial(self._after_loss, call_id) if method == "step" else None,
        )
        return await self.kept(make, once)

    async def _after_loss(self, call_id: str) -> Any:
        policy = self.spec.after_loss
        if policy == "ask":
            try:
                found = await self._target.call("outcome", call_id, deadline_s=self.deadline_s)
            except CallFailed as error:
                raise failure_of(error, "outcome() of the environment") from error
            return None if found is None else step_of(await packed(found))
        if policy == "fail":
            self._journal.num_unknown += 1
            raise TrajectoryFailed(
                "environment",
                f"it is not known whether step() of {self.spec.name} was carried out (call {call_id}): its "
                "process was lost meanwhile",
            )
        return None

    async def _reopened(self, episode: Episode, hosts: HostsLike) -> ObjectLike:
        """Make the object, and bring it to where it was. Raises BegunAnew where it cannot come there."""
        state = self._journal.state
        past = [] if state is not None else self._past
        if past and self.spec.after_loss != "repeat":
            raise BegunAnew(
                f"{self.spec.name} has no state() and restore(state), and does not say after_loss='repeat'"
            )
        made = await self.spec.made(episode, hosts, self.deadline_s)
        if state is not None:
            try:
                await made.call("restore", state, deadline_s=self.deadline_s)
            except CallFailed as error:
                raise failure_of(error, "restore() of the environment") from error
        self._object.made = made
        for call in past:
            await call()
        return made


async def _step(make: Call) -> Any:
    return step_of(await make())


class _LateObject:
    """An object that is made as it is first called (an `ObjectLike`)."""

    def __init__(self, make: Callable[[], Awaitable[ObjectLike]]) -> None:
        self.made: ObjectLike | None = None
        self._make = make

    async def call(self, method: str, /, *args: Any, deadline_s: float, **kwargs: Any) -> Any:
        """Return a method's result; one that was never made has nothing to close."""
        if self.made is None:
            if method == "close":
                return None
            self.made = await self._make()
        return await self.made.call(method, *args, deadline_s=deadline_s, **kwargs)

    def value(self) -> Any:
        """Return the object itself."""
        assert self.made is not None, "it was not called"
        return self.made.value()

    async def close(self) -> None:
        """Forget the object."""
        if self.made is not None:
            await self.made.close()
