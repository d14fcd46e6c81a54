"""The one way from prompts to scored rows, in the driver and in the collectors.

    prompts ──requests──► Agents ──each trajectory as it ends──► reward ──► scored, or failed ──► rows

Callers differ only in who generates the responses. A synchronous batch and a validation are one list
(`run_groups`, `for_validation`): `RolloutGroup.generate` answers it as a whole, or agents play it in an event
loop. Continuous schedules and collectors run single groups beside each other, by a client in an event loop
(`run_group`). The list is no gather of groups, because an engine that knows its whole batch prefills each
prompt once, fills all its rows at once and ends with the last response; single requests would be batched by
the time of their arrival, which is slower, and gives other bits from run to run.

A trajectory is scored while others are still generated. One that has failed is counted by its cause and is
never a row.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.agent.collate import collate, trajectory_id
from hybridflow.agent.single_turn import RequestBatch, demonstration_outputs
from hybridflow.config import PPOConfig
from hybridflow.data.prompts import PromptRow
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.episodes.agents import Agents
from hybridflow.episodes.filters import shape_by_keys
from hybridflow.episodes.planning import (
    BASELINES,
    DEMONSTRATIONS,
    demonstration_sample,
    greedy_sample,
    training_requests,
    validation_requests,
)
from hybridflow.episodes.rollout_traces import RolloutTraces
from hybridflow.episodes.scoring import Scoring
from hybridflow.errors import RolloutError
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.timing import Timer, timeline
from hybridflow.protocol import DataProto
from hybridflow.protocol.by_trajectory import ByTrajectory
from hybridflow.protocol.trajectory import Outcome, Trajectory
from hybridflow.rewards.manager import RewardManager, RewardSession
from hybridflow.rollout.base import RolloutStats
from hybridflow.rollout.client import LLMClient
from hybridflow.workers import RolloutGroup
from hybridflow.workers.correction import sampled_rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupRows:
    """The scored rows of one or several groups."""

    rows: DataProto
    """All trajectories that have not failed, the samples of a group side by side; none where all failed."""
    metrics: Metrics
    failed: list[Outcome]
    """How the other trajectories have failed."""


class RolloutPipeline:
    """Makes scored rows of prompts, for training and for validation, in whatever process."""

    def __init__(
        self,
        rewards: RewardManager,
        tokenizer: Tokenizer,
        config: PPOConfig,
        agents: Agents,
        needs: Collection[str],
        traces: RolloutTraces | None = None,
    ) -> None:
        """`needs` are the columns that the run's advantage estimator reads."""
        self.rewards = rewards
        self.tokenizer = tokenizer
        self.config = config
        self.agents = agents
        self.needs = needs
        self.traces = traces

    @property
    def pad_token_id(self) -> int:
        """The token that fills rows up."""
        return int(self.tokenizer.pad_token_id)

    def run_groups(
        self, rollout: RolloutGroup, first_group: int, prompts: Sequence[PromptRow], timer: Timer
    ) -> tuple[GroupRows, RolloutStats]:
        """Sample `rollout.n` responses to each prompt as one closed list, and score them.

        Groups are numbered from `first_group`; a group's draws depend on its number alone, and on no step.
        """
        requests, demonstrations = training_requests(self.config, self.needs, first_group, prompts)
        with self.rewards.open() as session:
            scoring = self._scoring(session, requests, demonstrations)
            with timer("gen"):
                found, stats = self.agents.answer_list(rollout, requests, scoring.ended)
            with timer("reward"):
                trajectories, metrics = scoring.rewarded(session.result())
        metrics.update(found)
        return self._group_rows(trajectories, requests + demonstrations, metrics), stats

    async def run_group(
        self, index: int, prompt: PromptRow, client: LLMClient, numbers: Iterator[int], *, timed: bool = True
    ) -> GroupRows:
        """Sample and score the group of this index by `client`, beside others, in its event loop. That is not
        held up while rewards are computed.

        `numbers` are those of requests; `timed` is that of `Agents.answer_group`.
        """
        requests, demonstrations = training_requests(self.config, self.needs, index, [prompt])
        with self.rewards.open() as session:
            scoring = self._scoring(session, requests, demonstrations)
            found = await self.agents.answer_group(client, requests, scoring.ended, numbers, timed=timed)
            trajectories, metrics = scoring.rewarded(await asyncio.to_thread(session.result))
        metrics.update(found)
        return self._group_rows(trajectories, requests + demonstrations, metrics)

    def for_validation(
        self,
        rollout: RolloutGroup,
        prompts: Sequence[PromptRow],
        step: int,
        timer: Timer,
        *,
        first_row: int = 0,
    ) -> tuple[DataProto, Metrics]:
        """Sample `val_kwargs.n` responses to each prompt with the weights of step `step` and score them; rows
        are numbered from `first_row`.

        Scores are the reward's own: no overlong shaping, and a row whose reward failed stays with 0. Raises
        RolloutError where a response could not be generated.
        """
        requests = validation_requests(self.config, prompts, step, first_row)
        with self.rewards.open() as session:
            scoring = self._scoring(session, requests)
            with timer("val_gen"):
                found, _ = self.agents.answer_list(rollout, requests, scoring.ended, held_out=True)
            with timer("val_reward"):
                trajectories, metrics = scoring.rewarded(session.result(), failures_count=False)
        metrics.update(found)
        self._trace(trajectories, requests, validate=True)
        failed = [trajectory for trajectory in trajectories if trajectory.failed]
        if failed:
            told = (
                f"{len(failed)} of {len(trajectories)} trajectories of a validation failed; the first, "
                f"{failed[0].outcome.detail}"
            )
            if len(failed) == len(trajectories) or not self.agents.are_used:
                raise RolloutError(told)
            logger.warning("%s: they are left out of its metrics", told)
            for trajectory in failed:
                metrics.add_sum(f"agent/num_failed/{trajectory.outcome.cause}", 1.0)
        whole = [trajectory for trajectory in trajectories if not trajectory.failed]
        return collate(whole, self.pad_token_id), metrics

    def _scoring(
        self, session: RewardSession, requests: RequestBatch, demonstrations: RequestBatch | None = None
    ) -> Scoring:
        """Start scoring the trajectories of the requests, and the data's own answers."""
        everything = requests
        if demonstrations is not None:
            everything = requests + demonstrations
        scoring = Scoring(session, [row.row.get("raw_prompt") for row in everything.rows])
        if demonstrations is not None:
            for place, answer in enumerate(demonstration_outputs(demonstrations), len(requests)):
                scoring.ended(place, everything.trajectory(place, answer, self.tokenizer))
        return scoring

    def _trace(self, trajectories: Sequence[Trajectory], requests: RequestBatch, *, validate: bool) -> None:
        """Send traces of trajectories, in the order of their `requests`, where the run has traces; those of
        training are also noted for the page of the run.
        """
        for trajectory in trajectories:
            if not validate:
                timeline.add_trajectory(trajectory_id(trajectory), trajectory.spans)
        if self.traces is not None:
            self.traces.add(trajectories, requests.rows, validate=validate)

    def _group_rows(
        self, trajectories: Sequence[Trajectory], requests: RequestBatch, metrics: Metrics
    ) -> GroupRows:
        """Return the rows of all trajectories that have not failed, and count in `metrics` what they are."""
        self._trace(trajectories, requests, validate=False)
        failed = [trajectory for trajectory in trajectories if trajectory.failed]
        for trajectory in failed:
            metrics.add_sum(f"training/num_failed/{trajectory.outcome.cause}", 1.0)
        # failures of the reward function have been logged by its manager
        generation = [one for one in failed if one.outcome.cause not in ("environment", "deadline")]
        if generation:
            logger.warning(
                "%d of %d trajectories failed; the first: %s",
                len(generation),
                len(trajectories),
                generation[0].outcome.detail,
            )
        kept = self._whole_groups(trajectories, metrics)
        rows = collate(kept, self.pad_token_id)
        if len(rows):
            samples = torch.tensor([one.sample for one in kept for _ in one.lineages])
            rows = self._with_extra_rows_marked(rows, samples, metrics)
        return GroupRows(rows, metrics, [trajectory.outcome for trajectory in failed])

    def _whole_groups(self, trajectories: Sequence[Trajectory], metrics: Metrics) -> list[Trajectory]:
        """Leave out trajectories that have failed, and groups that are too small without them; put those of a
        group side by side.

        Where a greedy response has failed, its group has no baseline, and is left out.
        """
        greedy = greedy_sample(self.config)
        without_baseline = set()
        if BASELINES in self.needs:
            without_baseline = {one.group for one in trajectories if one.failed and one.sample == greedy}
        kept = [one for one in trajectories if not one.failed and one.group not in without_baseline]
        left = Counter(one.group for one in kept if one.sample < greedy)
        least = self.config.actor_rollout_ref.rollout.agent.min_group_size
        small = {group for group, size in left.items() if size < least}
        if small:
            metrics.add_sum("training/num_small_groups", len(small))
            kept = [one for one in kept if one.group not in small]
        return sorted(kept, key=lambda one: (one.group, one.sample))

    def _with_extra_rows_marked(self, batch: DataProto, samples: Tensor, metrics: Metrics) -> DataProto:
        """Shape the scores; make the greedy rows a column, and mark the answers of the data.

        `samples` [B] int64 is the number of each row's sample in its group.
        """
        greedy = greedy_sample(self.config)
        batch = shape_by_keys(batch, self.config)
        if "overlong_reward" in batch:
            penalties = torch.tensor(list(batch.non_tensor_batch["overlong_reward"]), dtype=torch.float64)
            first = ByTrajectory(batch).first_rows
            penalties = penalties[first][samples[first] < greedy]
            metrics.add_mean("training/overlong_reward/mean", penalties.sum(), len(penalties))
        if DEMONSTRATIONS in self.needs or self.config.distillation.lmbda < 1:
            batch |= DataProto.from_dict({DEMONSTRATIONS: samples == demonstration_sample(self.config)})
        if BASELINES in self.needs:
            batch = _baselines_as_column(batch, samples == greedy)
            baselines = ByTrajectory(batch).samples.batch[BASELINES]
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


def _baselines_as_column(batch: DataProto, greedy: Tensor) -> DataProto:
    """Return the rows that are not `greedy` [B] bool, each with the score of its prompt's greedy trajectory
    as `reward_baselines` [B] float32.
    """
    view = ByTrajectory(batch)
    scores = view.spread(view.samples.batch["token_level_scores"].sum(-1))
    uids = batch.non_tensor_batch["uid"]
    row_of = {uids[row]: row for row in greedy.nonzero().flatten().tolist()}
    baseline = torch.tensor([row_of[uid] for uid in uids])
    return (batch | DataProto.from_dict({BASELINES: scores[baseline]})).select_idxs(~greedy)
