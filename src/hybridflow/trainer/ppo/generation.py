"""Requests become trajectories that are not scored yet: single responses, or what agents play.

prompts ──validation_requests──► requests ──run──► Trajectory, each told as soon as it has ended
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hybridflow.agent.agents import Agents
from hybridflow.agent.collate import GROUPS_PER_STEP
from hybridflow.agent.episode import Episode
from hybridflow.agent.policy import facts_of
from hybridflow.agent.single_turn import RequestBatch, build_requests
from hybridflow.config import PPOConfig
from hybridflow.config.actor_rollout_ref import RolloutConfig, ValKwargsConfig
from hybridflow.data.prompts import PromptRow
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol.randomness import derive_seed
from hybridflow.protocol.spans import TraceSpan
from hybridflow.protocol.trajectory import Trajectory
from hybridflow.rollout.base import GenerationOutput, RolloutStats, SamplingParams
from hybridflow.rollout.client import DeadlinePassed, LLMClient, ReplicaLost
from hybridflow.workers import RolloutGroup

Ended = Callable[[int, Trajectory], None]
"""Called with the place of a request and what came of it, as soon as it has ended."""


class Generation:
    """Answers requests with the engines of a run, by its agents where it has some."""

    def __init__(self, tokenizer: Tokenizer, config: PPOConfig, agents: Agents) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.agents = agents

    def run(
        self, rollout: RolloutGroup, requests: RequestBatch, ended: Ended, *, held_out: bool = False
    ) -> tuple[Metrics, RolloutStats]:
        """Answer all requests; return metrics of agents, and counts of the generation.

        The environments of `held_out` requests are the same at every step.
        """
        if self.agents.are_used:
            return self.agents.run(rollout, self._episodes(requests, held_out), ended)
        started = time.time()
        places = {request.request_id: place for place, request in enumerate(requests.requests)}

        def arrived(output: GenerationOutput) -> None:
            place = places[output.request_id]
            ended(place, self._trajectory(requests, place, output, started))

        return Metrics(), rollout.generate(requests.requests, finished=arrived).stats

    async def play(
        self,
        requests: RequestBatch,
        ended: Ended,
        client: LLMClient,
        numbers: Iterator[int],
        *,
        timed: bool = True,
    ) -> Metrics:
        """Answer the requests of a group by `client`, in its event loop, under numbers that no other request
        has; return metrics of agents.

        A response that has no answer within `agent.request_deadline` has failed; single responses may take
        longer where they are not `timed`. ReplicaLost where no engine is left.
        """
        if self.agents.are_used:
            return await self.agents.play(client, self._episodes(requests, False), ended, numbers)
        deadline = self.config.actor_rollout_ref.rollout.agent.request_deadline if timed else None

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

    def _trajectory(
        self, requests: RequestBatch, place: int, output: GenerationOutput, started: float
    ) -> Trajectory:
        """Return what came of a single request that was sent when it was `started`, in seconds since the
        epoch.
        """
        trajectory = requests.trajectory(place, output, self.tokenizer)
        facts = facts_of(requests.requests[place].prompt, output)
        span = TraceSpan("generate", started, time.time(), *facts, error=output.error or "")
        return replace(trajectory, spans=(span,))

    def _episodes(self, requests: RequestBatch, held_out: bool) -> list[Episode]:
        """Return what agents play in place of single requests, with the seeds of their environments: that of
        the row, where it has one.
        """
        episodes = []
        seed = self.config.trainer.seed
        for place, request in enumerate(requests.requests):
            group = requests.groups[place]
            own = (requests.rows[place].row.get("extra_info") or {}).get("seed")
            group_seed = derive_seed(seed, "environment", group)
            if isinstance(own, int):
                group_seed = own
            elif held_out:
                group_seed = derive_seed(seed, "held-out environment", group % GROUPS_PER_STEP)
            episodes.append(
                Episode(
                    requests.rows[place],
                    group,
                    requests.samples[place],
                    group_seed,
                    request.seed,
                    request.sampling,
                )
            )
        return episodes


def validation_requests(
    config: PPOConfig, prompts: Sequence[PromptRow], step: int, first_row: int = 0
) -> RequestBatch:
    """Make `val_kwargs.n` requests for each prompt, whose draws depend on (seed, step, row) alone; rows
    are numbered from `first_row`.
    """
    val = config.actor_rollout_ref.rollout.val_kwargs
    greedy = not val.do_sample or val.temperature == 0.0
    sampling = replace(sampling_of(config, val), greedy=greedy)
    if greedy:
        sampling = replace(sampling, temperature=1.0)
    seed = config.trainer.seed
    return build_requests(
        prompts, sampling, n=val.n, seed=seed, purpose="validation", step=step, first_row=first_row
    )


def sampling_of(config: PPOConfig, keys: RolloutConfig | ValKwargsConfig) -> SamplingParams:
    """Return how tokens are drawn by these keys; what ends a response is the same for all."""
    rollout = config.actor_rollout_ref.rollout
    return SamplingParams(
        max_tokens=config.data.max_response_length,
        temperature=keys.temperature,
        top_k=keys.top_k,
        top_p=keys.top_p,
        min_p=keys.min_p,
        repetition_penalty=keys.repetition_penalty,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
        ignore_eos=rollout.ignore_eos,
    )
