"""The exact schedules give the run of a plain loop that does one thing after the other, to the bit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainer import actor_module, build, metrics_of, ppo_config

from hybridflow.errors import CheckpointError, Stopped
from hybridflow.protocol import DataProto
from hybridflow.trainer.ppo.build import PPOTrainer
from hybridflow.trainer.schedules.ledger import LEDGER_FILE, Ledger

STEPS = 4
KEYS = (
    "algorithm.adv_estimator=grpo",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "trainer.test_freq=2",
)
ONE_STEP_OFF = ("trainer.schedule=one_step_off",)
TWO_STEPS_AHEAD = ("trainer.schedule=exact_async", "trainer.async.run_ahead=2")
BYPASS = ("algorithm.rollout_correction.bypass_mode=true", "actor_rollout_ref.rollout.exact=false")
DECOUPLED = ("algorithm.rollout_correction.rollout_is=token",)

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


def weights_of(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in actor_module(trainer).named_parameters()}


def train(
    model: Path, run: Path, *keys: str, seen: dict[int, Rows] | None = None, last: int = STEPS
) -> dict[str, torch.Tensor]:
    """Train up to step `last`, from the newest checkpoint; return the weights."""
    run.parent.mkdir(exist_ok=True)
    with build(ppo_config(model, run, *KEYS, *keys)) as trainer:
        if seen is not None:
            trainer.log_samples = lambda batch, values, step: seen.update({step: rows_of(batch)}) or {}
        trainer.fit(lambda step, logged: step == last)
        return weights_of(trainer)


def train_serially(
    model: Path, run: Path, *keys: str, ahead: int, seen: dict[int, Rows] | None = None
) -> dict[str, torch.Tensor]:
    """The same by a plain loop, which writes out which weights make which batch."""
    run.parent.mkdir(exist_ok=True)
    with build(ppo_config(model, run, *KEYS, *keys)) as trainer:
        source = trainer.source
        batches = []
        for step in range(STEPS):
            source.publish(step)
            while len(batches) < min(STEPS, step + ahead + 1):
                batches.append(source.next(step + 1).rows)  # with the weights of version `step`
            if seen is not None:
                seen[step + 1] = rows_of(batches[step])
            trainer.step(batches[step], step + 1)
        return weights_of(trainer)


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("ahead", "schedule", "correction"),
    [
        pytest.param(1, ONE_STEP_OFF, BYPASS, id="one_step_off-bypass"),
        pytest.param(1, ONE_STEP_OFF, DECOUPLED, id="one_step_off-decoupled", marks=pytest.mark.slow),
        pytest.param(2, TWO_STEPS_AHEAD, BYPASS, id="two_ahead-bypass", marks=pytest.mark.slow),
        pytest.param(2, TWO_STEPS_AHEAD, DECOUPLED, id="two_ahead-decoupled"),
    ],
)
def test_the_run_is_that_of_a_serial_loop_also_after_a_resume(
    model: Path, tmp_path: Path, ahead: int, schedule: tuple[str, ...], correction: tuple[str, ...]
) -> None:
    schedule = (*schedule, *correction)
    serial: dict[int, Rows] = {}
    whole: dict[int, Rows] = {}
    stopped: dict[int, Rows] = {}
    wanted = train_serially(model, tmp_path / "a" / "run", *correction, ahead=ahead, seen=serial)
    assert_equal(train(model, tmp_path / "b" / "run", *schedule, seen=whole), wanted)
    assert whole == serial
    versions = [{version for _, _, version in rows.values()} for rows in serial.values()]
    assert versions == [{max(0, step - ahead)} for step in range(STEPS)]
    train(model, tmp_path / "c" / "run", *schedule, seen=stopped, last=2)
    assert_equal(train(model, tmp_path / "c" / "run", *schedule, seen=stopped), wanted)
    assert stopped == serial
    assert metrics_of(tmp_path / "c" / "run") == metrics_of(tmp_path / "b" / "run")


def test_nothing_ahead_is_the_synchronous_run(model: Path, tmp_path: Path) -> None:
    keys = ("trainer.schedule=exact_async", "trainer.async.run_ahead=0")
    wanted = train(model, tmp_path / "a" / "run")
    assert_equal(train(model, tmp_path / "b" / "run", *keys), wanted)
    assert metrics_of(tmp_path / "b" / "run") == metrics_of(tmp_path / "a" / "run")


def test_a_synchronous_run_refuses_batches_that_wait_in_a_checkpoint(model: Path, tmp_path: Path) -> None:
    train(model, tmp_path / "a" / "run", *ONE_STEP_OFF, *BYPASS, last=2)
    with pytest.raises(CheckpointError, match="of kind 'exact', and this run's are 'sync'"):
        train(model, tmp_path / "a" / "run")


def test_a_run_may_change_how_far_it_is_ahead(model: Path, tmp_path: Path) -> None:
    seen: dict[int, Rows] = {}
    train(model, tmp_path / "a" / "run", *TWO_STEPS_AHEAD, *BYPASS, seen=seen, last=1)
    train(model, tmp_path / "a" / "run", *ONE_STEP_OFF, *BYPASS, seen=seen)
    versions = [{version for _, _, version in rows.values()} for rows in seen.values()]
    assert versions == [{0}, {0}, {0}, {2}]
    rows = [row for batch in seen.values() for row in batch]
    assert len(rows) == len(set(rows)) == STEPS * 8


def test_a_run_that_is_stopped_within_a_step_goes_on_also_where_groups_are_filtered(
    model: Path, tmp_path: Path
) -> None:
    filters = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=share")
    keys = (*ONE_STEP_OFF, *DECOUPLED, *filters)
    wanted = train(model, tmp_path / "a" / "run", *keys)
    (tmp_path / "b").mkdir()
    with build(ppo_config(model, tmp_path / "b" / "run", *KEYS, *keys)) as trainer:
        learn = trainer.step

        def stop(batch: DataProto, step: int) -> Any:
            if step == 3:
                raise Stopped(signal.SIGTERM, "in step 3")
            return learn(batch, step)

        trainer.step = stop  # type: ignore[assignment]
        with pytest.raises(Stopped):
            trainer.fit()
    assert_equal(train(model, tmp_path / "b" / "run", *keys), wanted)


def test_a_run_goes_on_in_a_folder_that_has_only_its_checkpoint(model: Path, tmp_path: Path) -> None:
    keys = (*ONE_STEP_OFF, *DECOUPLED)
    wanted = train(model, tmp_path / "a" / "run", *keys)
    train(model, tmp_path / "b" / "run", *keys, last=2)
    (tmp_path / "b" / "run" / LEDGER_FILE).unlink()
    assert_equal(train(model, tmp_path / "b" / "run", *keys), wanted)
    with Ledger(tmp_path / "b" / "run" / LEDGER_FILE) as ledger:
        assert ledger.state.trained_per_step == [4] * STEPS


def test_a_run_with_steps_of_another_size_is_refused(model: Path, tmp_path: Path) -> None:
    train(model, tmp_path / "a" / "run", *ONE_STEP_OFF, *DECOUPLED, last=2)
    with pytest.raises(CheckpointError, match="4 groups a step, and this one trains 2"):
        train(model, tmp_path / "a" / "run", *ONE_STEP_OFF, *DECOUPLED, "data.train_batch_size=2")
