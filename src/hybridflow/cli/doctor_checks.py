"""The checks of `hybridflow doctor`: facts go in, findings come out, and nothing is read from the machine.

`stop` makes training impossible, `warn` will hurt some runs, `note` is good to know.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hybridflow.cli.doctor_facts import Distribution, Memory, Probe, normalised

Level = Literal["stop", "warn", "note"]
GIB = 2**30
RAY_SHARE = 0.3
"""The part of the memory that Ray takes for its object store, if nothing is set."""
MIN_DISK = 5 * GIB
MIN_OPEN_FILES = 4096
RAY_WORKER_PORTS = range(10_002, 20_000)
"""The ports that Ray gives to its workers, if nothing is set."""
PORTS = {
    6379: "`ray start --head` wants it: give --port of another one",
    8000: "`hybridflow serve` wants it: give --port of another one, or --port 0 for any that is free",
    8265: "Ray's dashboard wants it: set ray_kwargs.ray_init.dashboard_port, or `ray start --dashboard-port`",
    10001: "Ray's client server wants it: `ray start --ray-client-server-port`",
}
IMPORTED = ("torch", "torchvision", "torchaudio", "transformers")
"""Packages that the probe imports; what else failed there is a kind of device."""
TOGETHER = ("torch", "transformers", "tokenizers", "huggingface-hub", "numpy", "openai", "httpx2", "pydantic")
"""Packages about which others disagree most: only their conflicts are told."""


@dataclass(frozen=True)
class Finding:
    """Something that somebody should know about this machine."""

    level: Level
    check: str
    here: str
    """What was found."""
    todo: str
    """What to do about it."""


def check_imports(probe: Probe) -> Iterator[Finding]:
    """torch, and a model class of transformers, which every training needs."""
    failed = probe.failed
    if "torch" in failed:
        todo = "install the build of torch for this machine, then hybridflow again"
        yield Finding("stop", "torch", failed["torch"], todo)
    elif "torch" not in probe.facts:
        todo = "try `python -c 'import torch'`: without torch nothing trains"
        yield Finding("stop", "torch", f"the process that imported it told nothing: {probe.ended}", todo)
    if "accelerators" in failed:
        yield Finding("stop", "accelerators", failed["accelerators"], "mend or uninstall that plugin")
    for kind in failed.keys() - {*IMPORTED, "accelerators"}:
        todo = "try `nvidia-smi`, or what its driver has; until it works, trainer.device=cpu"
        yield Finding("warn", kind.upper(), failed[kind], todo)
    for name in ("torchvision", "torchaudio"):
        if name in failed:
            yield _misfit(name, failed)
    if "transformers" in failed and not {"torchvision", "torchaudio", "torch"} & set(failed):
        todo = "pip install --upgrade --force-reinstall transformers, then look again"
        yield Finding("stop", "transformers", f"no model class can be had: {failed['transformers']}", todo)
    elif probe.ended and "torch" in probe.facts:
        todo = "try `python -c 'from transformers import LlamaForCausalLM'`"
        here = f"the process that imported a model class did not do it: {probe.ended}"
        yield Finding("stop", "transformers", here, todo)


def _misfit(name: str, failed: Mapping[str, str]) -> Finding:
    here = f"{name} does not fit torch: {failed[name]}"
    todo = f"pip uninstall {name} (text needs none of it), or install its build for this torch"
    if "transformers" not in failed:
        return Finding("warn", name, here, todo)
    told = f"{here}. transformers then fails for every model, with words that do not name it"
    return Finding("stop", name, told, todo)


def check_torchvision(installed: Mapping[str, Distribution]) -> Iterator[Finding]:
    """Packages that are built for one version of torch: torchvision, torchaudio."""
    torch = installed.get("torch")
    for name in ("torchvision", "torchaudio"):
        other = installed.get(name)
        if torch is None or other is None:
            continue
        for wanted in other.requires:
            if wanted.name == "torch" and not _fits(wanted.specifier, torch.version):
                here = f"{name} {other.version} wants torch{wanted.specifier}, and {torch.version} is here"
                yield Finding("warn", name, here, f"pip uninstall {name}, or install the one for this torch")


def check_requirements(installed: Mapping[str, Distribution]) -> Iterator[Finding]:
    """What hybridflow itself requires."""
    own = installed.get("hybridflow")
    if own is None:
        todo = "pip install -e . in the clone, so that commands and versions are known"
        yield Finding("note", "packages", "hybridflow runs from a folder and is not installed", todo)
        return
    for wanted in own.requires:
        there = installed.get(normalised(wanted.name))
        text = f"{wanted.name}{wanted.specifier}"
        if there is None:
            yield Finding("stop", "packages", f"{text} is missing", f"pip install '{text}'")
        elif not _fits(wanted.specifier, there.version):
            here = f"hybridflow wants {text}, and {there.version} is here"
            yield Finding("stop", "packages", here, f"pip install '{text}'")


def check_together(installed: Mapping[str, Distribution]) -> Iterator[Finding]:
    """Packages that want another version of a shared package than the one that is here (openai 2 or 3)."""
    for name in TOGETHER:
        there = installed.get(name)
        if there is None:
            continue
        wants = _wanting(installed, name)
        unmet = sorted(who for who, wanted in wants.items() if not _fits(wanted.specifier, there.version))
        unmet = [who for who in unmet if who not in ("torchvision", "torchaudio")]
        if unmet:
            told = "; ".join(f"{who} wants {name}{wants[who].specifier}" for who in unmet)
            todo = (
                f"keep {unmet[0]} in an environment of its own, or install the version that all of them take"
            )
            yield Finding("warn", name, f"{name} {there.version} is here; {told}", todo)


def wishes(installed: Mapping[str, Distribution], name: str) -> str:
    """Return the version of a package, and which versions of it other packages want."""
    if name not in installed:
        return "no"
    told = [f"{who} wants {wanted.specifier}" for who, wanted in _wanting(installed, name).items()]
    return "; ".join([installed[name].version, *sorted(each for each in told if each[-1].isalnum())])


def _wanting(installed: Mapping[str, Distribution], name: str) -> dict[str, Requirement]:
    """Return what other packages want of one, by their names."""
    return {
        each.name: wanted
        for each in installed.values()
        for wanted in each.requires
        if normalised(wanted.name) == name and each.name != "hybridflow"
    }


def _fits(specifier: SpecifierSet, version: str) -> bool:
    """Return whether a version is within a requirement; a local build (+cpu) counts as its version."""
    return specifier.contains(Version(version).public, prereleases=True)


def check_compilers(found: Mapping[str, str], *, header: bool, on_gpu: bool) -> Iterator[Finding]:
    """Compilers that torch.compile, Triton and packages without a wheel call."""
    c = [name for name in ("cc", "gcc", "clang") if name in found]
    cxx = [name for name in ("g++", "clang") if name in found]
    install = "install gcc and g++ (Debian: apt install build-essential)"
    level: Level = "warn" if on_gpu else "note"
    if not c:
        what = "Triton (torch.compile and Liger's kernels on a GPU) and packages without a wheel need it"
        yield Finding(level, "compilers", f"no C compiler (cc, gcc, clang): {what}", install)
    if not cxx:
        here = "no C++ compiler (g++, clang): torch.compile on a CPU needs it"
        yield Finding("note", "compilers", here, f"{install}, or leave use_torch_compile=false")
    if not header:
        here = "Python.h is missing: Triton and packages that are built from source need it"
        yield Finding(level, "compilers", here, "install Python's headers (Debian: apt install python3-dev)")
    if on_gpu and "nvcc" not in found:
        here = "no nvcc: packages with CUDA kernels that have no wheel for this torch cannot be built"
        yield Finding(
            "note", "compilers", here, "take wheels, or install the CUDA toolkit of torch's version"
        )
    if on_gpu and "ninja" not in found:
        here = "no ninja: kernels that torch builds while it runs need it"
        yield Finding("note", "compilers", here, "pip install ninja")


def check_links(topology: str) -> Iterator[Finding]:
    """GPUs that are joined over PCIe and not by NVLink, from what `nvidia-smi topo -m` prints."""
    links = gpu_links(topology)
    slow = {pair: link for pair, link in links.items() if not link.startswith("NV")}
    if not slow:
        return
    kinds = ", ".join(sorted(set(slow.values())))
    here = (
        f"{len(slow)} of {len(links)} pairs of GPUs have no NVLink ({kinds}): NCCL goes over PCIe or main "
        "memory"
    )
    todo = (
        "expect slower sharding over these pairs. NCCL_DEBUG=INFO shows the way that NCCL took; if the first "
        "collective hangs (IOMMU, virtual machines), NCCL_P2P_DISABLE=1 takes shared memory instead"
    )
    yield Finding("note", "NCCL", here, todo)


def gpu_links(topology: str) -> dict[tuple[str, str], str]:
    """Return the link of each pair of GPUs in the matrix of `nvidia-smi topo -m`: NV4, PIX, PHB, SYS, …"""
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", topology).splitlines()]
    heads = next((line for line in lines if line and line[0] == "GPU0"), [])
    gpus = [name for name in heads if re.fullmatch(r"GPU\d+", name)]
    links = {}
    for line in lines:
        if line and line[0] in gpus and line is not heads:
            row = gpus.index(line[0])
            for column in range(row + 1, len(gpus)):
                if len(line) > column + 1:
                    links[gpus[row], gpus[column]] = line[column + 1]
    return links


def check_ports(listening: Mapping[int, str], ephemeral: tuple[int, int]) -> Iterator[Finding]:
    """Ports that Ray and the server want by default."""
    for port, todo in PORTS.items():
        if port in listening:
            who = listening[port] or "another user's process"
            yield Finding("note", "ports", f"{who} listens on port {port}", todo)
    taken = [port for port in RAY_WORKER_PORTS if port in listening]
    if len(taken) > len(RAY_WORKER_PORTS) // 10:
        span = f"{RAY_WORKER_PORTS[0]} to {RAY_WORKER_PORTS[-1]}"
        here = f"{len(taken)} of the ports {span} of Ray's workers are taken"
        yield Finding("warn", "ports", here, "`ray start` with --min-worker-port and --max-worker-port")
    if ephemeral[0] <= RAY_WORKER_PORTS[-1]:
        here = f"outgoing connections take ports from {ephemeral[0]} on, among them those of Ray's workers"
        todo = "sysctl net.ipv4.ip_local_port_range='32768 60999' on nodes of a cluster"
        yield Finding("note", "ports", here, todo)


def check_memory(memory: Memory) -> Iterator[Finding]:
    """Main memory, the limit of a container or a job, and swap."""
    if memory.limit is not None:
        here = f"a limit of {_gib(memory.limit)} of {_gib(memory.total)} holds (container, job)"
        todo = (
            "beyond it the kernel kills processes without a message: `hybridflow config --explain` estimates "
            "a run"
        )
        yield Finding("note", "memory", here, todo)
    if memory.available < 2 * GIB:
        here = f"{_gib(memory.available)} of {_gib(memory.total)} are available"
        yield Finding("warn", "memory", here, "end what else runs here, or take a machine with more")
    if memory.swap_used > GIB:
        here = f"{_gib(memory.swap_used)} are swapped out"
        yield Finding(
            "note", "memory", here, "a process that is swapped looks as if it hung: free memory first"
        )


def check_shared_memory(shared: tuple[int, int] | None, memory: Memory, *, ray: bool) -> Iterator[Finding]:
    """/dev/shm, in which Ray keeps batches between processes and NCCL its buffers."""
    if not ray:
        return
    if shared is None:
        here = "there is no /dev/shm: Ray keeps batches in files"
        yield Finding(
            "note", "shared memory", here, "nothing to do on macOS; in a container mount a tmpfs there"
        )
        return
    wanted = RAY_SHARE * (memory.limit or memory.total)
    if shared[1] < min(wanted, memory.available):
        here = (
            f"{_gib(shared[1])} of /dev/shm are free, and Ray wants {_gib(wanted)} for its object store "
            "(30 % of the memory): it falls back to files, which is slow"
        )
        todo = (
            "start the container with --shm-size (docker/compose.yaml has it), or set "
            "ray_kwargs.ray_init.object_store_memory"
        )
        yield Finding("warn", "shared memory", here, todo)


def check_cards(probe: Probe, driver: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """GPUs: seen by the driver and not by torch, too old, or in use."""
    if driver and not probe.cards and "torch" in probe.facts:
        build = probe.facts.get("cuda_build") or "none: it is a CPU build"
        here = f"the driver shows {len(driver)} GPUs, and torch sees none (its CUDA: {build})"
        todo = "install the CUDA build of torch that this driver takes, or look at CUDA_VISIBLE_DEVICES"
        yield Finding("warn", "CUDA", here, todo)
    for index, card in enumerate(probe.cards):
        if (card["major"] or 8) < 8 and not probe.facts.get("rocm_build"):
            here = (
                f"device {index} ({card['name']}) is older than Ampere: no bfloat16 units, no fused attention"
            )
            yield Finding("warn", "CUDA", here, "expect slow training in bfloat16")
    for shown in driver:
        used = _mebibytes(shown["memory.used"])
        total = _mebibytes(shown["memory.total"])
        if total and used > total // 10:
            here = f"{used} of {total} MiB of GPU {shown['index']} are in use"
            yield Finding("note", "GPU memory", here, "`nvidia-smi` names the processes")


def _mebibytes(text: str) -> int:
    """Return a number that nvidia-smi prints; 0 for "[N/A]"."""
    if text.isdigit():
        return int(text)
    return 0


def check_disk(free: Mapping[str, int]) -> Iterator[Finding]:
    """Room for checkpoints, models and temporary files."""
    for place, size in free.items():
        if size < MIN_DISK:
            todo = "free some, or name another place: trainer.default_local_dir, HF_HOME, TMPDIR"
            yield Finding("warn", "disk", f"{_gib(size)} free for {place}", todo)


def check_process_limits(open_files: int) -> Iterator[Finding]:
    """How many files a process may have open: Ray and many agents need thousands."""
    if 0 <= open_files < MIN_OPEN_FILES:
        todo = "ulimit -n 65536 before a run of many processes or agents"
        yield Finding("note", "open files", f"a process may have {open_files} files open", todo)


def check_encoding(name: str) -> Iterator[Finding]:
    """Text is UTF-8 throughout."""
    if normalised(name).replace("-", "") != "utf8":
        yield Finding("warn", "locale", f"text is read and written as {name}", "export PYTHONUTF8=1")


def check_clock(now: float, installed_at: float) -> Iterator[Finding]:
    """A clock that is behind makes certificates of the hub invalid."""
    behind = installed_at - now
    if behind > 86_400:
        here = f"the clock is {behind / 86_400:.0f} days behind the files of this installation"
        yield Finding(
            "warn", "clock", here, "set the clock: certificates of the hub are invalid before their time"
        )


def check_layers(missing: Iterable[str], reasons: Mapping[str, str]) -> Iterator[Finding]:
    """Layers of the sandbox that a run with programs of the model may not be without."""
    names = sorted(missing)
    if names:
        why = "; ".join(sorted({reasons[name] for name in names}))
        todo = (
            f"docs/sandbox.md says how to have them; reward.sandbox.give_up=[{','.join(names)}] does without"
        )
        yield Finding("warn", "sandbox", f"{', '.join(names)} cannot be had: {why}", todo)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
