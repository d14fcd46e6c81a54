"""What surrounds the loop of a run: folder, devices, resume, trackers; the same for PPO and SFT.

config ─► started ─► workers, data (ppo/build.py, sft/build.py) ─► resume ─► recorded ─► Trainer
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.layout import step_folders
from hybridflow.checkpoint.remote import RemoteCheckpoints
from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.show import to_yaml
from hybridflow.config.trainer import SFTTrainerConfig, TrainerConfig
from hybridflow.config.tree import to_tree
from hybridflow.controller.build import Start, hosting
from hybridflow.data.loader import StatefulLoader
from hybridflow.data.tokenizer import Tokenizer, save_tokenizer
from hybridflow.distributed.device import resolve_device, set_threads
from hybridflow.errors import Stopped
from hybridflow.observability.progress import progress
from hybridflow.observability.run_log import RunLog
from hybridflow.observability.timing import Timer
from hybridflow.observability.trackers import Trackers, build_trackers
from hybridflow.stop_token import stop_token
from hybridflow.trainer.resume import say_changes
from hybridflow.trainer.run_folder import RunFolder
from hybridflow.trainer.source import BatchSource
from hybridflow.trainer.state import RunState
from hybridflow.workers.state import StatefulGroup


@dataclass
class PreparedRun:
    """A run whose folder and devices are there, before anything is loaded."""

    config: PPOConfig | SFTConfig
    folder: RunFolder
    start: Start
    """Starts the worker processes."""
    log: RunLog
    """Takes the log lines of this process."""
    timer: Timer = field(default_factory=lambda: Timer(progress=progress))
    """Measures the sections of a step."""

    def resume(self, state: RunState) -> CheckpointStore:
        """Resume from the checkpoint that `trainer.resume_mode` asks for; return the run's checkpoints."""
        trainer = self.config.trainer
        with progress.phase("looking for a checkpoint"):
            store = open_store(trainer)
            state.resume(store, trainer.resume_mode, trainer.resume_from_path)
        return store

    @contextmanager
    def recorded(self, state: RunState, store: CheckpointStore, source: BatchSource) -> Iterator[Trackers]:
        """Write what the run is into its folder and build its trackers. When the context ends, also after an
        error, the source is closed, and a running save is given up. After an error the folder
        has a report with the error in it.
        """
        with self.folder.failure_kept(lambda: state.step):
            say_changes(state.step, self.folder.write_config(to_yaml(self.config)))
            self.log.begin(self.folder.path, goes_on=state.step > 0)
            self.folder.write_machine(resolve_device(self.config.trainer.device).type)
            with self._tracked(state, store, source) as trackers:
                yield trackers

    @contextmanager
    def _tracked(self, state: RunState, store: CheckpointStore, source: BatchSource) -> Iterator[Trackers]:
        trainer = self.config.trainer
        with progress.phase("starting the trackers"):
            trackers = build_trackers(
                trainer.logger,
                self.folder.path,
                trainer.project_name,
                trainer.experiment_name,
                to_tree(self.config),
                total_steps=state.total_steps,
                resume_step=state.step or None,
                wandb_proxy=trainer.wandb_proxy,
                alert_webhook=trainer.alert_webhook,
                prometheus=trainer.prometheus,
                running=self.timer.running,
            )
        with closing(source), ExitStack() as stack:
            if store.remote is not None:
                stack.push(partial(_finish_copies, store.remote))
            stack.callback(state.saves.abandon, store)
            yield stack.enter_context(trackers)


def _finish_copies(remote: RemoteCheckpoints, _: object, error: BaseException | None, *__: object) -> None:
    """Wait for the running copy, unless a second signal has ended the run at once."""
    if not (isinstance(error, Stopped) and error.at_once):
        remote.wait()


def open_store(trainer: TrainerConfig | SFTTrainerConfig) -> CheckpointStore:
    """Return the checkpoints of a run; where it has none, and may resume, the newest remote one is fetched.

    Raises ConfigError where the remote place cannot be reached, CheckpointError where no copy can be had.
    """
    folder = Path(trainer.default_local_dir).expanduser()
    if trainer.remote_checkpoint_dir is None:
        return CheckpointStore(folder, keep=trainer.max_ckpt_to_keep)
    remote = RemoteCheckpoints(trainer.remote_checkpoint_dir, keep=trainer.max_ckpt_to_keep)
    if trainer.resume_mode == "auto" and not step_folders(folder):
        remote.fetch_newest(folder)
    return CheckpointStore(folder, keep=trainer.max_ckpt_to_keep, remote=remote)


@contextmanager
def started(config: PPOConfig | SFTConfig, roles: Sequence[str], *, patience: float) -> Iterator[PreparedRun]:
    """Hold the run folder and find devices for `roles`; both are released when the context ends.

    `patience`: seconds to wait for devices that a lost node may bring back.
    """
    set_threads(config.trainer.num_threads)
    folder = RunFolder(config.trainer.default_local_dir)
    with folder.held(), RunLog.attached() as log, ExitStack() as stack:
        with progress.phase("looking for devices"):
            hosts = hosting(config.trainer, config.ray_kwargs, roles, patience=patience)
            start = stack.enter_context(hosts)
        stop_token.install()  # Ray has set its own when it was connected
        yield PreparedRun(config, folder, start, log)


def steps_of(config: PPOConfig | SFTConfig, loader: StatefulLoader[Any]) -> int:
    """Return `trainer.total_training_steps`, or the steps for which the rows of the epochs suffice.

    A step of dynamic sampling takes one or more generation batches; here it takes as few as it can.
    """
    batches_a_step = math.ceil(config.data.train_batch_size / loader.batch_size)
    steps_an_epoch = max(1, len(loader) // batches_a_step)
    return config.trainer.total_training_steps or steps_an_epoch * config.trainer.total_epochs


def huggingface_writer(group: StatefulGroup[Any], tokenizer: Tokenizer) -> Callable[[Path, bool], None]:
    """Return a function that writes a role's model, its weights if asked, and the tokenizer into a folder."""

    def write(target: Path, with_weights: bool) -> None:
        group.write_huggingface(target, with_weights=with_weights)
        save_tokenizer(tokenizer, target)

    return write
