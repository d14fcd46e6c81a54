"""Values that a run falls back to where this machine lacks what it asks for: `trainer.on_missing=fallback`.

    keys of a cluster ──fallback──► the values that this machine has, and a line for each that another one had

No torch is loaded: what is installed is looked up, and GPUs are counted by their files.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.checks.cluster import num_processes
from hybridflow.config.load import Change
from hybridflow.config.needs import built_models
from hybridflow.config.tree import get_value, keys_of
from hybridflow.controller.surroundings import choose_address, num_cpus
from hybridflow.distributed.accelerators import is_accelerator, no_accelerator
from hybridflow.errors import ConfigError
from hybridflow.observability.trackers.libraries import MINIMUM, check_library, is_installed
from hybridflow.rollout.installed import check_installed

SIZES = (
    "fsdp_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "virtual_pipeline_parallel_size",
    "expert_parallel_size",
    "ulysses_sequence_parallel_size",
    "tensor_model_parallel_size",
)
"""Last parts of the keys that spread a model over processes."""
VALIDATION = "actor_rollout_ref.rollout.val_kwargs"


def fallback(config: PPOConfig | SFTConfig) -> list[Change]:
    """Return what has to change so that a run finds on this machine what it asks for, as far as keys tell."""
    changes = [*_processes(config), *_kernels(config), *_trackers(config)]
    if isinstance(config, PPOConfig):
        changes += _generation(config)
    return changes


def _generation(config: PPOConfig) -> Iterator[Change]:
    rollout = config.actor_rollout_ref.rollout
    try:
        check_installed(rollout)
    except ConfigError:
        yield Change("actor_rollout_ref.rollout.name", "native", f"{rollout.name} is not installed")
    if rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature == 0:
        yield Change(f"{VALIDATION}.do_sample", False, f"{VALIDATION}.temperature=0 is greedy")


def _trackers(config: PPOConfig | SFTConfig) -> Iterator[Change]:
    names = config.trainer.logger
    chosen = [names] if isinstance(names, str) else list(names)
    lacking = [name for name in chosen if name in MINIMUM and not _is_usable(name)]
    if lacking:
        left = [name for name in chosen if name not in lacking] or ["console"]
        yield Change("trainer.logger", left, f"{', '.join(lacking)}: not installed here, or not logged in")


def _is_usable(tracker: str) -> bool:
    try:
        check_library(tracker)
    except ConfigError:
        return False
    return True


def _processes(config: PPOConfig | SFTConfig) -> Iterator[Change]:
    """Yield the number of processes, the device and the sizes of the layout, where a cluster's do not fit."""
    trainer = config.trainer
    device = trainer.device
    if is_accelerator(device) and no_accelerator() is not None:
        yield Change("trainer.device", "auto", f"there is no device {device} here")
        device = "auto"
    gpus = num_gpus()
    if getattr(trainer, "resource_pools", {}) or choose_address(config.ray_kwargs.ray_init.address):
        return  # which device is whose was said in detail, or a cluster was named
    on_gpus = gpus > 0 and device != "cpu"
    offered = gpus if on_gpus else config.ray_kwargs.ray_init.num_cpus or num_cpus()
    wanted = num_processes(trainer)
    unit = "GPU" if on_gpus else "CPU"
    here = f"{wanted} processes want a {unit} each, and this machine has {offered}"
    needed = True
    if wanted > 1 and not is_installed("ray"):
        here = f"{wanted} processes want ray, which is not installed"
        gpus = min(gpus, 1)
    elif wanted <= offered and trainer.nnodes == 1:
        if wanted == 1 or on_gpus or device == "cpu" or no_accelerator() is None:
            return
        # the processes were meant for GPUs, and as many cores would have to hold as many models
        here = f"{wanted} processes want a GPU each, and this machine has none"
        needed = False
    if trainer.nnodes > 1:
        yield Change("trainer.nnodes", 1, here)
    # processes on a CPU share its cores, so one is as fast, and it needs no Ray
    yield Change("trainer.n_gpus_per_node", gpus if on_gpus else 1, here, needed)
    for path, info in keys_of(type(config)).items():
        if path.rpartition(".")[2] in SIZES and get_value(config, path) not in (info.default, None, 1, -1):
            yield Change(path, info.default, "the model is not spread over processes", needed)


def num_gpus() -> int:
    """Return the number of this machine's NVIDIA GPUs, by their files: torch is not loaded yet."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _kernels(config: PPOConfig | SFTConfig) -> Iterator[Change]:
    lacking = no_accelerator()
    if lacking is None and config.trainer.device != "cpu" and find_spec("liger_kernel") is not None:
        return
    for block, model, _ in built_models(config):
        if model.use_liger:
            yield Change(
                f"{block}.use_liger", False, lacking or "Liger's kernels are not installed, or not for CPUs"
            )
