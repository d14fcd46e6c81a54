"""The batches of the synchronous schedule: prompts, generation with the current weights, scores.

prompts ──requests──► rollout ──each output──► Trajectory ──reward──► scored, or failed ──collate──► DataProto
   ▲                                                                                                   │
   └── the next generation batch, until train_batch_size groups ◄── dynamic sampling drops groups (DAPO)

A trajectory is scored while others are still generated. One that has failed is counted by its cause and is
never a row.

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

import torch
from torch import Tensor

from hybridflow.agent.agents import Agents
from hybridflow.agent.collate import collate
from hybridflow.agent.single_turn import RequestBatch, build_requests, demonstration_outputs, one_more_each
from hybridflow.config import PPOConfig
from hybridflow.data.prompts import PromptRow
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import DataError, RolloutError
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.timing import Timer
from hybridflow.protocol import DataProto
from hybridflow.protocol.by_trajectory import ByTrajectory
from hybridflow.protocol.joining import join_rows
from hybridflow.protocol.trajectory import Trajectory
from hybridflow.rewards.manager import RewardManager
from hybridflow.rollout.base import RolloutStats, SamplingParams
from hybridflow.rollout.client import LLMClient
from hybridflow.trainer.ppo.columns import find_estimator
from hybridflow.trainer.ppo.failures import Failures
from hybridflow.trainer.ppo.generation import Generation, sampling_of, validation_requests
from hybridflow.trainer.ppo.group_filter import groups_to_keep, metric_values, rows_of, uids_of
from hybridflow.trainer.ppo.overlong import filter_overlong, shape_overlong
from hybridflow.trainer.ppo.scoring import Scoring
from hybridflow.workers import RolloutGroup
from hybridflow.workers.correction import sampled_rows

logger = logging.getLogger(__name__)

MAX_BARREN_BATCHES = 100
"""Generation batches in a row that give no group before a step gives up, also where `max_num_gen_batches`
sets no limit.
"""


class Trajectories:
    """Turns prompts into scored trajectories, for training and for validation."""

    def __init__(
        self,
        rollout: RolloutGroup,
        rewards: RewardManager,
        tokenizer: Tokenizer,
        config: PPOConfig,
        timer: Timer,
        agents: Agents,
        failures: Failures,
    ) -> None:
        self.agents = agents
        self.failures = failures
        self.rollout = rollout
        self.generation = Generation(rollout, tokenizer, config, agents)
        self.rewards = rewards
        self.tokenizer = tokenizer
        self.config = config
        self.timer = timer
        needs = find_estimator(config.algorithm).needs
        self.with_baselines = "reward_baselines" in needs
        self.with_demonstrations = "is_demonstration" in needs

    def for_training(
        self, batches: Iterator[tuple[int, Sequence[PromptRow]]], *, refill: bool = True
    ) -> tuple[DataProto, Metrics]:
        """Sample `rollout.n` responses to each of `data.train_batch_size` prompts with the weights that were
        published last, and score them.

        `batches` gives generation batches: the index of the first group, and the prompts. A group's draws
        depend on its index alone, and on no step.

        Dynamic sampling takes generation batches as long as groups are missing, and leaves out those that are
        too many; without `refill` it takes prompts for one batch, and what it keeps of them is the batch.
        Raises DataError where `max_num_gen_batches` of them did not give enough groups that vary, or
        MAX_BARREN_BATCHES in a row none.

        The batch has no rows where every trajectory has failed. RolloutError ends the run where too many
        such steps come in a row.
        """
        wanted = self.config.data.train_batch_size
        filters = self.config.algorithm.filter_groups
        metrics = Metrics()
        stats = RolloutStats()
        parts: list[DataProto] = []
        kept = generated = taken = barren = 0
        while (kept if refill else generated) < wanted:
            if filters.enable and (0 < filters.max_num_gen_batches == taken or barren == MAX_BARREN_BATCHES):
                raise DataError(self._starved(kept, generated, taken))
            first_group, prompts = next(batches)
            rows, found, counts = self._training_rows(first_group, prompts)
            metrics.update(found)
            stats = RolloutStats.join([stats, counts], together=False)
            taken += 1
            generated += len(prompts)
            if filters.enable:
                rows = self.filtered(rows)
                barren += 1
                if len(rows):
                    barren = 0
                logger.info(
                    "generation batch %d brings %d of %d groups", taken, kept + len(uids_of(rows)), wanted
                )
                kept += len(uids_of(rows))
            else:
                kept += len(prompts)
            parts.append(rows)
        batch = self.whole_batch(parts, metrics)
        metrics.add_sum("training/num_gen_batches", taken)
        if filters.enable:
            metrics.add_mean("training/filtered_groups_ratio", generated - kept, generated)
        metrics.update(stats.as_metrics())
        return batch, metrics

    def for_validation(
        self, prompts: Sequence[PromptRow], step: int, first_row: int = 0
    ) -> tuple[DataProto, Metrics]:
        """Sample `val_kwargs.n` responses to each prompt with the weights of step `step` and score them; rows
        are numbered from `first_row`.

        Scores are the reward's own: no overlong shaping, and a row whose reward failed stays with 0. Raises
        RolloutError where a response could not be generated.
        """
        requests = validation_requests(self.config, prompts, step, first_row)
        trajectories, metrics, _ = self._make(
            requests, _NO_REQUESTS, timers=("val_gen", "val_reward"), failures_count=False, held_out=True
        )
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
        return collate(whole, self._pad_token_id), metrics

    def _training_rows(
        self, first_group: int, prompts: Sequence[PromptRow]
    ) -> tuple[DataProto, Metrics, RolloutStats]:
        """Sample and score one generation batch, whose groups are numbered from `first_group`."""
        requests, demonstrations = self._planned(first_group, prompts)
        trajectories, metrics, stats = self._make(
            requests, demonstrations, timers=("gen", "reward"), failures_count=True
        )
        return self._rows(trajectories, metrics), metrics, stats

    async def play_group(
        self, index: int, prompt: PromptRow, client: LLMClient, numbers: Iterator[int]
    ) -> tuple[DataProto, Metrics]:
        """Sample and score the group of this index by `client`, beside others, in its event loop.

        `numbers` are those of requests. The group has no rows where all of its trajectories have failed. The
        event loop is not held up while rewards are computed.
        """
        requests, demonstrations = self._planned(index, [prompt])
        everything = requests + demonstrations
        with self.rewards.open() as session:
            scoring = Scoring(session, [row.row.get("raw_prompt") for row in everything.rows])
            for place, answer in enumerate(demonstration_outputs(demonstrations), len(requests)):
                scoring.add(place, everything.trajectory(place, answer, self.tokenizer))
            found = await self.generation.play(requests, scoring.add, client, numbers)
            trajectories, metrics = await asyncio.to_thread(scoring.result)
        metrics.update(found)
        return self._rows(trajectories, metrics), metrics

    def whole_batch(self, groups: Sequence[DataProto], metrics: Metrics) -> DataProto:
        """Return the rows of the first `data.train_batch_size` groups as the batch of a step.

        RolloutError ends the run where too many batches in a row have no rows.
        """
        batch = join_rows(groups, self._pad_token_id)
        batch = rows_of(batch, uids_of(batch)[: self.config.data.train_batch_size])
        self.failures.end_step(len(batch))
        if self.config.algorithm.overlong_filtering:
            metrics.update(filter_overlong(batch))
        return batch

    def _planned(self, first_group: int, prompts: Sequence[PromptRow]) -> tuple[RequestBatch, RequestBatch]:
        """Return the requests of groups that are numbered from `first_group`, and the rows whose answers are
        the data's own.
        """
        rollout = self.config.actor_rollout_ref.rollout
        sampling = replace(sampling_of(self.config, rollout), greedy=not rollout.do_sample)
        sampled = self._requests(first_group, prompts, sampling)
        requests = sampled
        demonstrations = _NO_REQUESTS
        if self.with_baselines:
            requests = sampled + one_more_each(
                sampled, replace(sampling, greedy=True), first_row=len(sampled), sample=self._greedy_sample
            )
        if self.with_demonstrations:
            demonstrations = one_more_each(
                sampled, sampling, first_row=len(requests), sample=self._demonstration_sample
            )
        return requests, demonstrations

    def _rows(self, trajectories: Sequence[Trajectory], metrics: Metrics) -> DataProto:
        """Return the rows of all trajectories that have not failed, and count in `metrics` what they are."""
        trajectories = self._without_failed(trajectories, metrics)
        batch = collate(trajectories, self._pad_token_id)
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
        batch = _NO_REQUESTS
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

    def _make(
        self,
        requests: RequestBatch,
        demonstrations: RequestBatch,
        *,
        timers: tuple[str, str],
        failures_count: bool,
        held_out: bool = False,
    ) -> tuple[list[Trajectory], Metrics, RolloutStats]:
        """Return trajectories of `requests`, then the answers of the data to `demonstrations`, scored, in
        this order, with metrics of the reward and of agents, and counts of the generation. `failures_count`
        is explained at `Scoring.result`; the environments of `held_out` requests are the same at every step.
        """
        everything = requests + demonstrations
        with self.rewards.open() as session:
            scoring = Scoring(session, [row.row.get("raw_prompt") for row in everything.rows])
            with self.timer(timers[0]):
                for place, answer in enumerate(demonstration_outputs(demonstrations), len(requests)):
                    scoring.add(place, everything.trajectory(place, answer, self.tokenizer))
                found, stats = self.generation.run(requests, scoring.add, held_out=held_out)
            with self.timer(timers[1]):
                trajectories, metrics = scoring.result(failures_count=failures_count)
            metrics.update(found)
            return trajectories, metrics, stats

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
            self.failures.add(trajectory)
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

    @property
    def _pad_token_id(self) -> int:
        return int(self.tokenizer.pad_token_id)

    def filtered(self, rows: DataProto) -> DataProto:
        """Return the groups that `algorithm.filter_groups` keeps."""
        filters = self.config.algorithm.filter_groups
        if not len(rows):
            return rows
        samples = ByTrajectory(rows).samples
        uids = list(samples.non_tensor_batch["uid"])
        values = metric_values(samples, filters.metric)
        kept = groups_to_keep(uids, values, min_mean=filters.min_mean, max_mean=filters.max_mean)
        return rows_of(rows, kept)

    def _starved(self, kept: int, generated: int, batches: int) -> str:
        data = self.config.data
        filters = self.config.algorithm.filter_groups
        bounds = (("≥", filters.min_mean), ("≤", filters.max_mean))
        means = "".join(f", mean {sign} {value}" for sign, value in bounds if value is not None)
        limit = f"algorithm.filter_groups.max_num_gen_batches={filters.max_num_gen_batches} allows no more"
        if batches != filters.max_num_gen_batches:
            limit = f"the last {MAX_BARREN_BATCHES} of them gave none"
        if self.failures.counts:
            limit += f"; some trajectories have failed ({self.failures})"
        return (
            f"dynamic sampling wanted data.train_batch_size={data.train_batch_size} groups whose "
            f"{filters.metric} varies{means}, and kept {kept} of the {generated} that {batches} generation "
            f"batches gave: {limit}. Raise max_num_gen_batches (0: no limit), data.gen_batch_size or "
            "actor_rollout_ref.rollout.n, or use prompts that the model gets right now and then"
        )


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


_NO_REQUESTS = RequestBatch([], [], [], [])
