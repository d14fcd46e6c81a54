"""The device a process computes on, and the threads it may use."""

from __future__ import annotations

import logging
from importlib import import_module

import torch

from hybridflow.distributed.accelerators import ACCELERATORS, check_package, features, is_accelerator
from hybridflow.errors import ConfigError

logger = logging.getLogger(__name__)


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the torch device that `auto`, `cpu`, `cuda` or `npu` means.

    `auto` is the first accelerator that is here, else the CPU. A ROCm build of torch calls AMD's GPUs `cuda`.
    `local_rank` picks one of the machine's devices.

    Raises ConfigError for another name, and for a device that this machine or this torch does not have.
    """
    kinds = [kind for kind in ACCELERATORS if kind != "cpu"]
    if name not in ("auto", *ACCELERATORS):
        known = ", ".join(["auto", *ACCELERATORS])
        raise ConfigError(f"trainer.device={name!r} is not a device: use one of {known}")
    if name == "auto":
        name = next((kind for kind in kinds if _available(kind)), "cpu")
    if name == "cpu":
        return torch.device("cpu")
    check_package(name)
    package = features(name).package
    if package is not None:
        import_module(package)  # it makes the device known to torch
    if not _available(name):
        raise ConfigError(
            f"trainer.device={name}, but no such device is usable here ({_build()}): set trainer.device=auto "
            "or cpu"
        )
    count = getattr(torch, name).device_count()
    if not 0 <= local_rank < count:
        raise ConfigError(
            f"local rank {local_rank} has no {features(name).name}: this machine shows {count}; set "
            f"trainer.n_gpus_per_node to at most {count}"
        )
    return torch.device(name, local_rank)


def set_current(device: torch.device) -> None:
    """Make an accelerator the current one of this thread; nothing on a CPU."""
    if is_accelerator(device.type):
        torch.get_device_module(device).set_device(device)


def _available(kind: str) -> bool:
    """Return whether torch knows a kind of accelerator and sees one."""
    module = getattr(torch, kind, None)
    return module is not None and bool(module.is_available())


def _build() -> str:
    """Return which accelerators this torch is built for."""
    if torch.version.cuda:
        return f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
    if torch.version.hip:
        return f"torch {torch.__version__} is built for ROCm {torch.version.hip}"
    return f"torch {torch.__version__} is built without CUDA"


def set_threads(num_threads: int | None) -> int:
    """Set the number of CPU threads of torch in this process, and return it; None leaves it as it is."""
    if num_threads is not None:
        if num_threads < 1:
            raise ConfigError(
                f"trainer.num_threads={num_threads}: use 1 or more, or null to leave torch's choice"
            )
        torch.set_num_threads(num_threads)
    logger.debug("torch uses %d CPU threads", torch.get_num_threads())
    return torch.get_num_threads()
