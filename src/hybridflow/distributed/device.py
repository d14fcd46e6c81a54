"""The device and the threads of a process, and measurements of the machine and of memory."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch

from hybridflow.distributed.accelerators import (
    accelerators,
    built_in,
    check_package,
    device_problem,
    features,
    is_accelerator,
)
from hybridflow.errors import ConfigError

logger = logging.getLogger(__name__)


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the torch device that `auto`, or a device of the table of accelerators, means.

    `auto` is the first accelerator that is here, else the CPU. The device's package is imported. A ROCm
    build of torch calls AMD's GPUs `cuda`.
    `local_rank` picks one of the machine's devices.

    Raises ConfigError for another name, and for a device that this machine or this torch does not have.
    """
    problem = device_problem(name)
    if problem is not None:
        raise ConfigError(problem)
    if name == "auto":
        name = _first_available()
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
    count = num_devices(name)
    if not 0 <= local_rank < count:
        raise ConfigError(
            f"local rank {local_rank} has no {features(name).name}: this machine shows {count}; set "
            f"trainer.n_gpus_per_node to at most {count}"
        )
    return torch.device(name, local_rank)


def _first_available() -> str:
    """Return the first kind of accelerator that is here, or cpu; plugins are asked where no other is."""
    for rows in (built_in, accelerators):
        for kind in rows():
            if kind != "cpu" and _available(kind):
                return kind
    return "cpu"


def set_current(device: torch.device) -> None:
    """Make an accelerator the current one of this thread; nothing on a CPU."""
    if is_accelerator(device.type):
        torch.get_device_module(device).set_device(device)


def shown_as(device: torch.device) -> tuple[str, str] | None:
    """Return the environment variable that shows devices of this kind to a process, and what it has to be
    for a process that is to see this one alone; None where there is no such variable.
    """
    variables = features(device.type).visible
    if not variables:
        return None
    variable = next((name for name in variables if os.environ.get(name)), variables[0])
    index = device.index or 0
    listed = os.environ.get(variable)
    return variable, listed.split(",")[index] if listed else str(index)


def num_devices(kind: str) -> int:
    """Return the number of devices of a kind that this process sees; 0 where torch does not know the kind."""
    module = getattr(torch, kind, None)
    if module is None:
        return 0
    return int(module.device_count())


def _available(kind: str) -> bool:
    """Return whether torch knows a kind of accelerator and sees one."""
    module = getattr(torch, kind, None)
    return module is not None and bool(module.is_available())


def _build() -> str:
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


def used_accelerator() -> torch.device | None:
    """Return the accelerator that this process has used, or None where it has used none."""
    own = torch.accelerator.current_accelerator()
    if own is None or not is_accelerator(own.type):
        return None
    module = torch.get_device_module(own)
    if module.is_available() and module.is_initialized():
        return torch.device(own.type, module.current_device())
    return None


STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
_SIDE = 512
_NUMBERS = 4 * 2**20
_OPERATIONS = 200


class MeasuredCPU(NamedTuple):
    """Figures of one process with its threads, in float32."""

    peak: float
    """FLOPs a second of a matrix product."""
    bandwidth: float
    """Bytes a second read and written by a copy that no cache holds."""
    memory: float
    """Bytes of main memory."""
    operation: float
    """Seconds of a forward operation on a few numbers: what torch and Python take for it, and a third of what
    they take for it and its gradient.
    """


def measured_cpu() -> MeasuredCPU:
    """Measure for some hundredths of a second, once in a process for each number of threads."""
    return _measure_cpu(torch.get_num_threads())


@cache
def _measure_cpu(num_threads: int) -> MeasuredCPU:
    """Return the best of a few products and copies; `num_threads` is what torch has now."""
    left = torch.ones(_SIDE, _SIDE)
    source = torch.ones(_NUMBERS)
    target = torch.empty_like(source)
    product = _best(lambda: torch.mm(left, left))
    copy = _best(lambda: target.copy_(source))
    # one thread computes them, and that it waits for a core is no part of their price
    chain = _best(_small_operations, num_tries=20, clock=time.thread_time)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return MeasuredCPU(
        2.0 * _SIDE**3 / product, 2.0 * source.nbytes / copy, float(memory), chain / _OPERATIONS / 3
    )


@torch.enable_grad()
def _small_operations() -> None:
    """Compute operations on a few numbers one after the other, and their gradients."""
    value = torch.ones(8, 16, requires_grad=True)
    for _ in range(_OPERATIONS):
        value = value * 1.01
    value.sum().backward()


def _best(
    work: Callable[[], object], num_tries: int = 5, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the fewest seconds of some tries, which other processes disturb least."""
    work()
    tries = []
    for _ in range(num_tries):
        began = clock()
        work()
        tries.append(clock() - began)
    return max(min(tries), 1e-9)


def peak_since_asked() -> int:
    """Return the most bytes that this process has had since the last call: on its accelerator where it has
    one, else in main memory; 0 where the system does not report it.
    """
    device = used_accelerator()
    if device is not None:
        module = torch.get_device_module(device)
        peak = module.max_memory_allocated()
        module.reset_peak_memory_stats()
        return int(peak)
    try:
        lines = STATUS.read_text().splitlines()
        CLEAR.write_text("5")  # the kernel counts the peak again
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
