"""All episodes of a step, side by side: agents play them, failures are tried again, each end is told at once.

episodes ──place──► Agent.run ──► Trajectory ──ended──► scored while others still run
                       └── failed? by its cause tried again, with other draws, or told as failed
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from hybridflow.agent.concurrency import Concurrency
from hybridflow.agent.episode import Agent, AgentResult, Episode, LengthReached, TrajectoryFailed
from hybridflow.agent.policy import Policy, PolicyLimits
from hybridflow.config.agent import AgentConfig
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import DataError
from hybridflow.protocol.randomness import derive_seed
from hybridflow.protocol.trajectory import TRUNCATED, FailureCause, Outcome, Trajectory, rows_of
from hybridflow.rollout.client import LLMClient

logger = logging.getLogger(__name__)

AgentOf = Callable[[Episode], Agent]
"""Gives the agent that plays an episode; TrajectoryFailed where there is none."""
Ended = Callable[[int, Trajectory], None]
"""Called with the place of an episode and what came of it, as soon as it has ended."""


class Runner:
    """Plays episodes; one for each call of `RolloutGroup.run`."""

    def __init__(
        self, agent_of: AgentOf, tokenizer: Tokenizer, limits: PolicyLimits, config: AgentConfig
    ) -> None:
        self.retried: Counter[FailureCause] = Counter()
        """Tries that have failed and were followed by another one, by cause."""
        self.peak = 0
        """Most trajectories that ran at once."""
        self._agent_of = agent_of
        self._tokenizer = tokenizer
        self._limits = limits
        self._config = config
        self._ids = itertools.count()

    async def run(self, client: LLMClient, episodes: Sequence[Episode], ended: Ended) -> None:
        """Play all episodes and tell the end of each; a failed one ends nothing but itself."""
        concurrency = Concurrency(self._config.max_concurrent, lambda: _crowd(client))
        adapting = asyncio.create_task(concurrency.adapt())

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

    async def _with_retries(self, client: LLMClient, episode: Episode) -> Trajectory:
        """Play an episode until it has not failed, or its cause allows no further try."""
        retries = self._config.retries
        left = {
            "infrastructure": retries.infrastructure,
            "environment": retries.environment,
            "deadline": retries.deadline,
        }
        for attempt in itertools.count(1):
            trajectory = await self._once(client, episode)
            cause = trajectory.outcome.cause
            if cause is None or not left.get(cause) or client.failure is not None:
                return trajectory
            left[cause] -= 1
            self.retried[cause] += 1
            episode = replace(episode, seed=derive_seed(episode.seed, "again", attempt))
        raise AssertionError("an endless loop ends by returning")

    async def _once(self, client: LLMClient, episode: Episode) -> Trajectory:
        policy = Policy(client, episode, self._limits, lambda: next(self._ids))
        try:
            async with asyncio.timeout(self._config.deadline):
                result = await self._agent_of(episode).run(episode, policy)
        except TrajectoryFailed as error:
            return _failed(episode, error.cause, str(error))
        except LengthReached as error:
            if not policy.calls:
                return _failed(episode, "data", str(error))
            result = AgentResult(outcome=TRUNCATED)
        except TimeoutError:
            return _failed(
                episode,
                "deadline",
                f"it took more than actor_rollout_ref.rollout.agent.deadline={self._config.deadline:g} s",
            )
        except DataError as error:
            return _failed(episode, "data", str(error))
        except Exception as error:  # an agent of a user's: anything may come out of it
            return _failed(episode, "environment", "".join(traceback.format_exception(error)).strip())
        return self._trajectory(episode, policy, result)

    def _trajectory(self, episode: Episode, policy: Policy, result: AgentResult) -> Trajectory:
        calls = [call for call in policy.calls if call.accepted]
        if not calls:
            return _failed(episode, "environment", "the agent ended without a call to the model")
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
            rows_of(policy.calls),
            result.outcome,
            reward=result.reward,
            turn_rewards=result.turn_rewards,
            turns=len(calls),
            metrics=result.metrics,
            extra={**facts, "extra_info": extra_info, "solution_str": text},
        )


def _failed(episode: Episode, cause: FailureCause, detail: str) -> Trajectory:
    outcome = Outcome("failed", cause, detail)
    return Trajectory(episode.group, episode.sample, (), outcome, extra=episode.facts)


def _crowd(client: LLMClient) -> tuple[int, int]:
    """Return how many requests wait for room in the engines, and how many there are."""
    waiting = sum(replica.waiting for replica in client.replicas)
    return waiting, client.load
