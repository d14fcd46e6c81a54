"""Values that a run falls back to where this machine lacks what it asks for: `trainer.on_missing=fallback`.

    keys of a cluster ──fallback──► the values that this machine has, and a line for each that another one had

No torch is loaded: what is installed is looked up, and devices are counted by their files.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.cluster import choose_address, num_cpus
from hybridflow.config.layout import num_processes
from hybridflow.config.load import Change
from hybridflow.config.needs import built_models
from hybridflow.config.trainer import TRACKER_LIBRARIES
from hybridflow.config.tree import get_value, keys_of
from hybridflow.distributed.accelerators import (
    accelerators,
    features,
    is_accelerator,
    no_accelerator,
    num_by_files,
)
from hybridflow.errors import ConfigError
from hybridflow.observability.trackers.libraries import check_library, is_installed
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
    """Return the changes of keys with which a run can start on this machine."""
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
    lacking = [name for name in chosen if name in TRACKER_LIBRARIES and not _is_usable(name)]
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
    if getattr(trainer, "resource_pools", {}) or choose_address(config.ray_kwargs.ray_init.address):
        return  # which device is whose was said in detail, or a cluster was named
    kind, offered = devices_here(device)
    most = 1  # processes on a CPU share its cores, so one is as fast, and it needs no Ray
    wanted = num_processes(trainer)
    here = f"{wanted} processes want one {features(kind).name} each, and this machine "
    if kind == "cpu":
        offered = config.ray_kwargs.ray_init.num_cpus or num_cpus()
        here += f"has {offered}"
    elif offered is None:
        most = trainer.n_gpus_per_node
        here += f"is one of the {trainer.nnodes} that were asked for"
    else:
        most = offered
        here += f"has {offered}"
    needed = True
    if wanted > 1 and not is_installed("ray"):
        here = f"{wanted} processes want ray, which is not installed"
        most = 1
    elif (offered is None or wanted <= offered) and trainer.nnodes == 1:
        if wanted == 1 or kind != "cpu" or device == "cpu" or no_accelerator() is None:
            return
        # the processes were meant for GPUs, and as many cores would have to hold as many models
        here = f"{wanted} processes want a GPU each, and this machine has none"
        needed = False
    if trainer.nnodes > 1:
        yield Change("trainer.nnodes", 1, here)
    if most != trainer.n_gpus_per_node:
        yield Change("trainer.n_gpus_per_node", most, here, needed)
    for path, info in keys_of(type(config)).items():
        if path.rpartition(".")[2] in SIZES and get_value(config, path) not in (info.default, None, 1, -1):
            yield Change(path, info.default, "the model is not spread over processes", needed)


def devices_here(device: str) -> tuple[str, int | None]:
    """Return the kind of device that `trainer.device` means here, and how many there are.

    They are counted by their files: torch is not loaded yet. None means that they cannot be counted so.
    """
    kinds = [device]
    if device == "auto":
        kinds = [kind for kind in accelerators() if kind != "cpu" and no_accelerator() is None]
    for kind in kinds:
        number = num_by_files(kind)
        if number != 0:
            return kind, number
    return "cpu", None


def _kernels(config: PPOConfig | SFTConfig) -> Iterator[Change]:
    lacking = no_accelerator()
    if lacking is None and config.trainer.device != "cpu" and find_spec("liger_kernel") is not None:
        return
    for block, model, _ in built_models(config):
        if model.use_liger:
            yield Change(
                f"{block}.use_liger", False, lacking or "Liger's kernels are not installed, or not for CPUs"
            )
