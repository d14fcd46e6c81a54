"""Rows of groups: requests for prompts, trajectories that are scored, and what of them becomes rows.

prompts ──requests──► Generation ──► Trajectory ──Scoring──► scored, or failed ──collate──► DataProto

With an estimator that names `reward_baselines` (ReMax), each prompt has a greedy response more in the same
rollout and score calls; its score becomes the column, the row goes. With one that names `is_demonstration`
(SPIN), each group has the data's own answer as a row more; the reward function scores it like the others, and
dynamic sampling does not look at it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from hybridflow.agent.agents import Agents
from hybridflow.agent.collate import collate, trajectory_id
from hybridflow.agent.single_turn import RequestBatch, build_requests, demonstration_outputs, one_more_each
from hybridflow.config import PPOConfig
from hybridflow.data.prompts import PromptRow
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.timeline import timeline
from hybridflow.protocol import DataProto
from hybridflow.protocol.by_trajectory import ByTrajectory
from hybridflow.protocol.trajectory import Outcome, Trajectory
from hybridflow.rewards.manager import RewardManager
from hybridflow.rollout.base import SamplingParams
from hybridflow.rollout.client import LLMClient
from hybridflow.trainer.ppo.columns import find_estimator
from hybridflow.trainer.ppo.generation import Generation, sampling_of
from hybridflow.trainer.ppo.overlong import shape_overlong
from hybridflow.trainer.ppo.rollout_traces import RolloutTraces
from hybridflow.trainer.ppo.scoring import Scoring
from hybridflow.workers.correction import sampled_rows

logger = logging.getLogger(__name__)

NO_REQUESTS = RequestBatch([], [], [], [])


class FailureCount(Protocol):
    """Whoever hears of trajectories that have failed: `Failures`, or a collector's list of them."""

    def add(self, outcome: Outcome) -> None:
        """Count a trajectory that has failed, by its outcome."""


