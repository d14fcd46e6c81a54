"""The batches of the synchronous schedule: prompts, generation with the current weights, scores.

prompts ──requests──► rollout ──outputs──► collate ──► DataProto ──score──► DataProto with token_level_scores
   ▲                                                                            │
   └── the next generation batch, until train_batch_size groups ◄── dynamic sampling drops groups (DAPO)

With an estimator that names `reward_baselines` (ReMax), each prompt has a greedy response more in the same
rollout and score calls; its score becomes the column, the row goes. With one that names `is_demonstration`
(SPIN), each group has the data's own answer as a row more; the reward function scores it like the others, and
dynamic sampling does not look at it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hybridflow.agent import RequestBatch, build_requests, collate, demonstration_outputs, one_more_each
from hybridflow.agent.collate import ROWS_PER_STEP
from hybridflow.config import PPOConfig
from hybridflow.data.prompts import PromptRow
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import DataError
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.timing import Timer
from hybridflow.protocol import DataProto
from hybridflow.protocol.joining import join_rows
from hybridflow.rewards.manager import RewardManager
from hybridflow.rollout.base import RolloutStats, SamplingParams
from hybridflow.trainer.ppo.columns import find_estimator
from hybridflow.trainer.ppo.group_filter import groups_to_keep, metric_values, rows_of, uids_of
from hybridflow.trainer.ppo.overlong import filter_overlong, shape_overlong
from hybridflow.trainer.ppo.scoring import Scored, score
from hybridflow.workers import RolloutGroup

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
    ) -> None:
        self.rollout = rollout
        self.rewards = rewards
        self.tokenizer = tokenizer
        self.config = config
        self.timer = timer
        needs = find_estimator(config.algorithm).needs
        self.with_baselines = "reward_baselines" in needs
        self.with_demonstrations = "is_demonstration" in needs

    def for_training(
        self, prompts: Iterator[tuple[int, Sequence[PromptRow]]], step: int
    ) -> tuple[DataProto, Metrics]:
        """Sample `rollout.n` responses to each of `data.train_batch_size` prompts with the weights of step
        `step - 1`, and score them.

        `prompts` gives generation batches: the index of the first group, and the prompts. A group's draws
        depend on its index alone, and on no step.

        Dynamic sampling takes generation batches from `prompts` as long as groups are missing, and leaves out
        those that are too many. Raises DataError where `max_num_gen_batches` of them did not give enough
        groups that vary, or MAX_BARREN_BATCHES in a row none.
        """
        wanted = self.config.data.train_batch_size
        filters = self.config.algorithm.filter_groups
        metrics = Metrics()
        stats = RolloutStats()
        parts: list[DataProto] = []
        kept = generated = batches = barren = 0
        while kept < wanted:
            if filters.enable and (
                0 < filters.max_num_gen_batches == batches or barren == MAX_BARREN_BATCHES
            ):
                raise DataError(self._starved(kept, generated, batches))
            first_group, batch_prompts = next(prompts)
            rows, found = self._training_rows(first_group, batch_prompts, step)
            metrics.update(found)
            stats = RolloutStats.join([stats, self.rollout.stats()], together=False)
            batches += 1
            generated += len(batch_prompts)
            if filters.enable:
                rows = self._filtered(rows)
                barren += 1
                if len(rows):
                    barren = 0
                logger.info(
                    "step %d: generation batch %d brings %d of %d groups",
                    step,
                    batches,
                    kept + len(uids_of(rows)),
                    wanted,
                )
                kept += len(uids_of(rows))
            else:
                kept += len(batch_prompts)
            parts.append(rows)
        batch = join_rows(parts, int(self.tokenizer.pad_token_id))
        batch = rows_of(batch, uids_of(batch)[:wanted])
        metrics.add_sum("training/num_gen_batches", batches)
        if filters.enable:
            metrics.add_mean("training/filtered_groups_ratio", generated - kept, generated)
        if self.config.algorithm.overlong_filtering:
            metrics.update(filter_overlong(batch))
        metrics.update(stats.as_metrics())
        return batch, metrics

    def for_validation(
        self, prompts: Sequence[PromptRow], step: int, first_row: int = 0
    ) -> tuple[DataProto, Metrics]:
        """Sample `val_kwargs.n` responses to each prompt with the weights of step `step` and score them; rows
        are numbered from `first_row`.

        Scores are the reward's own: no overlong shaping, and a row whose reward failed stays with 0.
        """
        rollout = self.config.actor_rollout_ref.rollout
        val = rollout.val_kwargs
        greedy = not val.do_sample or val.temperature == 0.0
        sampling = SamplingParams(
            max_tokens=self.config.data.max_response_length,
            temperature=1.0 if greedy else val.temperature,
            top_k=val.top_k,
            top_p=val.top_p,
            min_p=val.min_p,
            repetition_penalty=val.repetition_penalty,
            greedy=greedy,
            stop=tuple(rollout.stop),
            stop_token_ids=tuple(rollout.stop_token_ids),
            ignore_eos=rollout.ignore_eos,
        )
        seed = self.config.trainer.seed
        requests = build_requests(
            prompts, sampling, n=val.n, seed=seed, purpose="validation", step=step, first_row=first_row
        )
        nothing = RequestBatch([], [], [])
        # a step's own leave validation out
        scored = self._make(requests, nothing, step, version=step, timers=("val_gen", "val_reward"))
        return scored.batch, scored.metrics

    def _training_rows(
        self, first_group: int, prompts: Sequence[PromptRow], step: int
    ) -> tuple[DataProto, Metrics]:
        """Sample and score one generation batch, whose groups are numbered from `first_group`."""
        rollout = self.config.actor_rollout_ref.rollout
        sampling = SamplingParams(
            max_tokens=self.config.data.max_response_length,
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            min_p=rollout.min_p,
            repetition_penalty=rollout.repetition_penalty,
            greedy=not rollout.do_sample,
            stop=tuple(rollout.stop),
            stop_token_ids=tuple(rollout.stop_token_ids),
            ignore_eos=rollout.ignore_eos,
        )
        period = self.config.data.train_batch_size
        groups = range(first_group, first_group + len(prompts))
        sampled = self._requests(first_group, prompts, sampling)
        sampled = _with_ids(sampled, row_ids(groups, period, rollout.n))
        requests = sampled
        demonstrations = RequestBatch([], [], [])
        before = period * rollout.n  # in a period, rows of these kinds come after those that are sampled
        if self.with_baselines:
            greedy = one_more_each(sampled, replace(sampling, greedy=True), first_row=0)
            requests = sampled + _with_ids(greedy, row_ids(groups, period, 1, before))
            before += period
        if self.with_demonstrations:
            told = one_more_each(sampled, sampling, first_row=0)
            demonstrations = _with_ids(told, row_ids(groups, period, 1, before))
        # 0: the ids of the requests are those of the rows already
        scored = self._make(requests, demonstrations, 0, version=step - 1, timers=("gen", "reward"))
        batch = scored.batch
        dropped = scored.dropped
        metrics = scored.metrics
        place = torch.arange(len(batch))
        batch = self._shaped(batch, place < len(sampled), metrics)
        if self.with_demonstrations:
            batch |= DataProto.from_dict({"is_demonstration": place >= len(requests)})
        if self.with_baselines:
            batch, dropped = _baselines_as_column(
                batch, dropped, (place >= len(sampled)) & (place < len(requests))
            )
            metrics.add_mean(
                "training/reward_baseline/mean", batch.batch["reward_baselines"].sum(), len(batch)
            )
        if self.config.algorithm.filter_groups.enable:
            generated = ~dropped
            if self.with_demonstrations:
                generated &= ~batch.batch["is_demonstration"]
            metrics.add_mean(
                "training/unfiltered_score/mean",
                batch.batch["token_level_scores"][generated].sum(),
                int(generated.sum()),
            )
        return self._without(batch, dropped), metrics

    def _requests(
        self, first_group: int, prompts: Sequence[PromptRow], sampling: SamplingParams
    ) -> RequestBatch:
        """Make `rollout.n` requests for each prompt, with the uids and seeds of their groups.

        With P = `data.train_batch_size`, group i has those of row (i % P)·n of step i // P + 1: those of the
        step that trains it, where every group is trained.
        """
        period = self.config.data.train_batch_size
        n = self.config.actor_rollout_ref.rollout.n
        batch = RequestBatch([], [], [])
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
        return batch

    def _make(
        self,
        requests: RequestBatch,
        demonstrations: RequestBatch,
        step: int,
        *,
        version: int,
        timers: tuple[str, str],
    ) -> Scored:
        """Return responses to `requests`, then the answers of the data to `demonstrations`, as scored rows in
        this order.
        """
        with self.timer(timers[0]):
            outputs = self.rollout.generate(requests.requests, policy_version=version)
        outputs = [*outputs, *demonstration_outputs(demonstrations)]
        batch = collate(requests + demonstrations, outputs, self.tokenizer, step=step)
        with self.timer(timers[1]):
            return score(batch, self.rewards)

    def _shaped(self, batch: DataProto, sampled: Tensor, metrics: Metrics) -> DataProto:
        """Shape overlong rewards where `reward.reward_kwargs` asks for it."""
        limits = self.config.reward.reward_kwargs
        buffer = limits.overlong_buffer_cfg
        max_len = limits.max_resp_len or self.config.data.max_response_length
        if not buffer.enable:
            return batch
        assert buffer.len is not None, "filled by resolve"
        batch = shape_overlong(batch, max_len=max_len, buffer_len=buffer.len, factor=buffer.penalty_factor)
        penalties = torch.tensor(list(batch.non_tensor_batch["overlong_reward"]), dtype=torch.float64)[
            sampled
        ]
        metrics.add_mean("training/overlong_reward/mean", penalties.sum(), len(penalties))
        return batch

    def _without(self, batch: DataProto, dropped: Tensor) -> DataProto:
        """Leave out the rows whose reward failed, so that no statistic sees them, and put the rows of a group
        side by side.

        Where every row failed and no further generation batch follows, the rows stay and nothing is learned
        from them.
        """
        if bool(dropped.all()) and not self.config.algorithm.filter_groups.enable:
            return batch.narrow_loss_mask(torch.zeros_like(batch.batch["loss_mask"]))
        uids: list[str] = list(batch.non_tensor_batch["uid"])
        numbers = {uid: number for number, uid in enumerate(uids_of(batch))}
        return batch.select_idxs(
            sorted((~dropped).nonzero().flatten().tolist(), key=lambda row: numbers[uids[row]])
        )

    def _filtered(self, rows: DataProto) -> DataProto:
        """Return the groups that `algorithm.filter_groups` keeps."""
        filters = self.config.algorithm.filter_groups
        if not len(rows):
            return rows
        values = metric_values(rows, filters.metric)
        return rows_of(
            rows,
            groups_to_keep(
                list(rows.non_tensor_batch["uid"]),
                values,
                min_mean=filters.min_mean,
                max_mean=filters.max_mean,
            ),
        )

    def _starved(self, kept: int, generated: int, batches: int) -> str:
        data = self.config.data
        filters = self.config.algorithm.filter_groups
        bounds = (("≥", filters.min_mean), ("≤", filters.max_mean))
        means = "".join(f", mean {sign} {value}" for sign, value in bounds if value is not None)
        limit = f"algorithm.filter_groups.max_num_gen_batches={filters.max_num_gen_batches} allows no more"
        if batches != filters.max_num_gen_batches:
            limit = f"the last {MAX_BARREN_BATCHES} of them gave none"
        return (
            f"dynamic sampling wanted data.train_batch_size={data.train_batch_size} groups whose "
            f"{filters.metric} varies{means}, and kept "
            f"{kept} of the {generated} that {batches} generation batches gave: {limit}. Raise "
            "max_num_gen_batches (0: no limit), "
            "data.gen_batch_size or actor_rollout_ref.rollout.n, or use prompts that the model gets right "
            "now and then"
        )


def row_ids(groups: Sequence[int], period: int, count: int, before: int = 0) -> list[int]:
    """Return `count` row ids for each of `groups`, unique in a run and ascending with the group.

    Every `period` groups begin a block of ROWS_PER_STEP ids, the first `before` of which belong to others.
    """
    return [
        (group // period + 1) * ROWS_PER_STEP + before + (group % period) * count + row
        for group in groups
        for row in range(count)
    ]


def _with_ids(batch: RequestBatch, ids: Sequence[int]) -> RequestBatch:
    """Return the requests with these ids, which are unique in a run."""
    requests = [
        replace(request, request_id=row_id) for request, row_id in zip(batch.requests, ids, strict=True)
    ]
    return RequestBatch(requests, batch.rows, batch.uids)


def _baselines_as_column(batch: DataProto, dropped: Tensor, greedy: Tensor) -> tuple[DataProto, Tensor]:
    """Return the rows that are not `greedy` [B] bool, each with the score of its prompt's greedy row as
    `reward_baselines` [B] float32.

    Rows whose baseline has no score are dropped, too.
    """
    uids = batch.non_tensor_batch["uid"]
    row_of = {uids[row]: row for row in greedy.nonzero().flatten().tolist()}
    baseline = torch.tensor([row_of[uid] for uid in uids])
    batch |= DataProto.from_dict({"reward_baselines": batch.batch["token_level_scores"].sum(-1)[baseline]})
    return batch.select_idxs(~greedy), (dropped | dropped[baseline])[~greedy]
