"""The body of the commands `main_ppo` and `main_sft`: keys in, a whole run, an exit status out.

The parts of a run are imported by `run`, not here, so that what is wrong with the keys, the run folder or the
cluster is said before torch is loaded.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hybridflow.agent.early_checks import check_agents
from hybridflow.checkpoint.remote import RemoteCheckpoints
from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.cluster import choose_address
from hybridflow.config.convert import WrongKeyRead, raise_all
from hybridflow.config.layout import resolved_controller
from hybridflow.config.load import prepare_config
from hybridflow.config.needs import built_models
from hybridflow.config.recipes import asks_for_help, help_text
from hybridflow.data.early_checks import check_data
from hybridflow.distributed.accelerators import check_package, is_accelerator, no_accelerator
from hybridflow.errors import ConfigError, HybridFlowError, WorkerLost, install_extra
from hybridflow.observability.logging_setup import setup_logging
from hybridflow.observability.progress import progress
from hybridflow.observability.tracing import trace_problems
from hybridflow.observability.trackers.build import check_trackers, tracker_problems
from hybridflow.rewards.early_checks import check_reward
from hybridflow.rollout.installed import check_installed
from hybridflow.trainer.command import ends_in_status
from hybridflow.trainer.fallback import fallback
from hybridflow.trainer.resume import check_resume
from hybridflow.trainer.run_folder import RunFolder
from hybridflow.trainer.stopping import stopping

if TYPE_CHECKING:
    from hybridflow.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

C = TypeVar("C", PPOConfig, SFTConfig)


def run(config: C, prepare: Callable[[Trainer[Any, Any]], None] | None = None) -> dict[str, float]:
    """Build the parts of a prepared run, train, and clean up; gives the last validation's metrics.

    `prepare` is called with each trainer that is built, before it trains. Raises Stopped after SIGINT or
    SIGTERM, with what is done saved where the configuration asks for checkpoints.
    """
    _refuse_torchrun()
    _look_first(config)
    with progress.shown(), stopping(config):
        with progress.importing():
            build = _load_build(config)
            from hybridflow.trainer.restarts import Restarts

        attempts = Restarts(config)
        metrics: dict[str, float] | None = None
        while metrics is None:
            trainer = None  # what is left of an attempt goes before the next one
            try:
                with build(attempts.config, patience=attempts.patience) as trainer:
                    if prepare is not None:
                        prepare(trainer)
                    metrics = trainer.fit()
            except WorkerLost as lost:
                attempts.after(lost)
    folder = config.trainer.default_local_dir
    kept = (
        "metrics, samples and checkpoints"
        if any(Path(folder).glob("global_step_*"))
        else "metrics and samples"
    )
    logger.info("done: %s are in %s; `hybridflow view %s` shows them", kept, folder, folder)
    return metrics


def _look_first(config: PPOConfig | SFTConfig) -> None:
    """Raise what can be seen now and would stop the run later, all of it at once, before torch is loaded."""
    found: list[HybridFlowError] = []
    with _collected(found):
        raise_all(missing_libraries(config))
    if isinstance(config, PPOConfig):
        with _collected(found), progress.phase("loading environments, tools and agents"):
            check_agents(config)
    with _collected(found):
        splits = check_data(config)
        if isinstance(config, PPOConfig):
            check_reward(config, splits)
    with _collected(found):
        check_trackers(config.trainer)
    with _collected(found):
        RunFolder(config.trainer.default_local_dir).check_writable()
    with _collected(found):
        check_resume(config)
    if config.trainer.remote_checkpoint_dir is not None:
        with _collected(found), progress.phase("looking at the remote checkpoints"):
            RemoteCheckpoints(config.trainer.remote_checkpoint_dir)
    if config.trainer.controller == "ray":
        from hybridflow.controller.ray.preflight import look_ahead

        with _collected(found):
            look_ahead(config.trainer, config.ray_kwargs)
    lines = [line for error in found for line in getattr(error, "problems", ()) or (str(error),)]
    if len(dict.fromkeys(lines)) == 1:
        raise found[0]
    raise_all(list(dict.fromkeys(lines)))  # a library may be missing to two of them


@contextmanager
def _collected(found: list[HybridFlowError]) -> Iterator[None]:
    """Add an error that a user can mend to those that are found, so that it hides no other."""
    try:
        yield
    except HybridFlowError as error:
        found.append(error)


def _refuse_torchrun() -> None:
    """Raise ConfigError in one of several processes that torchrun has started: each would be a whole run."""
    number = os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and number != "1":
        devices = os.environ.get("LOCAL_WORLD_SIZE", number)
        nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
        raise ConfigError(
            f"started by torchrun as one of {number} processes, and a run starts its processes itself: start "
            f"it once, by python, with trainer.n_gpus_per_node={devices} and trainer.nnodes={nodes}"
        )


def missing_libraries(config: PPOConfig | SFTConfig) -> list[str]:
    """Return a line for each library that a run needs and this environment lacks: those of its engine, of its
    device, of its kernels and of its trackers. A missing device is one of them.
    """
    found = [*_told(check_package, config.trainer.device), *_told(_device_problems, config)]
    if isinstance(config, PPOConfig):
        found += _told(check_installed, config.actor_rollout_ref.rollout)
        found += _told(trace_problems, config.actor_rollout_ref.rollout.trace)
    return [*found, *_told(tracker_problems, config.trainer)]


def _told(look: Callable[..., Iterable[str] | None], *arguments: Any) -> list[str]:
    """Return the lines that a look gives or raises; none where it reads a key that has no usable value."""
    with suppress(WrongKeyRead):
        try:
            return list(look(*arguments) or ())
        except ConfigError as error:
            return [str(error)]
    return []


def _device_problems(config: PPOConfig | SFTConfig) -> list[str]:
    """Return a line for a device that this machine does not have, and for each model that cannot have Liger's
    kernels here. What the machines of a Ray cluster have is not known.
    """
    device = config.trainer.device
    lacking = None
    named = resolved_controller(config.trainer) == "ray" and choose_address(
        config.ray_kwargs.ray_init.address
    )
    if not named:
        lacking = no_accelerator()
    found = []
    if lacking is not None and is_accelerator(device):
        found.append(
            f"trainer.device={device}, but no such device is usable here ({lacking}): set "
            "trainer.device=auto or cpu"
        )
    asked = [block for block, model, _ in built_models(config) if model.use_liger]
    if lacking is not None and device == "auto":
        found += [
            f"{block}.use_liger=true, and {lacking}: Liger's kernels are Triton programs, which run on CUDA "
            f"only: leave {block}.use_liger out"
            for block in asked
        ]
    elif asked and device != "cpu" and find_spec("liger_kernel") is None:
        found.append(
            f"{asked[0]}.use_liger=true needs liger-kernel, which is not installed: "
            f"{install_extra('liger')}, or leave use_liger out"
        )
    return found


def missing_here(config: PPOConfig | SFTConfig) -> list[str]:
    """Return the missing libraries, and what the cluster lacks, as far as the keys and this machine show."""
    found = missing_libraries(config)
    with suppress(WrongKeyRead):
        if config.trainer.controller == "ray":
            from hybridflow.controller.ray.preflight import look_ahead

            found += _told(look_ahead, config.trainer, config.ray_kwargs)
    return found


def _load_build(config: PPOConfig | SFTConfig) -> Callable[..., AbstractContextManager[Trainer[Any, Any]]]:
    """Import the function that builds such a run."""
    if isinstance(config, PPOConfig):
        from hybridflow.trainer.ppo import build as ppo

        return ppo.build
    from hybridflow.trainer.sft import build as sft

    return sft.build


def command(module: str, schema: type[C]) -> Callable[..., int]:
    """Return the `main` of `module`: it runs what its command line asks for."""

    @ends_in_status
    def main(arguments: Sequence[str] | None = None) -> int:
        """Exit status: 0, or what `ends_in_status` makes of an error."""
        words = list(sys.argv[1:] if arguments is None else arguments)
        if asks_for_help(words):
            sys.stdout.write(help_text(module))
            return 0
        setup_logging()
        prepared = prepare_config(schema, words, missing=missing_here, fallback=fallback)
        for note in prepared.notes:
            sys.stderr.write(f"note: {note}\n")
        run(prepared.config)
        return 0

    return main