class GroupMaker:
    """Makes the rows of groups by a client of the engines, in whatever process."""

    def __init__(
        self,
        rewards: RewardManager,
        tokenizer: Tokenizer,
        config: PPOConfig,
        agents: Agents,
        failures: FailureCount,
        traces: RolloutTraces | None = None,
    ) -> None:
        self.agents = agents
        self.generation = Generation(tokenizer, config, agents)
        self.rewards = rewards
        self.tokenizer = tokenizer
        self.config = config
        self._failures = failures
        self._traces = traces
        needs = find_estimator(config.algorithm).needs
        self.with_baselines = "reward_baselines" in needs
        self.with_demonstrations = "is_demonstration" in needs

    @property
    def pad_token_id(self) -> int:
        """The token that fills rows up."""
        return int(self.tokenizer.pad_token_id)

    async def play_group(
        self, index: int, prompt: PromptRow, client: LLMClient, numbers: Iterator[int], *, timed: bool = True
    ) -> tuple[DataProto, Metrics]:
        """Sample and score the group of this index by `client`, beside others, in its event loop.

        `numbers` are those of requests; `timed` is that of `Generation.play`. The group has no rows where all
        of its trajectories have failed. The event loop is not held up while rewards are computed.
        """
        requests, demonstrations = self.planned(index, [prompt])
        everything = requests + demonstrations
        with self.rewards.open() as session:
            scoring = Scoring(session, [row.row.get("raw_prompt") for row in everything.rows])
            for place, answer in enumerate(demonstration_outputs(demonstrations), len(requests)):
                scoring.add(place, everything.trajectory(place, answer, self.tokenizer))
            found = await self.generation.play(requests, scoring.add, client, numbers, timed=timed)
            trajectories, metrics = await asyncio.to_thread(scoring.result)
        self.trace(trajectories, everything)
        metrics.update(found)
        return self.rows(trajectories, metrics), metrics

    def trace(
        self, trajectories: Sequence[Trajectory], requests: RequestBatch, *, validate: bool = False
    ) -> None:
        """Send traces of trajectories, in the order of their `requests`, where the run has traces; those of
        training are also noted for the page of the run.
        """
        for trajectory in trajectories:
            if not validate:
                timeline.add_trajectory(trajectory_id(trajectory), trajectory.spans)
        if self._traces is not None:
            self._traces.add(trajectories, requests.rows, validate=validate)

    def planned(self, first_group: int, prompts: Sequence[PromptRow]) -> tuple[RequestBatch, RequestBatch]:
        """Return the requests of groups that are numbered from `first_group`, and the rows whose answers are
        the data's own.
        """
        rollout = self.config.actor_rollout_ref.rollout
        sampling = replace(sampling_of(self.config, rollout), greedy=not rollout.do_sample)
        sampled = self._requests(first_group, prompts, sampling)
        requests = sampled
        demonstrations = NO_REQUESTS
        if self.with_baselines:
            requests = sampled + one_more_each(
                sampled, replace(sampling, greedy=True), first_row=len(sampled), sample=self._greedy_sample
            )
        if self.with_demonstrations:
            demonstrations = one_more_each(
                sampled, sampling, first_row=len(requests), sample=self._demonstration_sample
            )
        return requests, demonstrations

    def rows(self, trajectories: Sequence[Trajectory], metrics: Metrics) -> DataProto:
        """Return the rows of all trajectories that have not failed, and count in `metrics` what they are."""
        trajectories = self._without_failed(trajectories, metrics)
        batch = collate(trajectories, self.pad_token_id)
        if len(batch):
            samples = torch.tensor([one.sample for one in trajectories for _ in one.lineages])
            batch = self._with_extra_rows_marked(batch, samples, metrics)
        return batch

    def _with_extra_rows_marked(self, batch: DataProto, samples: Tensor, metrics: Metrics) -> DataProto:
        """Shape the scores; make the greedy rows a column, and mark the answers of the data.

        `samples` [B] int64 is the number of each row's sample in its group.
        """
        batch = self._shaped(batch, samples < self._greedy_sample, metrics)
        if self.with_demonstrations:
            batch |= DataProto.from_dict({"is_demonstration": samples == self._demonstration_sample})
        if self.with_baselines:
            batch = _baselines_as_column(batch, samples == self._greedy_sample)
            baselines = ByTrajectory(batch).samples.batch["reward_baselines"]
            metrics.add_mean("training/reward_baseline/mean", baselines.sum(), len(baselines))
        if self.config.algorithm.filter_groups.enable:
            trajectories = ByTrajectory(batch).samples
            generated = sampled_rows(trajectories)
            metrics.add_mean(
                "training/unfiltered_score/mean",
                trajectories.batch["token_level_scores"][generated].sum(),
                int(generated.sum()),
            )
        return batch

    def _requests(
        self, first_group: int, prompts: Sequence[PromptRow], sampling: SamplingParams
    ) -> RequestBatch:
        """Make `rollout.n` requests for each prompt, with the numbers and seeds of their groups; request ids
        count from 0.

        With P = `data.train_batch_size`, group i has those of row (i % P)·n of step i // P + 1: those of the
        step that trains it, where every group is trained.
        """
        period = self.config.data.train_batch_size
        n = self.config.actor_rollout_ref.rollout.n
        batch = NO_REQUESTS
        while len(prompts):
            number, place = divmod(first_group, period)
            part = prompts[: period - place]
            batch += build_requests(
                part,
                sampling,
                n=n,
                seed=self.config.trainer.seed,
                purpose="rollout",
                step=number + 1,
                first_row=place * n,
            )
            first_group += len(part)
            prompts = prompts[len(part) :]
        numbered = [replace(request, request_id=place) for place, request in enumerate(batch.requests)]
        return replace(batch, requests=numbered)

    def _shaped(self, batch: DataProto, sampled: Tensor, metrics: Metrics) -> DataProto:
        """Shape overlong rewards where `reward.reward_kwargs` asks for it."""
        limits = self.config.reward.reward_kwargs
        buffer = limits.overlong_buffer_cfg
        max_len = limits.max_resp_len or self.config.data.max_response_length
        if not buffer.enable:
            return batch
        assert buffer.len is not None, "filled by resolve"
        batch = shape_overlong(batch, max_len=max_len, buffer_len=buffer.len, factor=buffer.penalty_factor)
        penalties = torch.tensor(list(batch.non_tensor_batch["overlong_reward"]), dtype=torch.float64)
        first = ByTrajectory(batch).first_rows
        penalties = penalties[first][sampled[first]]
        metrics.add_mean("training/overlong_reward/mean", penalties.sum(), len(penalties))
        return batch

    def _without_failed(self, trajectories: Sequence[Trajectory], metrics: Metrics) -> list[Trajectory]:
        """Leave out and count the trajectories that have failed, and put those of a group side by side.

        Where a greedy response has failed, its group has no baseline, and is left out.
        """
        failed = [trajectory for trajectory in trajectories if trajectory.failed]
        for trajectory in failed:
            metrics.add_sum(f"training/num_failed/{trajectory.outcome.cause}", 1.0)
            self._failures.add(trajectory.outcome)
        # failures of the reward function have been told by its manager
        generation = [one for one in failed if one.outcome.cause not in ("environment", "deadline")]
        if generation:
            logger.warning(
                "%d of %d trajectories failed; the first: %s",
                len(generation),
                len(trajectories),
                generation[0].outcome.detail,
            )
        without_baseline = set()
        if self.with_baselines:
            without_baseline = {one.group for one in failed if one.sample == self._greedy_sample}
        kept = [one for one in trajectories if not one.failed and one.group not in without_baseline]
        left = Counter(one.group for one in kept if one.sample < self._greedy_sample)
        least = self.config.actor_rollout_ref.rollout.agent.min_group_size
        small = {group for group, size in left.items() if size < least}
        if small:
            metrics.add_sum("training/num_small_groups", len(small))
            kept = [one for one in kept if one.group not in small]
        return sorted(kept, key=lambda one: (one.group, one.sample))

    @property
    def _greedy_sample(self) -> int:
        """Number of the greedy response in its group, after the sampled ones."""
        return self.config.actor_rollout_ref.rollout.n

    @property
    def _demonstration_sample(self) -> int:
        """Number of the data's own answer in its group, after all others."""
        return self.config.actor_rollout_ref.rollout.n + 1


def _baselines_as_column(batch: DataProto, greedy: Tensor) -> DataProto:
    """Return the rows that are not `greedy` [B] bool, each with the score of its prompt's greedy trajectory
    as `reward_baselines` [B] float32.
    """
    view = ByTrajectory(batch)
    scores = view.spread(view.samples.batch["token_level_scores"].sum(-1))
    uids = batch.non_tensor_batch["uid"]
    row_of = {uids[row]: row for row in greedy.nonzero().flatten().tolist()}
    baseline = torch.tensor([row_of[uid] for uid in uids])
    return (batch | DataProto.from_dict({"reward_baselines": scores[baseline]})).select_idxs(~greedy)
