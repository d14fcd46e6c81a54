"""Rollouts that are dumped once and read back in place of generation: `rollout.skip`.

    next(step) ──dump there?── yes ─► rows, and the place in the data after them
                       └────── no ──► SyncSource.next ─► dump

A dump belongs to the keys that decide what a rollout is (`rollout_digest`), not to those of learning. Rows
that are read back were sampled by the weights of the run that dumped them, so old log-probs are always
computed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from hybridflow.config import PPOConfig
from hybridflow.config.tree import flatten, to_tree
from hybridflow.errors import DataError
from hybridflow.observability.metrics import Metrics
from hybridflow.trainer.replay.kept_rows import KeptRows, KeptStep
from hybridflow.trainer.schedules.sync import SourceParts, SyncSource
from hybridflow.trainer.source import TrainBatch

FROM_DUMP = "training/rollouts_from_dump"
SOURCE = "source"
"""The entry of `meta_info` with the place in the data after the rows."""

DECIDING = (
    "data.",
    "reward.",
    "trainer.seed",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.tokenizer_path",
    "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.rollout.top_k",
    "actor_rollout_ref.rollout.top_p",
    "actor_rollout_ref.rollout.min_p",
    "actor_rollout_ref.rollout.repetition_penalty",
    "actor_rollout_ref.rollout.do_sample",
    "actor_rollout_ref.rollout.stop",
    "actor_rollout_ref.rollout.ignore_eos",
    "actor_rollout_ref.rollout.multi_turn.",
    "actor_rollout_ref.rollout.agent.",
    "algorithm.adv_estimator",
    "algorithm.filter_groups.",
    "algorithm.overlong_filtering",
    "distillation.lmbda",
)
"""Beginnings of the keys that decide what a rollout and its score are."""


def rollout_digest(config: PPOConfig) -> str:
    """Return 16 hexadecimal digits of the keys that decide the rollouts, and of the user's reward files."""
    keys = {path: value for path, value in flatten(to_tree(config)) if path.startswith(DECIDING)}
    digest = hashlib.sha256(json.dumps(keys, sort_keys=True, default=str).encode())
    terms = [term.get("name") for term in config.reward.terms]
    for path in (config.reward.custom_reward_function.path, config.reward.function, *terms):
        file = Path(str(path).partition(":")[0]).expanduser()
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


class DumpedSource(SyncSource):
    """A synchronous source that reads dumped rollouts where there are some."""

    def __init__(self, parts: SourceParts) -> None:
        """Raises DataError where there is nothing to repeat."""
        super().__init__(parts)
        config: PPOConfig = self.config
        skip = config.actor_rollout_ref.rollout.skip
        self.repeats = skip.action == "repeat"
        self.dumps = KeptRows(Path(skip.dump_dir).expanduser() / rollout_digest(config))
        if self.repeats and not self.dumps.steps():
            raise DataError(
                f"actor_rollout_ref.rollout.skip.action=repeat: {self.dumps.folder} has no rollouts of this "
                "model, data, sampling and reward; run with skip.action=cache first"
            )

    def next(self, step: int) -> TrainBatch:
        """Return the dumped batch of step number `step`, or make and dump it."""
        there = self.dumps.steps()
        if not self.repeats and step not in there:
            made = super().next(step)
            rows = made.rows.select()
            rows.meta_info[SOURCE] = self.place()
            mask = rows.batch["loss_mask"] if "loss_mask" in rows else None
            self.dumps.write(KeptStep(step, rows, made.epoch, tuple(rows.names()), mask))
            return made
        number = there[(step - 1) % len(there)] if self.repeats else step
        dump = self.dumps.read(number)
        rows = dump.given()
        state = rows.meta_info.pop(SOURCE)
        if not self.repeats:
            self.go_to(state)
        metrics = Metrics()
        metrics.add_last(FROM_DUMP, float(number))
        self.timer.reset()
        return TrainBatch(rows, dump.epoch, metrics, self.timer.as_metrics())
