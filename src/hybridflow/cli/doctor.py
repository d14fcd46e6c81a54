"""`hybridflow doctor`: versions, devices, and for each optional part what it needs and whether it is there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

import hybridflow


@dataclass(frozen=True)
class Part:
    """An optional part: the module that proves it and the extra that brings it."""

    name: str
    module: str
    distribution: str
    remedy: str


PARTS = (
    Part("math rewards", "math_verify", "math-verify", "pip install 'hybridflow[math]'"),
    Part("reasoning-gym tasks", "reasoning_gym", "reasoning-gym", "pip install 'hybridflow[tasks]'"),
    Part("TensorBoard", "tensorboard", "tensorboard", "pip install 'hybridflow[tensorboard]'"),
    Part("Weights & Biases", "wandb", "wandb", "pip install 'hybridflow[wandb]'"),
    Part("MLflow", "mlflow", "mlflow", "pip install 'hybridflow[mlflow]'"),
    Part("SwanLab", "swanlab", "swanlab", "pip install 'hybridflow[swanlab]'"),
    Part("S3 files", "s3fs", "s3fs", "pip install 'hybridflow[remote]'"),
    Part("ModelScope", "modelscope", "modelscope", "pip install 'hybridflow[remote]'"),
)


def show_machine() -> None:
    """Print what is here and what is missing, with the command that brings it."""
    console = Console()
    console.print(_machine())
    console.print(_parts())


def _machine() -> Table:
    import torch

    table = Table("machine", "", title="This machine", title_justify="left")
    table.add_row("hybridflow", hybridflow.__version__)
    table.add_row("Python", platform.python_version())
    for name in ("torch", "transformers", "tensordict", "hydra-core"):
        table.add_row(name, importlib.metadata.version(name))
    table.add_row("CPU cores", f"{len(os.sched_getaffinity(0))} usable, torch uses {torch.get_num_threads()} threads")
    table.add_row("memory", f"{_memory_gib():.1f} GiB")
    table.add_row("disk free here", f"{shutil.disk_usage('.').free / 2**30:.1f} GiB")
    table.add_row("CPU vectors", torch.backends.cpu.get_cpu_capability())
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            table.add_row(f"CUDA device {index}", f"{card.name}, {card.total_memory / 2**30:.0f} GiB")
        table.add_row("training engine", "fsdp2, one process, bfloat16 with float32 masters")
    else:
        table.add_row("CUDA", "none: runs use the CPU in float32")
        table.add_row("training engine", "fsdp2, one process, float32")
    table.add_row("generation engine", "native: shares the training module's weights")
    return table


def _parts() -> Table:
    table = Table("optional part", "there", "remedy", title="Optional parts", title_justify="left")
    for part in PARTS:
        there = importlib.util.find_spec(part.module) is not None
        table.add_row(part.name, importlib.metadata.version(part.distribution) if there else "no", "" if there else part.remedy)
    return table


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
