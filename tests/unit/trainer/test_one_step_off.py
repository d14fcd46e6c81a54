"""The shape holds for another schedule: a source whose batches are one version behind, under the same loop.

    next(step): hand out the batch that is ready, made before the last update ─► make the next one at once

In this process the actor's own module generates, so the next batch is whole before the update begins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_trainer import actor_module, build, ppo_config, tiny_model

from hybridflow.protocol import DataProto
from hybridflow.trainer.ppo.build import PPOTrainer
from hybridflow.trainer.ppo.sync import SyncSource
from hybridflow.trainer.source import TrainBatch

STEPS = 4
KEYS = (
    "algorithm.adv_estimator=grpo",
    "algorithm.rollout_correction.bypass_mode=true",
    "actor_rollout_ref.rollout.exact=false",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "trainer.test_freq=2",
)


class OneStepOff(SyncSource):
    """Batch number s is made with the weights of version max(0, s - 2)."""

    def __init__(self, sync: SyncSource, total_steps: int) -> None:
        super().__init__(sync.loader, sync.trajectories, sync.roles, sync.timer)
        self.num_admitted = sync.num_admitted
        self.total_steps = total_steps
        self.ready: TrainBatch | None = None

    def next(self, step: int) -> TrainBatch:
        """Return the batch of step number `step`, after the one of the next step is made."""
        batch = self.ready or super().next(step)
        self.ready = super().next(step) if step < self.total_steps else None
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The rows that are ready are part of it: a resumed run has not the weights that made them."""
        state = super().state_dict()
        if self.ready is not None:
            rows = self.ready.rows
            columns = {name: list(column) for name, column in rows.non_tensor_batch.items()}
            state["ready"] = {"tensors": dict(rows.batch.items()), "columns": columns}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        ready = state.get("ready")
        if ready is not None:
            rows = DataProto.from_dict(ready["tensors"], ready["columns"])
            self.ready = TrainBatch(rows, self.loader.epoch)


Rows = dict[int, tuple[list[int], list[float], int]]


def rows_of(batch: DataProto) -> Rows:
    """By row id: sampled tokens, their log-probs, and the one version of their weights."""
    found = {}
    for row in range(len(batch)):
        mask = batch.batch["response_mask"][row]
        (version,) = set(batch.batch["policy_version"][row][mask].tolist())
        tokens = batch.batch["responses"][row][mask].tolist()
        log_probs = batch.batch["rollout_log_probs"][row][mask].tolist()
        found[int(batch.batch["row_id"][row])] = (tokens, log_probs, version)
    return found


def train(model: Path, run: Path, seen: dict[int, Rows], last: int = STEPS) -> dict[str, torch.Tensor]:
    """Train one step off up to step `last`, from the newest checkpoint; return the weights."""
    run.parent.mkdir(exist_ok=True)
    with build(ppo_config(model, run, *KEYS)) as trainer:
        trainer.source = trainer.state.source = OneStepOff(trainer.source, trainer.total_steps)
        trainer.state.resume(trainer.store, "auto", None)
        trainer.log_samples = lambda batch, values, step: seen.update({step: rows_of(batch)}) or {}
        trainer.fit(lambda step, logged: step == last)
        return weights_of(trainer)


def weights_of(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in actor_module(trainer).named_parameters()}


def train_serially(model: Path, run: Path, seen: dict[int, Rows]) -> dict[str, torch.Tensor]:
    """The same by a plain loop, which writes out which weights make which batch."""
    run.parent.mkdir(exist_ok=True)
    with build(ppo_config(model, run, *KEYS)) as trainer:
        sync = trainer.source
        sync.publish(0)
        batches = {1: sync.next(1).rows, 2: sync.next(1).rows}  # of version 0
        for step in range(1, STEPS + 1):
            seen[step] = rows_of(batches[step])
            trainer.step(batches[step], step)
            sync.publish(step)
            if step + 2 <= STEPS:
                batches[step + 2] = sync.next(step + 1).rows  # of version `step`
        return weights_of(trainer)


def test_one_step_off_gives_the_batches_of_a_serial_loop_also_after_a_resume(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    serial: dict[int, Rows] = {}
    whole: dict[int, Rows] = {}
    stopped: dict[int, Rows] = {}
    wanted = train_serially(model, tmp_path / "a" / "run", serial)
    weights = train(model, tmp_path / "b" / "run", whole)
    assert whole == serial
    assert [{version for _, _, version in rows.values()} for rows in serial.values()] == [{0}, {0}, {1}, {2}]
    train(model, tmp_path / "c" / "run", stopped, last=2)
    resumed = train(model, tmp_path / "c" / "run", stopped)
    assert stopped == serial
    for name, value in wanted.items():
        assert torch.equal(weights[name], value) and torch.equal(resumed[name], value), name
