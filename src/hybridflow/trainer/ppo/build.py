"""The one place that wires a PPO run: a prepared configuration in, a trainer ready to `fit` out.

config ─► devices ─► tokenizer, data ─► a backend, whose processes build engines and workers (host.py) ─►
Roles
       ─► PPOStep, Trajectories, Validator ─► SyncTrainer
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.config import PPOConfig
from hybridflow.config.roles import ROLE_KEYS
from hybridflow.config.show import to_yaml
from hybridflow.config.tree import get_value
from hybridflow.controller.build import Start, hosting
from hybridflow.data.build import build_prompt_data
from hybridflow.data.loader import StatefulLoader
from hybridflow.data.prompts import PromptRow
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.distributed.device import set_threads
from hybridflow.errors import ConfigError
from hybridflow.observability.progress import progress
from hybridflow.observability.timing import Timer
from hybridflow.rewards.build import build_reward_manager
from hybridflow.trainer.ppo.columns import KLController, find_estimator, kl_controller
from hybridflow.trainer.ppo.exact import ExactState, settle_exact
from hybridflow.trainer.ppo.parallel_layout import meshes
from hybridflow.trainer.ppo.role_builders import facts_of
from hybridflow.trainer.ppo.roles import Roles, groups, needed_roles, workers_of
from hybridflow.trainer.ppo.sample_log import SampleLog
from hybridflow.trainer.ppo.state import RunState
from hybridflow.trainer.ppo.step import PPOStep
from hybridflow.trainer.ppo.sync import SyncTrainer
from hybridflow.trainer.ppo.trajectories import Trajectories
from hybridflow.trainer.ppo.validation import Validator
from hybridflow.trainer.resume import say_changes
from hybridflow.trainer.run_folder import RunFolder
from hybridflow.trainer.run_trackers import run_trackers
from hybridflow.trainer.stopping import StopSignals


@contextmanager
def build(
    config: PPOConfig, *, patience: float = 0.0, signals: StopSignals | None = None
) -> Iterator[SyncTrainer]:
    """Build everything a run needs; processes, files and the run folder are released when the context ends,
    also after an error.

    `patience`: seconds to wait for devices that a lost node may bring back. `signals`: asks the run to stop;
    None: SIGINT and SIGTERM do what they do elsewhere.
    """
    set_threads(config.trainer.num_threads)
    folder = RunFolder(config.trainer.default_local_dir)
    roles = needed_roles(config)
    signals = signals or StopSignals()
    with folder.held(), ExitStack() as stack:
        with progress.phase("looking for devices"):
            hosts = hosting(config.trainer, config.ray_kwargs, roles, patience=patience)
            start = stack.enter_context(hosts)
        signals.install()  # Ray has set its own when it was connected
        yield from _build(config, folder, roles, start, signals)


def _build(
    config: PPOConfig, folder: RunFolder, names: Sequence[str], start: Start, signals: StopSignals
) -> Iterator[SyncTrainer]:
    with progress.phase("reading tokenizer and data"):
        tokenizer = load_tokenizer(str(config.data.tokenizer), config.data.trust_remote_code)
        data = build_prompt_data(
            config.data,
            tokenizer,
            config.trainer.seed,
            dynamic_sampling=config.algorithm.filter_groups.enable,
            demonstrations="is_demonstration" in find_estimator(config.algorithm).needs,
        )
    if data.train_loader is None:
        raise ConfigError("there is nothing to train on: set data.train_files or data.task.name")
    loader = data.train_loader
    total_steps = (
        config.trainer.total_training_steps or _steps_an_epoch(config, loader) * config.trainer.total_epochs
    )
    if total_steps <= config.trainer.critic_warmup:
        raise ConfigError(
            f"trainer.critic_warmup={config.trainer.critic_warmup} leaves none of the run's {total_steps} "
            "steps for the actor: "
            "set it lower, or raise trainer.total_epochs"
        )
    with closing(build_reward_manager(config.reward, config.trainer.seed)) as rewards:
        with progress.phase("starting the workers"):
            facts = facts_of(config, tokenizer, total_steps, folder.nonfinite)
            roles = groups(start(workers_of(facts), partial(meshes, config, names)), names)
        controller = kl_controller(config.algorithm)
        exact = ExactState()
        state = _state(config, roles, controller, exact, loader, tokenizer, total_steps)
        with progress.phase("looking for a checkpoint"):
            store = CheckpointStore(folder.path, keep=config.trainer.max_ckpt_to_keep)
            done = state.resume(store, config.trainer.resume_mode, config.trainer.resume_from_path)
        with progress.phase("comparing log-probs of generation and training"):
            settle_exact(config, roles, exact)
        say_changes(done, folder.write_config(to_yaml(config)))
        folder.write_machine()
        with (
            state.saves.given_up_at_the_end(store),
            run_trackers(config, folder, total_steps, done) as trackers,
        ):
            timer = Timer(progress=progress)
            samples = SampleLog(folder.path, config, tokenizer, total_steps, trackers, done)
            trajectories = Trajectories(roles.rollout, rewards, tokenizer, config, timer)
            validator = None
            if data.val_dataset:
                validator = Validator(data.val_dataset, trajectories, samples, config)
            yield SyncTrainer(
                config=config,
                data=data,
                loader=loader,
                trajectories=trajectories,
                step=PPOStep(roles, config, controller, timer, exact=exact, leavable=signals.leavable),
                validator=validator,
                state=state,
                store=store,
                trackers=trackers,
                samples=samples,
                timer=timer,
                total_steps=total_steps,
                tokenizer=tokenizer,
                signals=signals,
            )


def _state(
    config: PPOConfig,
    roles: Roles,
    controller: KLController,
    exact: ExactState,
    loader: StatefulLoader[PromptRow],
    tokenizer: Tokenizer,
    total_steps: int,
) -> RunState:
    def write_huggingface(target: Path, with_weights: bool) -> None:
        roles.actor.write_huggingface(target, with_weights=with_weights)
        tokenizer.save_pretrained(target)

    return RunState(
        roles=roles,
        loader=loader,
        kl_controller=controller,
        exact=exact,
        contents={
            name: get_value(config, f"{keys.updates}.checkpoint")
            for name, keys in ROLE_KEYS.items()
            if keys.updates
        },
        reference_moves=config.algorithm.ref_update_freq > 0,
        write_huggingface=write_huggingface,
        total_steps=total_steps,
        seed=config.trainer.seed,
    )


def _steps_an_epoch(config: PPOConfig, loader: StatefulLoader[PromptRow]) -> int:
    """Return the steps for which an epoch's rows suffice. A step of dynamic sampling takes one or more
    generation batches; here it takes as few as it can.
    """
    return max(1, len(loader) // math.ceil(config.data.train_batch_size / loader.batch_size))
