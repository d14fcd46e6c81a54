"""The worker groups of a run, started by its configuration: for the trainer, and for custom loops.

config ─► roles ─► devices ─► a backend, whose processes build engines and workers ─► Roles
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.config import PPOConfig
from hybridflow.config.layout import JUDGE, lives_alone
from hybridflow.controller import Factories, MeshInfo, Placement, WorkerFactory, WorkerHost
from hybridflow.controller.build import Start, data_parallel, hosting
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.distributed.device import set_threads
from hybridflow.errors import ConfigError
from hybridflow.observability.progress import progress
from hybridflow.trainer.roles.parallel_layout import meshes
from hybridflow.trainer.roles.role_builders import facts_of
from hybridflow.trainer.roles.roles import ROLES, Roles, factories, groups, needed_roles
from hybridflow.trainer.run_folder import RunFolder
from hybridflow.workers import RolloutGroup

if TYPE_CHECKING:
    from hybridflow.trainer.roles.judges import JudgeServer


@contextmanager
def worker_groups(
    config: PPOConfig,
    tokenizer: Tokenizer,
    total_steps: int,
    *,
    more: Mapping[str, WorkerFactory] | None = None,
) -> Iterator[Roles]:
    """Start the workers of a prepared configuration, and end them with the context.

    `total_steps` is the number of training steps by which learning rates are scheduled. `more` has a factory
    for each role of your own; its workers are data-parallel, and share the processes of the first pool. Their
    group is `WorkerGroup(roles.actor.backend, name)`. Raises ConfigError where devices are missing, and where
    a name in `more` is that of a role of the library.
    """
    more = more or {}
    taken = sorted({spec.name for spec in ROLES} & set(more))
    if taken:
        raise ConfigError(f"a role of your own cannot be called {taken[0]}, which is a role of the library")
    set_threads(config.trainer.num_threads)
    nonfinite = RunFolder(config.trainer.default_local_dir).nonfinite
    with hosting(config.trainer, config.ray_kwargs, [*needed_roles(config), *more]) as start:
        yield start_roles(config, tokenizer, start, total_steps, nonfinite, more)


def start_roles(
    config: PPOConfig,
    tokenizer: Tokenizer,
    start: Start,
    total_steps: int,
    nonfinite: Path,
    more: Mapping[str, WorkerFactory],
) -> Roles:
    """Start the worker processes by `start`, and return the groups of the run's roles.

    Rows of a step that was skipped are written into the folder `nonfinite`. `more` is that of
    `worker_groups`.
    """
    names = needed_roles(config)
    facts = facts_of(config, tokenizer, total_steps, nonfinite)

    def make(process: WorkerHost) -> Factories:
        return {**factories(facts, process), **more}

    def arrange(placement: Placement) -> Mapping[str, MeshInfo]:
        return {**data_parallel(placement), **meshes(config, names, placement)}

    part = None
    if JUDGE in names and lives_alone(config.trainer, JUDGE):  # `start_judge` starts it
        names.remove(JUDGE)
        part = methodcaller("without", JUDGE)
    with progress.phase("starting the workers"):
        return groups(start(make, arrange, part), names, config)


def start_judge(
    config: PPOConfig, tokenizer: Tokenizer, start: Start, roles: Roles, nonfinite: Path, judge: JudgeServer
) -> None:
    """Have `judge` answer by the replicas among `roles`, or start those of a pool of their own and have it
    answer by these.
    """
    if roles.judge is not None:
        judge.begin({JUDGE: roles.judge}, None)
        return
    facts = facts_of(config, tokenizer, 1, nonfinite)
    width = config.reward.reward_model.rollout.tensor_model_parallel_size
    placement = Placement.from_config(config.trainer, needed_roles(config))
    replicas = {part.pools[0].name: part for part in placement.replicas(JUDGE, width)}

    def start_one(name: str) -> RolloutGroup:
        part = replicas[name]
        backend = start(partial(factories, facts), partial(meshes, config, [JUDGE]), lambda whole: part)
        return RolloutGroup(backend, JUDGE)

    with progress.phase("starting the judge"):
        judge.begin({name: start_one(name) for name in replicas}, start_one)
