"""The device a process computes on, and the threads it may use."""

from __future__ import annotations

import logging

import torch

from hybridflow.errors import ConfigError

logger = logging.getLogger(__name__)


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the torch device that `auto` (CUDA where there is one, else CPU), `cpu` or `cuda` means.

    `local_rank` picks one of the machine's GPUs.

    Raises ConfigError for another name, and for `cuda` on a machine without one.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"trainer.device={name!r} is not a device: use auto, cpu or cuda")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = f"torch {torch.__version__} is built without CUDA"
        if torch.version.cuda:
            built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
        raise ConfigError(
            f"trainer.device=cuda, but no CUDA device is usable here ({built}): set trainer.device=auto or "
            "cpu"
        )
    count = torch.cuda.device_count()
    if not 0 <= local_rank < count:
        raise ConfigError(
            f"local rank {local_rank} has no GPU: this machine shows {count}; set trainer.n_gpus_per_node "
            f"to at most {count}"
        )
    return torch.device("cuda", local_rank)


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
