"""The worker groups of a run, started by its configuration: for the trainer, and for custom loops.

config ─► roles ─► devices ─► a backend, whose processes build engines and workers ─► Roles
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.config import PPOConfig
from hybridflow.config.layout import JUDGE, VALIDATION, lives_alone
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
    # `start_judge` and `validation_starter` start these
    apart = [role for role in (JUDGE, VALIDATION) if role in names and lives_alone(config.trainer, role)]
    if apart:
        names = [name for name in names if name not in apart]
        part = methodcaller("without", *apart)
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
    width = config.reward.reward_model.rollout.tensor_model_parallel_size
    starters = _replica_starters(config, tokenizer, start, nonfinite, JUDGE, width)
    with progress.phase("starting the judge"):
        judge.begin({name: starter() for name, starter in starters.items()}, lambda name: starters[name]())


def validation_starter(
    config: PPOConfig, tokenizer: Tokenizer, start: Start, nonfinite: Path
) -> Callable[[], RolloutGroup]:
    """Return the function that starts the replica of `trainer.val_in_background`, or starts it again."""
    width = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    (starter,) = _replica_starters(config, tokenizer, start, nonfinite, VALIDATION, width).values()
    return starter


def _replica_starters(
    config: PPOConfig, tokenizer: Tokenizer, start: Start, nonfinite: Path, role: str, width: int
) -> dict[str, Callable[[], RolloutGroup]]:
    """Return the function that starts each replica of a role in a pool of its own, on `width` devices."""
    facts = facts_of(config, tokenizer, 1, nonfinite)
    placement = Placement.from_config(config.trainer, needed_roles(config))

    def start_one(part: Placement) -> RolloutGroup:
        backend = start(partial(factories, facts), partial(meshes, config, [role]), lambda whole: part)
        return RolloutGroup(backend, role)

    return {part.pools[0].name: partial(start_one, part) for part in placement.replicas(role, width)}
