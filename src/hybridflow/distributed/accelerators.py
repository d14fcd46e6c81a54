"""What differs between accelerators, as a table that plugins extend. No torch is imported here.

trainer.device ──► features("cuda") ──► backend of collectives, resource of Ray, what its kernels can do
                                   └──► facilities: what only this kind of device has (`facilities.py`)

A plugin is an installed package with an entry point of the group `hybridflow.accelerators`, whose object is
an `Accelerator` or a sequence of them. Its rows come behind those of this file, which are found without it.

A ROCm build of torch calls AMD's GPUs `cuda`, and its NCCL is RCCL: it has the row of CUDA. Memory, current
device and streams are asked of `torch.get_device_module(device)`, which has the same functions for all.
"""

from __future__ import annotations

import difflib
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path

from hybridflow.errors import ConfigError

GROUP = "hybridflow.accelerators"
"""Group of the entry points that name rows of plugins."""
GPU = "cuda"
"""torch's device type of NVIDIA's and AMD's GPUs, whose data sheets the planner has."""
RING_QUERIES = 512
"""Queries that ring attention scores at a time."""
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
    """Ray's resource, of which a process takes one: CPU, GPU, or one of Ray's custom resources."""
    backend: str
    """Backend of torch.distributed for tensors on the device."""
    visible: tuple[str, ...] = ()
    """Environment variables that say which devices a process sees; the first is torch's own."""
    files: tuple[str, ...] = ()
    """Patterns of paths from the root, of each of which a device has one file. The first that finds any
    counts the devices without torch; with none they cannot be counted so. (WSL has one file for all.)
    """
    package: str | None = None
    """Package without which torch does not know the device; it is imported before the device is used."""
    facilities: str = "hybridflow.distributed.facilities:Facilities"
    """Class of what the device can do beyond torch's general interface, as `module:Class`. It is imported
    when a process needs it, and made without arguments.
    """
    dtype: str = "bfloat16"
    """The dtype of models where none is set."""
    pins_memory: bool = True
    """Copies from pinned main memory run beside the computation."""
    records_steps: bool = False
    """Decode steps are recorded as graphs: `Facilities.recorder` gives a recorder."""
    varlen_attention: bool = False
    """torch's attention over rows of any length may have a kernel there; it is tried before it is used."""
    triton: bool = False
    """Triton programs run there, Liger's kernels among them."""
    shares_memory: bool = False
    """Another process of the machine can open a tensor: `Facilities.share_memory` and `open_memory`."""
    profilers: tuple[str, ...] = ()
    """Values of global_profiler.tool that need the device: torch_memory (`Facilities.start_memory_history`),
    nsys (`Facilities.start_capture_range`).
    """
    logits_bytes: int = 2**30
    """Size of a chunk of logits in training. Each chunk costs a pass over the gradient of the head, and on an
    accelerator that pass costs as much as many tokens; on a CPU, chunks had better fit in its caches.
    """


_ROWS = (
    Accelerator("cpu", "CPU", "CPU", "gloo", dtype="float32", pins_memory=False, logits_bytes=64 * 2**20),
    Accelerator(
        GPU,
        "GPU",
        "GPU",
        "nccl",
        ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        files=("dev/nvidia[0-9]*", "sys/bus/pci/drivers/amdgpu/*:*", "dev/dxg"),
        facilities="hybridflow.distributed.cuda:CudaFacilities",
        records_steps=True,
        varlen_attention=True,
        triton=True,
        shares_memory=True,
        profilers=("torch_memory", "nsys"),
    ),
    Accelerator(
        "npu",
        "NPU",
        "NPU",
        "hccl",
        ("ASCEND_RT_VISIBLE_DEVICES",),
        files=("dev/davinci[0-9]*",),
        package="torch_npu",
    ),
)
_BUILT_IN = {row.device: row for row in _ROWS}


def built_in() -> dict[str, Accelerator]:
    """Return the rows of this file by their device types; no plugin is loaded."""
    return _BUILT_IN


def accelerators() -> dict[str, Accelerator]:
    """Return all rows by their device types: those of this file, then those of plugins.

    Raises ConfigError, which names the distribution, for a plugin that cannot be loaded, that gives something
    other than rows, or whose device has a row already.
    """
    return {**_BUILT_IN, **_plugins()}


