"""`hybridflow doctor`: versions, devices, the optional parts that are there, and the backends that are not."""

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
    """An optional part: the module that proves it and the package that brings it."""

    name: str
    module: str
    distribution: str


PARTS = (
    Part("many processes, many machines", "ray", "ray[default]"),
    Part("LoRA adapters", "peft", "peft"),
    Part("math rewards", "math_verify", "math-verify"),
    Part("reasoning-gym tasks", "reasoning_gym", "reasoning-gym"),
    Part("TensorBoard", "tensorboard", "tensorboard"),
    Part("Weights & Biases", "wandb", "wandb"),
    Part("MLflow", "mlflow", "mlflow"),
    Part("SwanLab", "swanlab", "swanlab"),
    Part("S3 files", "s3fs", "s3fs"),
    Part("ModelScope", "modelscope", "modelscope"),
)

LATER = (
    Part("generation by vLLM", "vllm", "vllm"),
    Part("generation by SGLang", "sglang", "sglang"),
    Part("training by Megatron", "megatron.core", "megatron-core"),
)


def show_machine() -> None:
    """Print what is here and what is missing, with the command that brings it."""
    console = Console()
    console.print(_machine())
    console.print(_parts())
    console.print(_later())


def _machine() -> Table:
    import torch

    table = Table("machine", "", title="This machine", title_justify="left")
    table.add_row("hybridflow", hybridflow.__version__)
    table.add_row("Python", platform.python_version())
    for name in ("torch", "transformers", "tensordict", "hydra-core"):
        table.add_row(name, importlib.metadata.version(name))
    table.add_row("CPU cores", f"{_usable_cores()} usable, torch uses {torch.get_num_threads()} threads")
    table.add_row("memory", f"{_memory_gib():.1f} GiB")
    table.add_row("disk free here", f"{shutil.disk_usage('.').free / 2**30:.1f} GiB")
    table.add_row("CPU vectors", torch.backends.cpu.get_cpu_capability())
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            table.add_row(f"CUDA device {index}", f"{card.name}, {card.total_memory / 2**30:.0f} GiB")
        table.add_row("training engine", "fsdp2, bfloat16 with float32 masters")
    else:
        table.add_row("CUDA", "none: runs use the CPU in float32")
        table.add_row("training engine", "fsdp2, float32")
    table.add_row("generation engine", "native, with the weights in training")
    return table


def _parts() -> Table:
    table = Table("optional part", "there", "to have it", title="Optional parts", title_justify="left")
    for part in PARTS:
        version = _version(part)
        table.add_row(part.name, version or "no", "" if version else f"pip install {part.distribution}")
    return table


def _later() -> Table:
    table = Table("backend", "its package", "", title="Backends to come", title_justify="left")
    for part in LATER:
        table.add_row(part.name, _version(part) or "not installed", "not in this version")
    return table


def _version(part: Part) -> str | None:
    if importlib.util.find_spec(part.module.partition(".")[0]) is None:
        return None
    try:
        return importlib.metadata.version(part.distribution.partition("[")[0])
    except importlib.metadata.PackageNotFoundError:
        return "yes"


def _usable_cores() -> int:
    """Cores that this process may use; macOS does not say, and gives all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
