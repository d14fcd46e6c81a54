"""What differs between accelerators, as a table. No torch is imported here.

trainer.device ──► features("cuda") ──► backend of collectives, resource of Ray, what its kernels can do

A ROCm build of torch calls AMD's GPUs `cuda`, and its NCCL is RCCL: it has the row of CUDA. Memory, current
device and streams are asked of `torch.get_device_module(device)`, which has the same functions for all.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hybridflow.errors import ConfigError

KEPT_BYTES = 256 * 2**20
"""Most bytes of logits that training keeps for the backward pass, where one of the head's four products is
then spared.
"""


@dataclass(frozen=True)
class Accelerator:
    """A kind of device, by torch's name of it."""

    device: str
    """torch's device type."""
    name: str
    """The name in messages."""
    resource: str
    """Ray's resource, of which a process takes one."""
    backend: str
    """Backend of torch.distributed for tensors on the device."""
    visible: tuple[str, ...]
    """Environment variables that say which devices a process sees; the first is torch's own."""
    package: str | None = None
    """Package without which torch does not know the device."""
    dtype: str = "bfloat16"
    """The dtype of models where none is set."""
    pins_memory: bool = True
    """Copies from pinned main memory run beside the computation."""
    records_steps: bool = False
    """Decode steps are recorded as graphs of CUDA."""
    varlen_attention: bool = False
    """torch's attention over rows of any length may have a kernel there; it is tried before it is used."""
    triton: bool = False
    """Triton programs run there, Liger's kernels among them."""
    logits_bytes: int = 2**30
    """Size of a chunk of logits in training. Each chunk costs a pass over the gradient of the head, and on an
    accelerator that pass costs as much as many tokens; on a CPU, chunks had better fit in its caches.
    """


_ROWS = (
    Accelerator("cpu", "CPU", "CPU", "gloo", (), dtype="float32", pins_memory=False, logits_bytes=64 * 2**20),
    Accelerator(
        "cuda",
        "GPU",
        "GPU",
        "nccl",
        ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        records_steps=True,
        varlen_attention=True,
        triton=True,
    ),
    Accelerator("npu", "NPU", "NPU", "hccl", ("ASCEND_RT_VISIBLE_DEVICES",), package="torch_npu"),
)
ACCELERATORS = {row.device: row for row in _ROWS}


def features(device: str) -> Accelerator:
    """Return the row of a device type; one that has none (meta) can do what a CPU can."""
    return ACCELERATORS.get(device, ACCELERATORS["cpu"])


def is_accelerator(device: str) -> bool:
    """Return whether a device type is one of the accelerators of the table."""
    return features(device).device != "cpu"


DEVICE_FILES = ("nvidia[0-9]*", "nvidiactl", "kfd", "dxg", "davinci*")
"""Files in /dev of NVIDIA's, AMD's and Ascend's devices, and of GPUs under Windows' Linux."""


def no_accelerator() -> str | None:
    """Return the reason torch can find no accelerator on this machine, or None where it may find one.

    Nothing is imported. What neither the files in /dev nor the installed torch rule out is for torch to say.
    """
    devices = Path("/dev")
    if platform.system() == "Linux" and not any(list(devices.glob(name)) for name in DEVICE_FILES):
        return "this machine shows no GPU and no NPU in /dev"
    torch = find_spec("torch")
    if torch is None or torch.origin is None or find_spec("torch_npu") is not None:
        return None
    try:
        built = (Path(torch.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    kinds = dict(re.findall(r"^(__version__|cuda|hip|xpu)\b[^=\n]*= *(.*)$", built, re.MULTILINE))
    if kinds.get("cuda") == kinds.get("hip") == kinds.get("xpu", "None") == "None":
        version = kinds.get("__version__", "").strip("'")
        return f"torch {version} is built for CPUs"
    return None


def check_package(device: str) -> None:
    """Raise ConfigError if `trainer.device` names a device that torch does not know without a package."""
    row = ACCELERATORS.get(device)
    if row is not None and row.package is not None and find_spec(row.package) is None:
        raise ConfigError(
            f"trainer.device={device}, but {row.package} is not installed, without which torch knows no "
            f"{row.name}: install the {row.package} of this torch, or set trainer.device=auto, cuda or cpu"
        )
