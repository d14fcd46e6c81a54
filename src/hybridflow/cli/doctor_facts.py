"""What `hybridflow doctor` reads from a machine: `Facts`, each read once, when it is first needed.

torch and transformers are imported in a separate process (`probe`): a broken installation may crash that
process, and the doctor reports it.
"""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import json
import locale
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

SHARED_MEMORY = Path("/dev/shm")
CGROUPS = Path("/sys/fs/cgroup")
PROBE_SECONDS = 180.0
"""Seconds in which the process that imports torch and transformers must have ended."""
COMMAND_SECONDS = 20.0
"""Seconds in which a program of the driver must have answered."""
COMPILERS = ("cc", "gcc", "g++", "clang", "nvcc", "ninja")
LISTENS = "0A"
"""The state of a socket that listens, as /proc/net/tcp writes it."""
_PROBE = """
import importlib.util, json

facts = {"failed": {}}
def tell():
    print("\\n" + json.dumps(facts), flush=True)
def attempt(name, action):
    try:
        return action()
    except BaseException as error:
        text = str(error).strip().splitlines() or [""]
        facts["failed"][name] = f"{type(error).__name__}: {text[-1]}"
torch = attempt("torch", lambda: __import__("torch"))
if torch is not None:
    facts["torch"] = torch.__version__
    facts["cuda_build"] = torch.version.cuda
    facts["rocm_build"] = torch.version.hip
    facts["threads"] = torch.get_num_threads()
    facts["vectors"] = torch.backends.cpu.get_cpu_capability()
    facts["cards"] = []
    tell()
    def kinds():
        from hybridflow.distributed.accelerators import accelerators
        return list(accelerators())
    def cards(kind):
        from hybridflow.distributed.facilities import facilities
        return [{"device": kind, **each} for each in facilities(kind).cards()]
    for kind in attempt("accelerators", kinds) or []:
        facts["cards"] += attempt(kind, lambda: cards(kind)) or []
    tell()
    for name in ("torchvision", "torchaudio"):
        if importlib.util.find_spec(name):
            attempt(name, lambda: __import__(name))
    tell()
    attempt("transformers", lambda: __import__("transformers").LlamaForCausalLM)
tell()
"""


@dataclass(frozen=True)
class Distribution:
    """An installed package: its version, and what it requires where no extra was asked for."""

    name: str
    version: str
    requires: tuple[Requirement, ...] = ()


@dataclass(frozen=True)
class Probe:
    """What a process found that imported torch, torchvision where it is there, and a model class."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    ended: str = ""
    """How the process ended where it did not end by itself, or "" where it did."""

    @property
    def cards(self) -> list[dict[str, Any]]:
        """The accelerators that torch sees: device type, name, bytes and, of CUDA, the first part of the
        compute capability.
        """
        return list(self.facts.get("cards", []))

    @property
    def failed(self) -> dict[str, str]:
        """The last line of the error for each package that could not be imported."""
        return dict(self.facts.get("failed", {}))


@dataclass(frozen=True)
class Memory:
    """Bytes of main memory."""

    total: int
    available: int
    swap_used: int
    limit: int | None
    """What the control group (of a container, of a job) may use, where it has a limit below the total."""


def probe(seconds: float = PROBE_SECONDS) -> Probe:
    """Import torch, torchvision and a model class in a separate process, and return its report."""
    command = [sys.executable, "-c", _PROBE]
    ended = ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        said = done.stdout
        if done.returncode < 0:
            ended = f"it was ended by signal {-done.returncode}"
        elif done.returncode:
            ended = f"it ended with status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode(errors="replace")
        ended = f"it had not ended after {seconds:.0f} s"
    told = [line for line in said.splitlines() if line.startswith('{"failed"')]
    if told:
        return Probe(json.loads(told[-1]), ended)
    return Probe({}, ended or "it said nothing")


def _requirement(text: str) -> Requirement | None:
    """Return the requirement where it holds here without any extra."""
    if "extra ==" in text:  # most of them are, and evaluating a marker costs more than reading it
        return None
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return None
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        return requirement
    return None


def normalised(name: str) -> str:
    """Return a package's name in the spelling by which names are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _nvidia_smi(*words: str) -> str:
    """Return what nvidia-smi prints, or "" where it is not there or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *words], capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _owners(inodes: set[str]) -> dict[str, str]:
    """Return the names of the processes that hold these sockets, as far as this user may look."""
    owners = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            for entry in os.scandir(folder / "fd"):
                inode = os.readlink(entry.path).removeprefix("socket:[").removesuffix("]")
                if inode in inodes:
                    owners[inode] = (folder / "comm").read_text(encoding="utf-8").strip()
        except OSError:
            continue  # another user's, or it has just ended
    return owners


def _memory_limits(groups: Path = Path("/proc/self/cgroup"), root: Path = CGROUPS) -> Iterator[int]:
    """Yield the limits in bytes of this process's control group and those above: a container's, Slurm's."""
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            mount, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        for group in (Path(path), *Path(path).parents):
            try:
                text = (mount / group.relative_to("/") / name).read_text(encoding="ascii").strip()
            except OSError:
                continue  # the group of another mount, or a root without limits
            if text.isdigit():
                yield int(text)


