"""Runs all episodes of a step concurrently; failures are retried, and each result is reported at once.

episodes ──place──► Agent.run ──► Trajectory ──ended──► scored while others still run
                       └── failed? retried, by its cause, with other seeds, or reported as failed

`Concurrency` says how many trajectories run at once: more, step by step, while the engines keep up; else far
fewer.

Additive increase, multiplicative decrease, as in TCP's congestion control (Chiu and Jain 1989), with its slow
start: until there was a crowd once, the number doubles.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from hybridflow.agent.collate import ROWS_PER_TRAJECTORY
from hybridflow.agent.episode import (
    Agent,
    AgentResult,
    Episode,
    LengthReached,
    Policy,
    PolicyLimits,
    TrajectoryFailed,
)
from hybridflow.agent.journal import BegunAnew, EpisodeJournal, Journal
from hybridflow.config.agent import AgentConfig
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import DataError
from hybridflow.processes.local import HostsLike
from hybridflow.protocol.randomness import derive_seed
from hybridflow.protocol.trajectory import (
    TRUNCATED,
    FailureCause,
    Lineage,
    Outcome,
    PolicyCall,
    Trajectory,
    rows_of,
)
from hybridflow.rollout.client import LLMClient

logger = logging.getLogger(__name__)
LEAVE_SECONDS = 10.0
"""Time for an agent to end after it was cancelled."""

AgentOf = Callable[[Episode], Agent]
"""Gives the agent that runs an episode; TrajectoryFailed where there is none."""
Ended = Callable[[int, Trajectory], None]
"""Called with the place of an episode and its trajectory, as soon as it has ended."""
LEAST = 8
"""Trajectories that may always run at once."""
START = 64
INCREASE = 8
"""Increase of the limit after each check of engines that keep up, once there was a crowd."""
DECREASE = 0.5
"""Factor on the limit after a check of engines that do not."""
LOOK_SECONDS = 1.0
CROWDED = 0.25
"""Share of the requests that may wait for room before the limit is lowered."""


class Runner:
    """Runs episodes; one for each call of `RolloutGroup.run`."""

    def __init__(
        self,
        agent_of: AgentOf,
        tokenizer: Tokenizer,
        limits: PolicyLimits,
        config: AgentConfig,
        *,
        hosts: HostsLike,
        limit: Limit,
        numbers: Iterator[int] | None = None,
        journal: Journal | None = None,
    ) -> None:
        """`hosts` run the code of tools and environments; `limit` is kept from step to step. `numbers` are
        those of requests; None: from 0. By the `journal` episodes go on that another process has begun.
        """
        self.journal = journal
        self.survived = Counter[str]()
        """Episodes that went on by their journal, or began anew, and calls of which nobody knows whether they
        were carried out, by the last word of their metric.
        """
        self.retried: Counter[FailureCause] = Counter()
        """Tries that have failed and were followed by another one, by cause."""
        self.peak = 0
        """Most trajectories that ran at once."""
        self._agent_of = agent_of
        self._tokenizer = tokenizer
        self._limits = limits
        self._config = config
        self._hosts = hosts
        self._limit = limit
        self._ids = itertools.count() if numbers is None else numbers
        self._told: set[FailureCause] = set()

    def concurrency(self, client: LLMClient) -> Concurrency:
        """Return a semaphore for as many trajectories as the engines of `client` keep up with."""
        return Concurrency(self._limit, self._config.max_concurrent, lambda: self._are_crowded(client))

    async def run(
        self,
        client: LLMClient,
        episodes: Sequence[Episode],
        ended: Ended,
        shared: Concurrency | None = None,
    ) -> None:
        """Run all episodes and report the end of each; a failed one ends nothing but itself.

        `shared` has the places of all concurrent runs, and is adapted by its owner; None: this is the only
        run.
        """
        concurrency = shared or self.concurrency(client)
        adapting = asyncio.create_task(asyncio.sleep(0) if shared else concurrency.adapt())

        async def play(place: int, episode: Episode) -> None:
            async with concurrency.place():
                trajectory = await self._with_retries(client, episode)
            ended(place, trajectory)

        try:
            async with asyncio.TaskGroup() as tasks:
                for place, episode in enumerate(episodes):
                    tasks.create_task(play(place, episode))
        finally:
            self.peak = concurrency.peak
            adapting.cancel()
            with suppress(asyncio.CancelledError):
                await adapting

    def _are_crowded(self, client: LLMClient) -> bool:
        """Return whether many requests wait for room in the engines, or many calls for a process."""
        in_engines = sum(replica.waiting for replica in client.replicas)
        return in_engines > CROWDED * client.load or self._hosts.waiting > CROWDED * self._limit.value

    async def _with_retries(self, client: LLMClient, episode: Episode) -> Trajectory:
        """Run an episode until it succeeds, or its cause allows no further try."""
        retries = self._config.retries
        left = {
            "infrastructure": retries.infrastructure,
            "environment": retries.environment,
            "deadline": retries.deadline,
        }
        draws = 0
        while True:
            trajectory = await self._once(client, episode)
            cause = trajectory.outcome.cause
            self._tell(trajectory)
            if cause is None or not left.get(cause) or client.failure is not None:
                return trajectory
            left[cause] -= 1
            self.retried[cause] += 1
            if cause != "infrastructure" or self.journal is None:  # else it goes on from its last turn
                draws += 1
                episode = replace(episode, seed=derive_seed(episode.seed, "again", draws))

    def _tell(self, trajectory: Trajectory) -> None:
        """Log the first failure of each cause; all are counted."""
        cause = trajectory.outcome.cause
        if cause is not None and cause not in self._told:
            self._told.add(cause)
            logger.warning("a trajectory has failed (%s): %s", cause, trajectory.outcome.detail)

    async def _once(self, client: LLMClient, episode: Episode) -> Trajectory:
        journal = self._journal_of(episode)
        policy = Policy(client, episode, self._limits, lambda: next(self._ids), journal)
        try:
            trajectory = await self._played(episode, policy)
        except BegunAnew as error:
            assert journal is not None, "nothing else raises it"
            logger.warning("an episode begins anew: %s", error)
            await journal.end(str(error))
            self.survived["begun_anew"] += 1
            return await self._once(client, episode)
        finally:
            await policy.close()
        if journal is not None:
            await self._note_end(journal, trajectory, client)
        return replace(trajectory, spans=tuple(policy.log.spans))

    async def _note_end(self, journal: EpisodeJournal, trajectory: Trajectory, client: LLMClient) -> None:
        """Count what the journal was good for, and note a failure that another process is not to repeat."""
        self.survived["continued"] += journal.has_past and not trajectory.failed
        self.survived["calls_unknown"] += journal.num_unknown
        cause = trajectory.outcome.cause
        is_known = journal.failed is not None or client.failure is not None
        if cause is None or cause in ("infrastructure", "cancelled") or is_known:
            return
        await journal.fail(cause, trajectory.outcome.detail)

    def _journal_of(self, episode: Episode) -> EpisodeJournal | None:
        """Return the journal of an episode whose agent keeps one."""
        if self.journal is None:
            return None
        with suppress(TrajectoryFailed):  # there is no such agent, which fails the episode as it is played
            if getattr(self._agent_of(episode), "is_journaled", False):
                facts = (episode.group_seed, episode.seed, episode.prompt.key, episode.facts)
                return self.journal.episode(episode.group, episode.sample, facts)
        return None

    async def _played(self, episode: Episode, policy: Policy) -> Trajectory:
        try:
            if policy.journal is not None and policy.journal.failed is not None:
                return _failed(episode, *policy.journal.failed)
            result = await _in_time(self._agent_of(episode).run(episode, policy), self._config.deadline)
            return self._trajectory(episode, policy, result)
        except BegunAnew:
            raise
        except TrajectoryFailed as error:
            return _failed(episode, error.cause, str(error))
        except LengthReached as error:
            if not policy.calls or episode.facts["data_source"] is None:
                # without a source the run's reward function cannot score what the agent did not
                return _failed(episode, "data", str(error))
            return self._trajectory(episode, policy, AgentResult(outcome=TRUNCATED))
        except TimeoutError as error:
            return _failed(episode, "deadline", f"the agent gave up after its own timeout: {error}")
        except DataError as error:
            return _failed(episode, "data", str(error))
        except Exception as error:  # a user's agent: it may raise anything
            return _failed(episode, "environment", "".join(traceback.format_exception(error)).strip())

    def _trajectory(self, episode: Episode, policy: Policy, result: AgentResult) -> Trajectory:
        """Return the trajectory of an episode; raises TrajectoryFailed for an invalid result."""
        if not isinstance(result, AgentResult):
            raise TrajectoryFailed(
                "environment", f"the agent returned {type(result).__name__}, wanted an AgentResult"
            )
        calls = [call for call in policy.calls if call.accepted]
        rows = rows_of(calls if result.calls is None else result.calls)
        _check(result, calls, rows)
        facts = episode.facts
        extra_info = {
            **facts["extra_info"],
            "num_turns": len(calls),
            "messages": list(result.messages),
            **result.extra_info,
        }
        text = self._tokenizer.decode(list(calls[-1].output.token_ids), skip_special_tokens=True)
        return Trajectory(
            episode.group,
            episode.sample,
            rows,
            result.outcome,
            reward=result.reward,
            turn_rewards=result.turn_rewards,
            turns=len(calls),
            metrics=result.metrics,
            extra={**facts, "extra_info": extra_info, "solution_str": text},
        )


async def _in_time(playing: Coroutine[Any, Any, AgentResult], deadline_s: float) -> AgentResult:
    """Return the result of an agent. Raises TrajectoryFailed at the deadline; an agent that ignores its
    cancellation is left behind.
    """
    task = asyncio.create_task(_without_exit(playing))
    try:
        ended, _ = await asyncio.wait([task], timeout=deadline_s)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=LEAVE_SECONDS)
    if task.cancelled() and ended:
        raise TrajectoryFailed("environment", "the agent ended by a cancellation that came out of it")
    if ended:
        return task.result()
    told = f"it took more than actor_rollout_ref.rollout.agent.deadline={deadline_s:g} s"
    if not task.done():
        told += f", and did not end within {LEAVE_SECONDS:g} s after it was cancelled"
        logger.warning("an agent goes on after its deadline: %s", told)
    raise TrajectoryFailed("deadline", told)


async def _without_exit(playing: Coroutine[Any, Any, AgentResult]) -> AgentResult:
    """Return the result of an agent; RuntimeError for sys.exit(), which would end the event loop."""
    try:
        return await playing
    except SystemExit as error:
        raise RuntimeError(f"the agent called sys.exit({error.code})") from error


def _check(result: AgentResult, calls: Sequence[PolicyCall], rows: Sequence[Lineage]) -> None:
    """Raise TrajectoryFailed for a result that cannot become rows."""
    if not calls:
        raise TrajectoryFailed("environment", "the agent ended without a call to the model")
    if len(rows) > ROWS_PER_TRAJECTORY:
        raise TrajectoryFailed(
            "data", f"{len(rows)} rows came of its calls, and at most {ROWS_PER_TRAJECTORY} are possible"
        )
    rewards = [reward for reward in (result.reward, *result.turn_rewards.values()) if reward is not None]
    if not all(isinstance(reward, Real) and math.isfinite(reward) for reward in rewards):
        raise TrajectoryFailed("environment", f"its rewards are {rewards}, wanted finite numbers")
    strange = [call for call in result.turn_rewards if not 0 <= call < len(calls)]
    if strange:
        raise TrajectoryFailed(
            "environment", f"it has rewards for its calls {strange}, and there were {len(calls)}"
        )


def _failed(episode: Episode, cause: FailureCause, detail: str) -> Trajectory:
    outcome = Outcome("failed", cause, detail)
    return Trajectory(episode.group, episode.sample, (), outcome, extra=episode.facts)


@dataclass
class Limit:
    """The adapted limit, kept from one step to the next."""

    value: int = START
    was_crowded: bool = False


class Concurrency:
    """A semaphore for at most `most` trajectories, and fewer while it `is_crowded`."""

    def __init__(self, limit: Limit, most: int, is_crowded: Callable[[], bool]) -> None:
        limit.value = min(most, limit.value)
        self.limit = limit
        self.peak = 0
        """Most trajectories that ran at once."""
        self._most = most
        self._is_crowded = is_crowded
        self._running = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place, and keep it in this context."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._running < self.limit.value)
            self._running += 1
            self.peak = max(self.peak, self._running)
        try:
            yield
        finally:
            self._running -= 1
            async with self._changed:
                self._changed.notify(1)

    async def adapt(self) -> None:
        """Re-evaluate the limit every LOOK_SECONDS until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Set the limit by how crowded it is now; a decrease takes effect before the next one."""
        limit = self.limit
        if self._is_crowded():
            limit.was_crowded = True
            if self._running <= limit.value:
                limit.value = max(min(LEAST, self._most), int(limit.value * DECREASE))
        elif self._running >= limit.value:
            more = limit.value
            if limit.was_crowded:
                more = INCREASE
            limit.value = min(self._most, limit.value + more)
        async with self._changed:
            self._changed.notify_all()
