"""The batches of the synchronous schedule: prompts, generation with the current weights, scores.

prompts ──requests──► rollout ──each output──► Trajectory ──reward──► scored, or failed ──collate──► DataProto
   ▲                                                                                                   │
   └── the next generation batch, until train_batch_size groups ◄── dynamic sampling drops groups (DAPO)

A trajectory is scored while others are still generated. One that has failed is counted by its cause and is
never a row. `groups.py` says what the rows are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

from hybridflow.agent.agents import Agents
from hybridflow.agent.collate import collate
from hybridflow.agent.single_turn import RequestBatch, demonstration_outputs
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
from hybridflow.rollout.base import RolloutStats
from hybridflow.rollout.client import LLMClient
from hybridflow.trainer.ppo.collector import Collectors
from hybridflow.trainer.ppo.failures import Failures
from hybridflow.trainer.ppo.generation import validation_requests
from hybridflow.trainer.ppo.group_filter import groups_to_keep, metric_values, rows_of, uids_of
from hybridflow.trainer.ppo.groups import NO_REQUESTS, GroupMaker
from hybridflow.trainer.ppo.overlong import filter_overlong
from hybridflow.trainer.ppo.remote_columns import whole
from hybridflow.trainer.ppo.rollout_traces import RolloutTraces
from hybridflow.trainer.ppo.scoring import Scoring
from hybridflow.workers import RolloutGroup

logger = logging.getLogger(__name__)

MAX_BARREN_BATCHES = 100
"""Generation batches in a row that give no group before a step gives up, also where `max_num_gen_batches`
sets no limit.
"""


class Trajectories(GroupMaker):
    """Turns prompts into scored trajectories, for training and for validation.

    With `collectors` those for training are made in their processes, and rows have in this one the columns
    that the driver computes with; the others are remote.
    """

    def __init__(
        self,
        rollout: RolloutGroup,
        rewards: RewardManager,
        tokenizer: Tokenizer,
        config: PPOConfig,
        timer: Timer,
        agents: Agents,
        failures: Failures,
        collectors: Collectors | None = None,
        traces: RolloutTraces | None = None,
    ) -> None:
        super().__init__(rewards, tokenizer, config, agents, failures, traces)
        self.config = config
        self.failures = failures
        self.rollout = rollout
        self.timer = timer
        self.collectors = collectors

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
            requests, NO_REQUESTS, timers=("val_gen", "val_reward"), failures_count=False, held_out=True
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
        return collate(whole, self.pad_token_id), metrics

    def _training_rows(
        self, first_group: int, prompts: Sequence[PromptRow]
    ) -> tuple[DataProto, Metrics, RolloutStats]:
        """Sample and score one generation batch, whose groups are numbered from `first_group`."""
        if self.collectors is not None:
            with self.timer("gen"):
                return self._collected_rows(self.collectors, first_group, prompts)
        requests, demonstrations = self.planned(first_group, prompts)
        trajectories, metrics, stats = self._make(
            requests, demonstrations, timers=("gen", "reward"), failures_count=True
        )
        return self.rows(trajectories, metrics), metrics, stats

    def _collected_rows(
        self, collectors: Collectors, first_group: int, prompts: Sequence[PromptRow]
    ) -> tuple[DataProto, Metrics, RolloutStats]:
        """Have the groups of one generation batch played by collectors."""

        async def play_all(client: LLMClient) -> list[tuple[DataProto, Metrics]]:
            numbered = enumerate(prompts, first_group)
            return await asyncio.gather(
                *(collectors.play(index, prompt, client, timed=False) for index, prompt in numbered)
            )

        played, stats = self.rollout.run(play_all)
        rows = join_rows([rows for rows, _ in played], self.pad_token_id)
        return rows, Metrics.merge(metrics for _, metrics in played), stats

    async def play_group(
        self, index: int, prompt: PromptRow, client: LLMClient, numbers: Iterator[int], *, timed: bool = True
    ) -> tuple[DataProto, Metrics]:
        """Sample and score the group of this index, as `GroupMaker` does; with collectors, in one of them."""
        if self.collectors is not None:
            return await self.collectors.play(index, prompt, client, timed=timed)
        return await super().play_group(index, prompt, client, numbers, timed=timed)

    def whole_batch(self, groups: Sequence[DataProto], metrics: Metrics) -> DataProto:
        """Return the rows of the first `data.train_batch_size` groups as the batch of a step.

        RolloutError ends the run where too many batches in a row have no rows.
        """
        groups = [rows for rows in groups if len(rows)] or [collate([], self.pad_token_id)]
        if len({bool(rows.remote) for rows in groups}) > 1:
            groups = [whole(rows) for rows in groups]  # some of them are of a checkpoint
        batch = join_rows(groups, self.pad_token_id)
        batch = rows_of(batch, uids_of(batch)[: self.config.data.train_batch_size])
        self.failures.end_step(len(batch))
        if self.config.algorithm.overlong_filtering:
            metrics.update(filter_overlong(batch))
        if self.collectors is not None and self.collectors.gives_whole_rows:
            return whole(batch)
        return batch

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
                found, stats = self.generation.run(self.rollout, requests, scoring.add, held_out=held_out)
            with self.timer(timers[1]):
                trajectories, metrics = scoring.result(failures_count=failures_count)
            self.trace(trajectories, everything, validate=held_out)
            metrics.update(found)
            return trajectories, metrics, stats

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
