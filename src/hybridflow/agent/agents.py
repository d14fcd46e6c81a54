"""The agents of a run, by the names that rows give: made once, and run for each batch of episodes.

row's agent_name, else the keys ──► ChatAgent (tools, environment) | an agent of one's own
episodes ──run──► trajectories, told one by one; metrics; counts of the engines
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from hybridflow.agent.build import SINGLE_TURN, AgentBuilder
from hybridflow.agent.concurrency import Concurrency, Limit
from hybridflow.agent.episode import Agent, Episode, TrajectoryFailed
from hybridflow.agent.policy import PolicyLimits
from hybridflow.agent.runner import Ended, Runner
from hybridflow.config import PPOConfig
from hybridflow.config.needs import longest_row, uses_agents
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import ConfigError, DataError
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol.trajectory import Trajectory
from hybridflow.rollout.base import RolloutStats
from hybridflow.rollout.client import LLMClient

T = TypeVar("T")


class Serving(Protocol):
    """Engines that serve asynchronous work: `RolloutGroup`."""

    def run(self, work: Callable[[LLMClient], Coroutine[Any, Any, T]]) -> tuple[T, RolloutStats]:
        """Serve `work` until it has ended; return its result and the counts of the engines."""


class Agents:
    """The agents of a run; close them at its end."""

    def __init__(self, config: PPOConfig, tokenizer: Tokenizer, names: Collection[str] = ()) -> None:
        """Make the agents that the keys ask for, and those of these `names`, which rows of the data give.

        ConfigError or DataError where one of them cannot be had.
        """
        asked = set(names) - {SINGLE_TURN}
        self.are_used = bool(asked) or uses_agents(config)
        """Whether anything is played by agents, and is no single request."""
        self._tokenizer = tokenizer
        self._keys = config.actor_rollout_ref.rollout.agent
        self._builder = AgentBuilder(config, tokenizer)
        self._limits = PolicyLimits(
            max_model_len=longest_row(config)[0],
            max_prompt_length=config.data.max_prompt_length,
            request_deadline=self._keys.request_deadline,
            lost_replicas=self._keys.retries.infrastructure,
        )
        self._limit = Limit()
        self._counted: dict[str, int] = {}
        self._shared: tuple[LLMClient, Concurrency, asyncio.Task[None]] | None = None
        try:
            if self.are_used:
                for name in (self._builder.default_name, *sorted(asked)):
                    self._builder.agent(name)
        except BaseException:
            self.close()
            raise

    def run(
        self, rollout: Serving, episodes: Sequence[Episode], ended: Ended
    ) -> tuple[Metrics, RolloutStats]:
        """Play all episodes; `ended` hears of each end at once, in the event loop's thread."""
        self.processes()
        metrics, stats = rollout.run(lambda client: self.play(client, episodes, ended))
        metrics.update(self.processes())
        return metrics, stats

    def processes(self) -> Metrics:
        """Return what became of the processes of tools and environments since this was last asked."""
        metrics = Metrics()
        for name, count in self._builder.hosts.counts.items():
            metrics.add_sum(f"agent/processes/{name}", float(count - self._counted.get(name, 0)))
            self._counted[name] = count
        return metrics

    async def play(
        self,
        client: LLMClient,
        episodes: Sequence[Episode],
        ended: Ended,
        numbers: Iterator[int] | None = None,
    ) -> Metrics:
        """Play episodes by `client`; `numbers` are those of requests, where others are played beside them."""
        told: list[Trajectory] = []

        def hear(place: int, trajectory: Trajectory) -> None:
            told.append(trajectory)
            ended(place, trajectory)

        runner = Runner(
            self._agent_of,
            self._tokenizer,
            self._limits,
            self._keys,
            hosts=self._builder.hosts,
            limit=self._limit,
            numbers=numbers,
        )
        shared = None if numbers is None else self._shared_by_all(client, runner)
        await runner.run(client, episodes, hear, shared)
        return _metrics(told, runner)

    def close(self) -> None:
        """End the processes of tools and environments."""
        self._builder.close()

    def _shared_by_all(self, client: LLMClient, runner: Runner) -> Concurrency:
        """Return the places of all that is played by `client` at once."""
        if self._shared is None or self._shared[0] is not client:
            concurrency = runner.concurrency(client)
            self._shared = client, concurrency, asyncio.create_task(concurrency.adapt())
        return self._shared[1]

    def _agent_of(self, episode: Episode) -> Agent:
        name = episode.row.row.get("agent_name") or self._builder.default_name
        if ":" in name and name != self._keys.default_agent_loop:
            raise TrajectoryFailed(
                "data",
                f"agent_name={name} of a row: data cannot choose code. Set agent.default_agent_loop to it, "
                "or give it a name in agent.agent_loop_config_path",
            )
        try:
            return self._builder.agent(name)
        except (ConfigError, DataError) as error:  # a name that a dataset class gave later
            raise TrajectoryFailed("data", str(error)) from error


def _metrics(trajectories: Sequence[Trajectory], runner: Runner) -> Metrics:
    """Return the numbers of trajectories that have not failed, and how the others were dealt with."""
    metrics = Metrics()
    whole = [trajectory for trajectory in trajectories if not trajectory.failed]
    for trajectory in whole:
        metrics.add_mean("agent/num_turns/mean", trajectory.turns, 1.0)
        metrics.add_max("agent/num_turns/max", trajectory.turns)
        metrics.add_mean("agent/num_rows/mean", len(trajectory.lineages), 1.0)
        for name, value in trajectory.metrics.items():
            metrics.add_mean(f"agent/{name}", value, 1.0)
    for cause, count in runner.retried.items():
        metrics.add_sum(f"agent/num_retried/{cause}", float(count))
    metrics.add_max("agent/max_concurrent", float(runner.peak))
    return metrics
