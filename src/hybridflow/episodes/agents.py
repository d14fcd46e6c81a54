"""Generates the responses to requests: single ones, or by the agents of a run where it has some.

RequestBatch ──answer_list, answer_group──► Trajectory, each told as soon as it has ended
               └── an episode is played by the agent of its row's agent_name, else of the keys
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from hybridflow.agent.build import SINGLE_TURN, AgentBuilder
from hybridflow.agent.collate import GROUPS_PER_STEP
from hybridflow.agent.episode import Agent, Episode, PolicyLimits, TrajectoryFailed, facts_of
from hybridflow.agent.journal import Journal
from hybridflow.agent.runner import Concurrency, Ended, Limit, Runner
from hybridflow.agent.single_turn import RequestBatch
from hybridflow.config import PPOConfig
from hybridflow.config.needs import longest_row, uses_agents
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import ConfigError, DataError
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol.randomness import derive_seed
from hybridflow.protocol.spans import TraceSpan
from hybridflow.protocol.trajectory import Trajectory
from hybridflow.rollout.base import GenerationOutput, RolloutStats
from hybridflow.rollout.client import DeadlinePassed, LLMClient, ReplicaLost
from hybridflow.workers import RolloutGroup


class Agents:
    """The agents of a run; close them at its end."""

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: Tokenizer,
        names: Collection[str] = (),
        journal: Journal | None = None,
    ) -> None:
        """Build the agents that the keys name, and those of these `names`, which rows of the data give; their
        training episodes are kept in the `journal`.

        ConfigError or DataError where one of them cannot be built.
        """
        asked = set(names) - {SINGLE_TURN}
        self.are_used = bool(asked) or uses_agents(config)
        """Whether any request is run by agents, and not as a single request."""
        self.journal = journal
        self._tokenizer = tokenizer
        self._seed = config.trainer.seed
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
        self._names = (self._builder.default_name, *sorted(asked))
        try:
            if self.are_used:
                for name in self._names:
                    self._builder.agent(name)
        except BaseException:
            self.close()
            raise

    @property
    def read_text_alone(self) -> str | None:
        """Return which agent of the run reads the text of a row alone, with what to set; None: none."""
        for name in self._names if self.are_used else ():
            if getattr(self._builder.agent(name), "reads_text_alone", False):
                return f"the agent {name} reads the text of a row alone: leave it out, or the pictures"
        return None

    def answer_list(
        self, rollout: RolloutGroup, requests: RequestBatch, ended: Ended, *, held_out: bool = False
    ) -> tuple[Metrics, RolloutStats]:
        """Answer all requests; return metrics of agents, and counts of the generation.

        `ended` is called at each end: in this thread, or in that of the agents' event loop. The
        environments of `held_out` requests are the same at every step.
        """
        if self.are_used:
            episodes = self._episodes(requests, held_out)
            self.processes()
            journal = None if held_out else self.journal
            metrics, stats = rollout.run(lambda client: self._play(client, episodes, ended, journal=journal))
            metrics.update(self.processes())
            return metrics, stats
        started = time.time()
        places = {request.request_id: place for place, request in enumerate(requests.requests)}

        def arrived(output: GenerationOutput) -> None:
            place = places[output.request_id]
            ended(place, self._trajectory(requests, place, output, started))

        return Metrics(), rollout.generate(requests.requests, finished=arrived).stats

    async def answer_group(
        self,
        client: LLMClient,
        requests: RequestBatch,
        ended: Ended,
        numbers: Iterator[int],
        *,
        timed: bool = True,
    ) -> Metrics:
        """Answer the requests of a group by `client`, in its event loop, under numbers that no other request
        has; return metrics of agents.

        A response that has no answer within `agent.request_deadline` has failed; single responses may take
        longer where they are not `timed`. ReplicaLost where no engine is left.
        """
        if self.are_used:
            episodes = self._episodes(requests, False)
            return await self._play(client, episodes, ended, numbers, self.journal)
        deadline = self._keys.request_deadline if timed else None

        async def answer(place: int) -> None:
            request = replace(requests.requests[place], request_id=next(numbers))
            started = time.time()
            try:
                output = await client.generate(request, sticky=requests.groups[place], deadline_s=deadline)
            except DeadlinePassed as error:
                ended(place, requests.failed(place, "deadline", str(error)))
            except ReplicaLost as error:
                if client.failure is not None:
                    raise
                ended(place, requests.failed(place, "infrastructure", str(error)))
            else:
                ended(place, self._trajectory(requests, place, output, started))

        async with asyncio.TaskGroup() as tasks:
            for place in range(len(requests)):
                tasks.create_task(answer(place))
        return Metrics()

    def processes(self) -> Metrics:
        """Return the counts of processes of tools and environments since the last call."""
        metrics = Metrics()
        for name, count in self._builder.hosts.counts.items():
            metrics.add_sum(f"agent/processes/{name}", float(count - self._counted.get(name, 0)))
            self._counted[name] = count
        return metrics

    def close(self) -> None:
        """End the processes of tools and environments."""
        self._builder.close()

    async def _play(
        self,
        client: LLMClient,
        episodes: Sequence[Episode],
        ended: Ended,
        numbers: Iterator[int] | None = None,
        journal: Journal | None = None,
    ) -> Metrics:
        """Run episodes by `client`; `numbers` are those of requests, where others run beside them."""
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
            journal=journal,
        )
        shared = None if numbers is None else self._shared_by_all(client, runner)
        try:
            await runner.run(client, episodes, hear, shared)
        finally:
            if journal is not None:
                journal.close_groups(episode.group for episode in episodes)
        return _metrics(told, runner)

    def _trajectory(
        self, requests: RequestBatch, place: int, output: GenerationOutput, started: float
    ) -> Trajectory:
        """Return the trajectory of a single request that was sent at `started`, in seconds since the
        epoch.
        """
        trajectory = requests.trajectory(place, output, self._tokenizer)
        facts = facts_of(requests.requests[place].prompt, output)
        span = TraceSpan("generate", started, time.time(), *facts, error=output.error or "")
        return replace(trajectory, spans=(span,))

    def _episodes(self, requests: RequestBatch, held_out: bool) -> list[Episode]:
        """Return the episodes in place of single requests, with the seeds of their environments: that of
        the row, where it has one.
        """
        episodes = []
        for place, request in enumerate(requests.requests):
            row = requests.rows[place]
            group = requests.groups[place]
            seed = (row.row.get("extra_info") or {}).get("seed")
            if not isinstance(seed, int):
                seed = derive_seed(self._seed, "environment", group)
                if held_out:
                    seed = derive_seed(self._seed, "held-out environment", group % GROUPS_PER_STEP)
            sample = requests.samples[place]
            episodes.append(Episode(row, group, sample, seed, request.seed, request.sampling))
        return episodes

    def _shared_by_all(self, client: LLMClient, runner: Runner) -> Concurrency:
        """Return the places of all episodes that run by `client` at once."""
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
    """Return the numbers of trajectories that have not failed, and how the others were handled."""
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
    if runner.journal is not None:
        for name in ("continued", "begun_anew", "calls_unknown"):
            metrics.add_sum(f"agent/journal/{name}", float(runner.survived[name]))
    metrics.add_max("agent/max_concurrent", float(runner.peak))
    return metrics
