"""The synchronous schedule: each batch is generated when it is asked for, with the newest weights.

loader ──prompts──► RolloutPipeline ──scored rows──► TrainBatch
   ▲                     ▲                └── dynamic sampling drops groups (DAPO)
   │      actor ──weights──► rollout                       │
   └── the next generation batch, until train_batch_size groups are there
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.agent.collate import collate
from hybridflow.config import PPOConfig
from hybridflow.data.loader import StatefulLoader
from hybridflow.data.prompts import PromptRow
from hybridflow.episodes.failures import Failures
from hybridflow.episodes.filters import filter_overlong, rows_of, uids_of, varied_groups
from hybridflow.episodes.pipeline import RolloutPipeline
from hybridflow.errors import CheckpointError, DataError
from hybridflow.observability.metrics import Metrics
from hybridflow.observability.progress import progress
from hybridflow.observability.timing import Timer
from hybridflow.protocol import DataProto
from hybridflow.protocol.joining import join_rows
from hybridflow.rollout.base import RolloutStats
from hybridflow.stop_token import stop_token
from hybridflow.trainer.ppo.columns import whole
from hybridflow.trainer.roles.roles import Roles
from hybridflow.trainer.schedules.collector import Collectors
from hybridflow.trainer.source import LoaderSource, TrainBatch

logger = logging.getLogger(__name__)

MAX_BARREN_BATCHES = 100
"""Generation batches in a row that give no group before a step gives up, also where `max_num_gen_batches`
sets no limit.
"""


@dataclass(frozen=True)
class SourceParts:
    """The parts of every source of training rows."""

    loader: StatefulLoader[PromptRow]
    pipeline: RolloutPipeline
    roles: Roles
    failures: Failures
    collectors: Collectors | None
    """These make the rows, where the run has some, else the pipeline does. Their rows have the columns that
    the driver computes with; the others are remote.
    """


class SyncSource(LoaderSource[PromptRow]):
    """Generates and scores a batch between two updates, in the trainer's thread.

    A group has an index, from 0 in the order in which groups are admitted: read from the loader to be
    generated. When a batch is made, every admitted group is trained, or filtered, or left out for good; so
    the number of admitted groups and the place of the loader are all that a resumed run needs.
    """

    kind = "sync"
    """How batches are made ahead of training; a run resumes from checkpoints of its own kind only."""

    def __init__(self, parts: SourceParts) -> None:
        super().__init__(parts.loader)
        self.pipeline = parts.pipeline
        self.config: PPOConfig = parts.pipeline.config
        self.roles = parts.roles
        self.failures = parts.failures
        self.collectors = parts.collectors
        self.timer = Timer(progress=progress)
        self.refill = True
        """Whether dynamic sampling replaces the groups that it drops."""
        self.num_admitted = 0
        self.version = 0
        """The version that was published last."""

    def admitted(self) -> Iterator[tuple[int, list[PromptRow]]]:
        """Yield generation batches: the index of the first group, and the prompts."""
        for prompts in self.batches():
            first = self.num_admitted
            self.num_admitted += len(prompts)
            yield first, prompts

    def next(self, step: int) -> TrainBatch:
        """Generate and score `rollout.n` responses to each of `data.train_batch_size` prompts, with the
        weights that were published last.

        Dynamic sampling takes generation batches as long as groups are missing, and leaves out those that are
        too many; without `refill` it takes prompts for one batch, and what it keeps of them is the batch.
        Raises DataError where `max_num_gen_batches` of them did not give enough groups that vary, or
        MAX_BARREN_BATCHES in a row none.
        """
        epoch = self.loader.epoch  # read first: with an epoch's last batch the loader moves on
        self.timer.reset()
        wanted = self.config.data.train_batch_size
        filters = self.config.algorithm.filter_groups
        batches = self.admitted()
        metrics = Metrics()
        stats = RolloutStats()
        parts: list[DataProto] = []
        kept = generated = taken = barren = 0
        while (kept if self.refill else generated) < wanted:
            stop_token.check()
            if filters.enable and (0 < filters.max_num_gen_batches == taken or barren == MAX_BARREN_BATCHES):
                raise DataError(self._starved(kept, generated, taken))
            first_group, prompts = next(batches)
            if self.collectors is not None:
                with self.timer("gen"):
                    made, counts = self.collectors.run_groups(first_group, prompts)
            else:
                made, counts = self.pipeline.run_groups(self.roles.rollout, first_group, prompts, self.timer)
            self.failures.add_all(made.failed)
            metrics.update(made.metrics)
            stats = RolloutStats.join([stats, counts], together=False)
            taken += 1
            generated += len(prompts)
            rows = made.rows
            if filters.enable:
                rows = varied_groups(rows, filters)
                found = len(uids_of(rows))
                barren = 0 if found else barren + 1
                kept += found
                logger.info("generation batch %d brings %d of %d groups", taken, kept, wanted)
            else:
                kept += len(prompts)
            parts.append(rows)
        batch = self.whole_batch(parts, metrics)
        metrics.add_sum("training/num_gen_batches", taken)
        if filters.enable:
            metrics.add_mean("training/filtered_groups_ratio", generated - kept, generated)
        metrics.update(stats.as_metrics())
        return TrainBatch(batch, epoch, metrics, self.timer.as_metrics())

    def whole_batch(self, groups: Sequence[DataProto], metrics: Metrics) -> DataProto:
        """Return the rows of the first `data.train_batch_size` groups as the batch of a step.

        It has no rows where every trajectory has failed. RolloutError ends the run where too many such
        batches come in a row.
        """
        pad = self.pipeline.pad_token_id
        groups = [rows for rows in groups if len(rows)] or [collate([], pad)]
        if len({bool(rows.remote) for rows in groups}) > 1:
            groups = [whole(rows) for rows in groups]  # some of them are of a checkpoint
        batch = join_rows(groups, pad)
        batch = rows_of(batch, uids_of(batch)[: self.config.data.train_batch_size])
        self.failures.end_step(len(batch))
        if self.config.algorithm.overlong_filtering:
            metrics.update(filter_overlong(batch))
        if self.collectors is not None and self.collectors.gives_whole_rows:
            return whole(batch)
        return batch

    def note_replayed(self, step: int, draws: Mapping[str, int]) -> None:
        """Note before step number `step` trains them how many trajectories of earlier groups it has drawn
        again, by `uid`. A source without a ledger has nowhere to note it.
        """

    def publish(self, version: int) -> None:
        """Push the actor's weights into every replica that has its own."""
        self.roles.rollout.update_from(self.roles.actor, version)
        self.roles.actor.version = version
        self.version = version
        super().publish(version)

    def idle_shares(self) -> dict[str, float]:
        """Return the bytes of weights that were pushed since the last call, where any were."""
        pushed = self.roles.rollout.pushed_bytes()
        return {"rollout/pushed_bytes": float(pushed)} if pushed else {}

    def place(self) -> dict[str, Any]:
        """Return the place of the loader, the number of admitted groups and the version, as plain data."""
        return {
            **super().place(),
            "kind": self.kind,
            "admitted": self.num_admitted,
            "version": self.version,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state`. CheckpointError where a run of another kind has saved it."""
        if state["kind"] != self.kind:
            raise CheckpointError(
                f"the checkpoint was saved by a run whose batches are of kind {state['kind']!r}, and this "
                f"run's are {self.kind!r}: groups that are ahead of training could be lost or trained "
                "twice. Set trainer.schedule to that of the checkpoint's run"
            )
        super().load_state_dict(state)
        self.version = int(state["version"])

    def go_to(self, place: dict[str, Any]) -> None:
        """Read the next row, of the next group, at a place that `place` has given."""
        super().go_to(place)
        self.num_admitted = int(place["admitted"])

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