def features(device: str) -> Accelerator:
    """Return the row of a device type; one that has none (meta) can do what a CPU can.

    Plugins are loaded for devices that this file does not name. ConfigError as of `accelerators`.
    """
    row = _BUILT_IN.get(device)
    if row is None and device != "meta":
        row = _plugins().get(device)
    return row or _BUILT_IN["cpu"]


def is_accelerator(device: str) -> bool:
    """Return whether a device type is one of the accelerators of the table."""
    return features(device).device != "cpu"


def device_problem(name: str) -> str | None:
    """Return the problem of a value of `trainer.device`, or None for auto and devices of the table.

    Plugins are loaded for names that this file does not have.
    """
    if name == "auto" or name in _BUILT_IN:
        return None
    try:
        known = ["auto", *accelerators()]
    except ConfigError as error:
        return str(error)
    if name in known:
        return None
    problem = f"trainer.device: got {name!r} (str), wanted one of {', '.join(map(repr, known))}"
    near = difflib.get_close_matches(name, known, n=1)
    return problem + "".join(f" (did you mean {each!r}?)" for each in near)


@cache
def _points() -> tuple[EntryPoint, ...]:
    """Return the entry points of installed plugins, by the names of their distributions."""
    return tuple(sorted(entry_points(group=GROUP), key=lambda point: (_owner(point), point.name)))


@cache
def _plugins() -> dict[str, Accelerator]:
    """Return the rows of installed plugins by their device types."""
    found: dict[str, Accelerator] = {}
    owners = dict.fromkeys(_BUILT_IN, "hybridflow itself")
    for point in _points():
        owner = _owner(point)
        for row in _rows_of(point):
            if row.device in owners:
                raise ConfigError(
                    f"{owner} adds a device {row.device!r} (entry point {point.name} of {GROUP}), which "
                    f"{owners[row.device]} has already: uninstall one of them"
                )
            found[row.device] = row
            owners[row.device] = owner
    return found


def _owner(point: EntryPoint) -> str:
    """Return the name and version of the distribution that an entry point belongs to."""
    if point.dist is None:
        return "an unnamed distribution"
    return f"{point.dist.name} {point.dist.version}"


def _rows_of(point: EntryPoint) -> Iterator[Accelerator]:
    """Yield the rows that an entry point gives; ConfigError where it gives none."""
    where = f"{_owner(point)} offers accelerators as {point.value} (entry point {point.name} of {GROUP})"
    way_out = f"mend or uninstall {_owner(point)}"
    try:
        given = point.load()
    except Exception as error:  # whatever a plugin's own code raises
        raise ConfigError(
            f"{where}, which cannot be loaded ({type(error).__name__}: {error}): {way_out}"
        ) from error
    rows = [given]
    if isinstance(given, Sequence) and not isinstance(given, str):
        rows = list(given)
    for row in rows:
        if not isinstance(row, Accelerator):
            raise ConfigError(
                f"{where}, which holds {row!r} where an Accelerator or a sequence of them is wanted: "
                f"{way_out}"
            )
        yield row


ROOT = Path("/")
DEVICE_FILES = ("nvidia[0-9]*", "nvidiactl", "kfd", "dxg", "davinci*")
"""Files in /dev of NVIDIA's, AMD's and Ascend's devices, and of GPUs under Windows' Linux."""


def num_by_files(device: str) -> int | None:
    """Return how many devices of a kind this machine has by their files, or None where they have none."""
    patterns = features(device).files
    if not patterns:
        return None
    counts = (len(list(ROOT.glob(pattern))) for pattern in patterns)
    return next(filter(None, counts), 0)


def no_accelerator() -> str | None:
    """Return the reason torch can find no accelerator on this machine, or None where it may find one.

    Nothing is imported. What neither the files in /dev nor the installed torch rule out is for torch to say,
    and so is everything where a plugin knows a device, whose files in /dev are not known here.
    """
    if _points():
        return None
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
    row = features(device)
    if row.package is not None and find_spec(row.package) is None:
        raise ConfigError(
            f"trainer.device={device}, but {row.package} is not installed, without which torch knows no "
            f"{row.name}: install the {row.package} of this torch, or set trainer.device=auto, cuda or cpu"
        )
