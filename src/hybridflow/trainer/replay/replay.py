"""Repeats steps of a run from its own checkpoint and kept rows: `hybridflow replay RUN --step k`.

    newest checkpoint before k ─► rows/step_c+1 … step_k ─► PPOStep ─► metrics and weights, beside the run's

Nothing is generated or scored, and nothing is written into the run folder.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.layout import STEP_PREFIX, step_folders, step_of
from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.config import PPOConfig
from hybridflow.config.layout import without_validation
from hybridflow.errors import ConfigError
from hybridflow.observability.trackers.jsonl import METRICS_FILE, read_metrics
from hybridflow.trainer.ppo.build import PPOTrainer, build
from hybridflow.trainer.ppo.replay_buffer import not_noted
from hybridflow.trainer.replay.diff import (
    MISSING,
    Difference,
    checkpoint_differences,
    metric_differences,
    repeatable,
)
from hybridflow.trainer.replay.kept_rows import KeptRows, KeptStep, config_of


@dataclass
class Replay:
    """The result of repeating steps."""

    began_after: int
    """Steps of the checkpoint that it began with; 0: the weights that the run began with."""
    steps: list[int] = field(default_factory=list)
    num_metrics: int = 0
    """Metrics that were compared with those of the run."""
    compared_weights: bool = False
    """Whether the run has a checkpoint of the last step."""
    differences: list[Difference] = field(default_factory=list)
    """Each metric and tensor that differs; the first of each pair of values is the run's."""
    notes: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """0: the bits agree; 1: they do not; 2: there was nothing to compare with."""
        if self.differences:
            return 1
        return 0 if self.num_metrics or self.compared_weights else 2


def replay(run: Path, step: int) -> Replay:
    """Repeat the steps up to `step`, from the newest checkpoint before it.

    Raises ConfigError for a folder that is no run of `hybridflow train`, DataError where kept rows are
    missing, and CheckpointError where the checkpoint is damaged.
    """
    if step < 1:
        raise ConfigError(f"--step {step}: steps count from 1")
    before = [folder for folder in step_folders(run) if (step_of(folder) or 0) < step]
    start = before[-1] if before else None
    done = (step_of(start) or 0) if start else 0
    kept = KeptRows(run)
    # read before anything is built: a missing step is said at once
    rows = [kept.read(number) for number in range(done + 1, step + 1)]
    found = Replay(done)
    with (
        tempfile.TemporaryDirectory(prefix="hybridflow_replay_") as folder,
        build(replay_config(run, Path(folder), start)) as trainer,
    ):
        _train(trainer, rows, run, found)
        saved = run / f"{STEP_PREFIX}{step}"
        if saved.is_dir():
            _compare_weights(trainer, saved, step, found)
        else:
            found.notes.append(f"{run} has no checkpoint of step {step}: weights are not compared")
    return found


def replay_config(run: Path, folder: Path, start: Path | None) -> PPOConfig:
    """Return the run's configuration with `folder` as run folder, going on from the checkpoint `start`."""
    config = config_of(run, [f"trainer.default_local_dir='{folder}'"])
    resumes: dict[str, Any] = {}
    if start is not None:
        resumes = {"resume_mode": "resume_path", "resume_from_path": str(start.resolve())}
    elif config.trainer.resume_mode == "auto":
        resumes = {"resume_mode": "disable"}
    trainer = replace(
        without_validation(config.trainer),
        logger=[],
        keep_rows=True,  # all columns come back from the workers, as they did in the run
        remote_checkpoint_dir=None,
        max_ckpt_to_keep=None,
        rollout_data_dir=None,
        validation_data_dir=None,
        **resumes,
    )
    return replace(config, trainer=trainer)


def _train(trainer: PPOTrainer, rows: list[KeptStep], run: Path, found: Replay) -> None:
    """Run the steps, and compare the metrics of each with the run's."""
    logged = read_metrics(run / METRICS_FILE)
    if trainer.step.buffer is not None:
        trainer.step.buffer.note_replayed = not_noted
    trainer.source.publish(trainer.state.step)
    for one in rows:
        trainer.timer.reset()
        _, metrics = trainer.step(one.given(), one.step)
        trainer.source.publish(one.step)
        trainer.state.finish(one.step)
        found.steps.append(one.step)
        if one.step not in logged:
            found.notes.append(f"{run} has no metrics of step {one.step}")
            continue
        ours = metrics.to_floats()
        found.num_metrics += sum(map(repeatable, ours))
        stored = {name: logged[one.step].get(name, MISSING) for name in ours}
        found.differences += metric_differences(stored, ours, one.step)


def _compare_weights(trainer: PPOTrainer, saved: Path, step: int, found: Replay) -> None:
    """Save the weights and optimizers that came out, and compare them with the run's checkpoint."""
    store = CheckpointStore(trainer.store.run_dir)
    path = trainer.state.save(store)
    trainer.state.saves.commit(store)
    found.compared_weights = True
    differences = checkpoint_differences(saved, path, step, found.notes)
    # the driver's state has the place in the data, from which nothing was read
    found.differences += [one for one in differences if one.kind != "state"]
