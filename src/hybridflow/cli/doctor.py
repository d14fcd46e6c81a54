"""`hybridflow doctor`: versions, devices, engines, optional parts, and what a run can ask for here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

import hybridflow
from hybridflow.observability.machine import cpu_model

SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Part:
    """An optional part: the module that shows it is installed, its package, and the extra that has it."""

    name: str
    module: str
    distribution: str
    extra: str


PARTS = (
    Part("many processes, many machines", "ray", "ray", "ray"),
    Part("LoRA adapters", "peft", "peft", "lora"),
    Part("Liger's kernels, on CUDA (use_liger)", "liger_kernel", "liger-kernel", "liger"),
    Part("serving over HTTP", "fastapi", "fastapi", "serve"),
    Part("math rewards", "math_verify", "math-verify", "math"),
    Part("reasoning-gym tasks", "reasoning_gym", "reasoning-gym", "tasks"),
    Part("TensorBoard", "tensorboard", "tensorboard", "tensorboard"),
    Part("Weights & Biases", "wandb", "wandb", "wandb"),
    Part("MLflow", "mlflow", "mlflow", "mlflow"),
    Part("SwanLab", "swanlab", "swanlab", "swanlab"),
    Part("S3 files", "s3fs", "s3fs", "remote"),
    Part("ModelScope", "modelscope", "modelscope", "remote"),
)


def show_machine() -> None:
    """Print what is installed and what is missing, with the command that installs it."""
    console = Console()
    console.print(_machine())
    console.print(_engines())
    console.print(_sandbox())
    console.print(_parts())


def _machine() -> Table:
    import torch

    table = Table("what", "here", title="This machine", title_justify="left")
    table.add_row("hybridflow", hybridflow.__version__)
    table.add_row("Python", platform.python_version())
    for name in ("torch", "transformers", "tensordict", "hydra-core"):
        table.add_row(name, importlib.metadata.version(name))
    cores = _usable_cores()
    threads = torch.get_num_threads()
    gpus = 0
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
    table.add_row(
        "CPU cores", f"{cores} usable; torch uses {threads} threads (OMP_NUM_THREADS, trainer.num_threads)"
    )
    table.add_row("memory", f"{_memory_gib():.1f} GiB")
    if Path(SHARED_MEMORY).is_dir():
        table.add_row(
            "shared memory",
            f"{shutil.disk_usage(SHARED_MEMORY).free / 2**30:.1f} GiB free: batches of many processes",
        )
    table.add_row("disk free here", f"{shutil.disk_usage('.').free / 2**30:.1f} GiB")
    table.add_row("CPU", f"{cpu_model()}, {torch.backends.cpu.get_cpu_capability()}")
    if gpus:
        for index in range(gpus):
            card = torch.cuda.get_device_properties(index)
            table.add_row(f"CUDA device {index}", f"{card.name}, {card.total_memory / 2**30:.0f} GiB")
        table.add_row("training engine", "fsdp2, bfloat16 with float32 masters")
        table.add_row("CUDA graphs", "decode steps are recorded, unless rollout.enforce_eager=true")
    else:
        table.add_row("CUDA", "none: runs use the CPU in float32")
        table.add_row("training engine", "fsdp2, float32")
        table.add_row("CUDA graphs", "no CUDA")
    table.add_row("attention over rows of any length", _varlen())
    table.add_row("processes of a run", _processes(gpus, cores))
    return table


def _varlen() -> str:
    """Return which attention over rows torch has, by its source, because importing it takes seconds."""
    spec = importlib.util.find_spec("torch.nn.attention.varlen")
    if spec is None or spec.origin is None:
        return "torch has none: scaled_dot_product_attention"
    if "block_table" in Path(spec.origin).read_text(encoding="utf-8"):
        return "torch has it, with a block table"
    return "torch has it, without a block table"


def _engines() -> Table:
    """Return a table of the engines: whether each can run here, and what to do where it cannot."""
    from hybridflow.config.engine_features import ENGINES

    table = Table(
        "engine",
        "here",
        "what it is, and how to have it",
        title="Generation (actor_rollout_ref.rollout.name)",
        title_justify="left",
    )
    for name, engine in ENGINES.items():
        state = ENGINE_STATES.get(name, partial(_server, name))
        here, way = state()
        table.add_row(name, here, Text(". ".join(text for text in (engine.what, way) if text)))
    return table


def _sandbox() -> Table:
    """Return a table of the sandbox's layers: whether each is active here, and why not."""
    from hybridflow.sandbox.layers import LAYERS
    from hybridflow.sandbox.sandbox import find_layers

    reasons = find_layers()
    table = Table(
        "layer",
        "here",
        "what it is; without it",
        title="Sandbox for programs of the model (reward.sandbox)",
        title_justify="left",
    )
    for name, layer in LAYERS.items():
        here = "yes"
        if reasons[name]:
            here = f"no: {reasons[name]}"
        table.add_row(name, Text(here), Text(f"{layer.what}; without it {layer.without}"))
    return table


def _server(name: str) -> tuple[str, str]:
    """Return the version of another project's engine, or no, and how to install it."""
    version = _version(name, name)
    if version is not None:
        return version, ""
    own = Path(f".venv-{name}/bin/python")
    if own.exists():
        return f"in {own.parent.parent}", f"set actor_rollout_ref.rollout.server.python={own}"
    return (
        "no",
        f"pip install 'hybridflow[{name}]' on CUDA, scripts/setup_{name}.sh on a CPU, or "
        "rollout.server.address of a server that runs",
    )


def _over_http() -> tuple[str, str]:
    if _version("httpx", "httpx"):
        return "yes", "Not to train with"
    return "no", "pip install 'hybridflow[openai]'; not to train with"


ENGINE_STATES: Mapping[str, Callable[[], tuple[str, str]]] = {
    "native": lambda: ("yes", "The default"),
    "hf": lambda: (importlib.metadata.version("transformers"), ""),
    "openai": _over_http,
}


def _processes(gpus: int, cores: int) -> str:
    """Return what `trainer.nnodes` and `trainer.n_gpus_per_node` may be here."""
    if importlib.util.find_spec("ray") is None:
        return "1; more need the extra ray"
    if address := os.environ.get("RAY_ADDRESS"):
        return f"as many as the Ray cluster at RAY_ADDRESS={address} has devices (`ray status`)"
    if gpus:
        return f"trainer.n_gpus_per_node up to {gpus}, one a GPU"
    return (
        f"trainer.n_gpus_per_node up to {cores}, one a core; more may share them "
        "(ray_kwargs.ray_init.num_cpus)"
    )


def _parts() -> Table:
    table = Table("optional part", "there", "to have it", title="Optional parts", title_justify="left")
    for part in PARTS:
        version = _version(part.module, part.distribution)
        if version:
            table.add_row(part.name, version, "")
        else:
            table.add_row(part.name, "no", Text(f"pip install 'hybridflow[{part.extra}]'"))
    table.add_row("training by Megatron", "no", "not in this version")
    return table


def _version(module: str, distribution: str) -> str | None:
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "yes"


def _usable_cores() -> int:
    """Return how many cores this process may use; macOS does not say, so there it is all of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