def _free(path: Path) -> int:
    """Return the free bytes of the file system of a folder that may be still to make."""
    there = next(each for each in (path, *path.parents) if each.exists())
    return shutil.disk_usage(there).free


class Facts:
    """This machine. Nothing is decided here."""

    @cached_property
    def probe(self) -> Probe:
        return probe()

    @cached_property
    def installed(self) -> dict[str, Distribution]:
        """The installed packages by normalised name."""
        found: dict[str, Distribution] = {}
        for each in importlib.metadata.distributions():
            name = each.metadata["Name"]
            if name is None:
                continue
            required = tuple(filter(None, map(_requirement, each.requires or [])))
            found.setdefault(normalised(name), Distribution(name, each.version, required))
        return found

    @cached_property
    def memory(self) -> Memory:
        """Main memory as the kernel counts it, and the limit of a container or a job."""
        values = {}
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            values[name] = int(rest.split()[0]) * 1024
        limits = [limit for limit in _memory_limits() if limit < values["MemTotal"]]
        limit = min(limits, default=None)
        swap_used = values.get("SwapTotal", 0) - values.get("SwapFree", 0)
        return Memory(values["MemTotal"], values["MemAvailable"], swap_used, limit)

    @cached_property
    def compilers(self) -> list[str]:
        """The compilers that are found."""
        return [name for name in COMPILERS if shutil.which(name)]

    @cached_property
    def header(self) -> bool:
        """Whether Python.h is there, which every extension module includes."""
        return Path(sysconfig.get_path("include"), "Python.h").is_file()

    @cached_property
    def topology(self) -> str:
        """How GPUs are joined, as nvidia-smi draws it."""
        return _nvidia_smi("topo", "-m")

    @cached_property
    def driver(self) -> list[dict[str, str]]:
        """Index, name, total and used MiB of each GPU that the driver shows."""
        names = ("index", "name", "memory.total", "memory.used")
        text = _nvidia_smi(f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits")
        rows = csv.reader(text.splitlines(), skipinitialspace=True)
        return [dict(zip(names, row)) for row in rows if len(row) == len(names)]

    @cached_property
    def listening(self) -> dict[int, str]:
        """The TCP ports on which some process of this machine listens, each with its name where known."""
        inodes: dict[str, int] = {}
        for file in ("/proc/net/tcp", "/proc/net/tcp6"):
            try:
                lines = Path(file).read_text(encoding="ascii").splitlines()[1:]
            except OSError:
                continue
            for fields in map(str.split, lines):
                if fields[3] == LISTENS:
                    inodes[fields[9]] = int(fields[1].rpartition(":")[2], 16)
        names = _owners(set(inodes))
        return {port: names.get(inode, "") for inode, port in inodes.items()}

    @cached_property
    def ephemeral(self) -> tuple[int, int]:
        """The first and last port that the kernel gives to outgoing connections."""
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
        return int(first), int(last)

    @cached_property
    def shared_memory(self) -> tuple[int, int] | None:
        """The total and free bytes of /dev/shm, or None where there is none."""
        if not SHARED_MEMORY.is_dir():
            return None
        usage = shutil.disk_usage(SHARED_MEMORY)
        return usage.total, usage.free

    @cached_property
    def ray(self) -> bool:
        return importlib.util.find_spec("ray") is not None

    @cached_property
    def disk(self) -> dict[str, int]:
        """The free bytes where a run, the hub's cache and temporary files are kept."""
        cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HF_HOME") or "~/.cache/huggingface"
        places = {
            "run folders (here)": Path.cwd(),
            "models of the hub (HF_HOME)": Path(cache).expanduser(),
            "temporary files (TMPDIR)": Path(os.environ.get("TMPDIR", "/tmp")),
        }
        return {f"{name}, {path}": _free(path) for name, path in places.items()}

    @cached_property
    def open_files(self) -> int:
        """How many files a process may have open; -1: no limit."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    @cached_property
    def encoding(self) -> str:
        return locale.getpreferredencoding(False)

    @cached_property
    def clock(self) -> tuple[float, float]:
        """The time now, and when this package was put here, in seconds since 1970."""
        return time.time(), Path(__file__).stat().st_mtime

    @cached_property
    def layers(self) -> dict[str, str]:
        """The reason why a layer of the sandbox is not active, or "", by layer."""
        from hybridflow.sandbox.sandbox import find_layers

        return find_layers()

    @cached_property
    def missing_layers(self) -> list[str]:
        """The layers that a run with programs of the model may not be without, and that are not active."""
        from hybridflow.sandbox.layers import missing_layers

        return sorted(missing_layers(self.layers, is_root=os.geteuid() == 0))
