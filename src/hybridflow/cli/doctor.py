"""`hybridflow doctor`: what is installed, what a run can use here, and what to fix.

doctor_facts reads the machine ──► CHECKS find ──► tables, or JSON; status 1 where nothing can train

`stop` makes training impossible, `warn` will hurt some runs, `note` is good to know. Checks and tables read
nothing but facts.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from rich.console import Console
from rich.table import Table
from rich.text import Text

import hybridflow
from hybridflow.cli.doctor_facts import Distribution, Facts, normalised
from hybridflow.config.trainer import TRACKER_LIBRARIES
from hybridflow.distributed.accelerators import features
from hybridflow.observability.machine import cpu_model

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
BUILT_FOR_TORCH = ("torchvision", "torchaudio")
IMPORTED = ("torch", *BUILT_FOR_TORCH, "transformers")
"""Packages that the probe imports; what else failed there is a kind of device."""
TOGETHER = ("torch", "transformers", "tokenizers", "huggingface-hub", "numpy", "openai", "httpx2", "pydantic")
"""Packages whose versions conflict most often: only their conflicts are reported."""


@dataclass(frozen=True)
class Finding:
    """A finding about this machine that its user should know."""

    level: Level
    check: str
    here: str
    """What was found."""
    todo: str
    """What to do about it."""


def check_imports(facts: Facts) -> Iterator[Finding]:
    """torch, and a model class of transformers, which every training needs."""
    probe = facts.probe
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
    for name in BUILT_FOR_TORCH:
        if name in failed:
            here = f"{name} does not fit torch: {failed[name]}"
            todo = f"pip uninstall {name} (text needs none of it), or install its build for this torch"
            level: Level = "warn"
            if "transformers" in failed:
                level = "stop"
                here += ". transformers then fails for every model, with words that do not name it"
            yield Finding(level, name, here, todo)
    if "transformers" in failed and not {*BUILT_FOR_TORCH, "torch"} & set(failed):
        todo = "pip install --upgrade --force-reinstall transformers, then look again"
        yield Finding("stop", "transformers", f"no model class can be had: {failed['transformers']}", todo)
    elif probe.ended and "torch" in probe.facts:
        todo = "try `python -c 'from transformers import LlamaForCausalLM'`"
        here = f"the process that imported a model class did not do it: {probe.ended}"
        yield Finding("stop", "transformers", here, todo)


def check_torchvision(facts: Facts) -> Iterator[Finding]:
    """Packages that are built for one version of torch."""
    torch = facts.installed.get("torch")
    for name in BUILT_FOR_TORCH:
        other = facts.installed.get(name)
        if torch is None or other is None:
            continue
        for wanted in other.requires:
            if wanted.name == "torch" and not _fits(wanted.specifier, torch.version):
                here = f"{name} {other.version} wants torch{wanted.specifier}, and {torch.version} is here"
                yield Finding("warn", name, here, f"pip uninstall {name}, or install the one for this torch")


def check_requirements(facts: Facts) -> Iterator[Finding]:
    """What hybridflow itself requires."""
    own = facts.installed.get("hybridflow")
    if own is None:
        todo = "pip install -e . in the clone, so that commands and versions are known"
        yield Finding("note", "packages", "hybridflow runs from a folder and is not installed", todo)
        return
    for wanted in own.requires:
        there = facts.installed.get(normalised(wanted.name))
        text = f"{wanted.name}{wanted.specifier}"
        if there is None:
            yield Finding("stop", "packages", f"{text} is missing", f"pip install '{text}'")
        elif not _fits(wanted.specifier, there.version):
            here = f"hybridflow wants {text}, and {there.version} is here"
            yield Finding("stop", "packages", here, f"pip install '{text}'")


def check_together(facts: Facts) -> Iterator[Finding]:
    """Packages that want another version of a shared package than the one that is here (openai 2 or 3)."""
    for name in TOGETHER:
        there = facts.installed.get(name)
        if there is None:
            continue
        wants = _wanting(facts.installed, name)
        unmet = sorted(who for who, wanted in wants.items() if not _fits(wanted.specifier, there.version))
        unmet = [who for who in unmet if who not in BUILT_FOR_TORCH]
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


def check_compilers(facts: Facts) -> Iterator[Finding]:
    """Compilers that torch.compile, Triton and packages without a wheel call."""
    found = set(facts.compilers)
    on_gpu = bool(facts.probe.cards)
    install = "install gcc and g++ (Debian: apt install build-essential)"
    level: Level = "warn" if on_gpu else "note"
    if not found & {"cc", "gcc", "clang"}:
        what = "Triton (torch.compile and Liger's kernels on a GPU) and packages without a wheel need it"
        yield Finding(level, "compilers", f"no C compiler (cc, gcc, clang): {what}", install)
    if not found & {"g++", "clang"}:
        here = "no C++ compiler (g++, clang): torch.compile on a CPU needs it"
        yield Finding("note", "compilers", here, f"{install}, or leave use_torch_compile=false")
    if not facts.header:
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


def check_links(facts: Facts) -> Iterator[Finding]:
    """GPUs that are joined over PCIe and not by NVLink."""
    links = gpu_links(facts.topology)
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


def check_ports(facts: Facts) -> Iterator[Finding]:
    """Ports that Ray and the server want by default."""
    listening = facts.listening
    for port, todo in PORTS.items():
        if port in listening:
            who = listening[port] or "another user's process"
            yield Finding("note", "ports", f"{who} listens on port {port}", todo)
    taken = [port for port in RAY_WORKER_PORTS if port in listening]
    if len(taken) > len(RAY_WORKER_PORTS) // 10:
        span = f"{RAY_WORKER_PORTS[0]} to {RAY_WORKER_PORTS[-1]}"
        here = f"{len(taken)} of the ports {span} of Ray's workers are taken"
        yield Finding("warn", "ports", here, "`ray start` with --min-worker-port and --max-worker-port")
    first = facts.ephemeral[0]
    if first <= RAY_WORKER_PORTS[-1]:
        here = f"outgoing connections take ports from {first} on, among them those of Ray's workers"
        todo = "sysctl net.ipv4.ip_local_port_range='32768 60999' on nodes of a cluster"
        yield Finding("note", "ports", here, todo)


def check_memory(facts: Facts) -> Iterator[Finding]:
    """Main memory, the limit of a container or a job, and swap."""
    memory = facts.memory
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


def check_shared_memory(facts: Facts) -> Iterator[Finding]:
    """/dev/shm, in which Ray keeps batches between processes and NCCL its buffers."""
    memory = facts.memory
    shared = facts.shared_memory
    if not facts.ray:
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


def check_cards(facts: Facts) -> Iterator[Finding]:
    """GPUs: seen by the driver and not by torch, too old, or in use."""
    probe = facts.probe
    driver = facts.driver
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
        numbers = [shown["memory.used"], shown["memory.total"]]  # nvidia-smi prints "[N/A]", too
        used, total = (int(text) if text.isdigit() else 0 for text in numbers)
        if total and used > total // 10:
            here = f"{used} of {total} MiB of GPU {shown['index']} are in use"
            yield Finding("note", "GPU memory", here, "`nvidia-smi` names the processes")


def check_disk(facts: Facts) -> Iterator[Finding]:
    """Room for checkpoints, models and temporary files."""
    for place, size in facts.disk.items():
        if size < MIN_DISK:
            todo = "free some, or name another place: trainer.default_local_dir, HF_HOME, TMPDIR"
            yield Finding("warn", "disk", f"{_gib(size)} free for {place}", todo)


def check_open_files(facts: Facts) -> Iterator[Finding]:
    """How many files a process may have open: Ray and many agents need thousands."""
    if 0 <= facts.open_files < MIN_OPEN_FILES:
        todo = "ulimit -n 65536 before a run of many processes or agents"
        yield Finding("note", "open files", f"a process may have {facts.open_files} files open", todo)


def check_encoding(facts: Facts) -> Iterator[Finding]:
    """Text is UTF-8 throughout."""
    if normalised(facts.encoding).replace("-", "") != "utf8":
        here = f"text is read and written as {facts.encoding}"
        yield Finding("warn", "locale", here, "export PYTHONUTF8=1")


def check_clock(facts: Facts) -> Iterator[Finding]:
    """A clock that is behind makes certificates of the hub invalid."""
    now, installed_at = facts.clock
    behind = installed_at - now
    if behind > 86_400:
        here = f"the clock is {behind / 86_400:.0f} days behind the files of this installation"
        yield Finding(
            "warn", "clock", here, "set the clock: certificates of the hub are invalid before their time"
        )


def check_layers(facts: Facts) -> Iterator[Finding]:
    """Layers of the sandbox that a run with programs of the model may not be without."""
    if names := facts.missing_layers:
        why = "; ".join(sorted({facts.layers[name] for name in names}))
        todo = (
            f"docs/sandbox.md says how to have them; reward.sandbox.give_up=[{','.join(names)}] does without"
        )
        yield Finding("warn", "sandbox", f"{', '.join(names)} cannot be had: {why}", todo)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


CHECKS: Mapping[str, Callable[[Facts], Iterable[Finding]]] = {
    "imports": check_imports,
    "torchvision": check_torchvision,
    "requirements": check_requirements,
    "shared packages": check_together,
    "compilers": check_compilers,
    "links of GPUs": check_links,
    "ports": check_ports,
    "memory": check_memory,
    "shared memory": check_shared_memory,
    "GPUs": check_cards,
    "disk": check_disk,
    "open files": check_open_files,
    "locale": check_encoding,
    "clock": check_clock,
    "sandbox": check_layers,
}


def findings(facts: Facts) -> list[Finding]:
    """Run all checks, the gravest findings first. A check that breaks is a finding itself."""
    found: list[Finding] = []
    for name, check in CHECKS.items():
        try:
            found += check(facts)
        except Exception as error:  # whatever a strange machine brings: the other checks still count
            found.append(_broken(name, "check", error))
    return sorted(found, key=lambda each: get_args(Level).index(each.level))


def _broken(name: str, what: str, error: Exception) -> Finding:
    here = f"this {what} broke: {type(error).__name__}: {error}"
    return Finding("note", name, here, "the others still hold")


Section = tuple[str, tuple[str, ...], Sequence[tuple[str, ...]]]
"""A table: its title, its columns and its rows."""


def show_machine(*, as_json: bool = False) -> int:
    """Print what is installed and what to fix; return 1 if training is impossible here, else 0."""
    facts = Facts()
    found = findings(facts)
    shown = []
    for name, build in SECTIONS.items():
        try:
            shown.append(build(facts))
        except Exception as error:  # as above
            found.append(_broken(name, "table", error))
    status = int(any(each.level == "stop" for each in found))
    if as_json:
        content = {
            "hybridflow": hybridflow.__version__,
            "can_train": not status,
            "findings": [asdict(each) for each in found],
            "tables": {title: [dict(zip(columns, row)) for row in rows] for title, columns, rows in shown},
        }
        print(json.dumps(content, indent=2, ensure_ascii=False))
        return status
    summary = "nothing, all checks are fine"
    if found:
        numbers = Counter(each.level for each in found)
        summary = f"{', '.join(f'{number} {level}' for level, number in numbers.items())} (the last table)"
        shown.append(("What to mend", ("", "what", "found", "what to do"), [*map(astuple, found)]))
    console = Console()
    console.print(Text(f"What to mend: {summary}"))
    for title, columns, rows in shown:
        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
    return status


def _machine(facts: Facts) -> Section:
    cards = facts.probe.cards
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = facts.probe.facts.get("threads", "?")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rows = [("hybridflow", hybridflow.__version__), ("Python", platform.python_version())]
    for name in ("torch", "transformers", "tensordict", "hydra-core"):
        rows.append((name, facts.installed[name].version if name in facts.installed else "no"))
    rows += [
        ("openai", wishes(facts.installed, "openai")),
        ("CPU cores", f"{cores} usable; torch uses {threads} threads (OMP_NUM_THREADS, trainer.num_threads)"),
        ("CPU", f"{cpu_model()}, {facts.probe.facts.get('vectors', '?')}"),
        ("memory", _gib(memory)),
    ]
    if facts.shared_memory is not None:
        rows.append(("shared memory", f"{_gib(facts.shared_memory[1])} free: batches of many processes"))
    rows.append(("disk free here", _gib(shutil.disk_usage(".").free)))
    rows.append(("compilers", ", ".join(facts.compilers) or "none"))
    for index, card in enumerate(cards):
        name = f"{card['device'].upper()} device {index}"
        rows.append((name, f"{card['name']}, {card['bytes'] / GIB:.0f} GiB"))
    if cards:
        graphs = "none on this kind of device"
        if any(features(card["device"]).records_steps for card in cards):
            graphs = "decode steps are recorded, unless rollout.enforce_eager=true"
        rows.append(("training engine", "fsdp2, bfloat16 with float32 masters"))
    else:
        graphs = "no CUDA"
        rows.append(("CUDA", "none: runs use the CPU in float32"))
        rows.append(("training engine", "fsdp2, float32"))
    rows.append(("CUDA graphs", graphs))
    rows.append(("attention over rows of any length", _varlen()))
    rows.append(("processes of a run", _processes(facts, len(cards), cores)))
    return "This machine", ("what", "here"), rows


def _varlen() -> str:
    """Return which attention over rows torch has, by its source, because importing it takes seconds."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return "no torch"
    source = Path(torch.origin).parent / "nn" / "attention" / "varlen.py"
    if not source.is_file():
        return "torch has none: scaled_dot_product_attention"
    if "block_table" in source.read_text(encoding="utf-8"):
        return "torch has it, with a block table"
    return "torch has it, without a block table"


def _engines(facts: Facts) -> Section:
    """Return a table of the engines: whether each can run here, and what to do where it cannot."""
    from hybridflow.config.engine_features import ENGINES

    rows = []
    for name, engine in ENGINES.items():
        here, way = ENGINE_STATES.get(name, partial(_server, name))()
        rows.append((name, here, ". ".join(text for text in (engine.what, way) if text)))
    columns = ("engine", "here", "what it is, and how to have it")
    return "Generation (actor_rollout_ref.rollout.name)", columns, rows


def _sandbox(facts: Facts) -> Section:
    """Return a table of the sandbox's layers: whether each is active here, and why not."""
    from hybridflow.sandbox.layers import LAYERS

    rows = []
    for name, layer in LAYERS.items():
        reason = facts.layers[name]
        here = f"no: {reason}" if reason else "yes"
        rows.append((name, here, f"{layer.what}; without it {layer.without}"))
    columns = ("layer", "here", "what it is; without it")
    return "Sandbox for programs of the model (reward.sandbox)", columns, rows


def _server(name: str) -> tuple[str, str]:
    """Return the version of another project's engine, or no, and how to install it."""
    version = _version(name)
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
    if _version("httpx"):
        return "yes", "Not to train with"
    return "no", "pip install 'hybridflow[openai]'; not to train with"


ENGINE_STATES: Mapping[str, Callable[[], tuple[str, str]]] = {
    "native": lambda: ("yes", "The default"),
    "hf": lambda: (importlib.metadata.version("transformers"), ""),
    "openai": _over_http,
}


def _processes(facts: Facts, gpus: int, cores: int) -> str:
    """Return what `trainer.nnodes` and `trainer.n_gpus_per_node` may be here."""
    if not facts.ray:
        return "1; more need the extra ray"
    if address := os.environ.get("RAY_ADDRESS"):
        return f"as many as the Ray cluster at RAY_ADDRESS={address} has devices (`ray status`)"
    if gpus:
        return f"trainer.n_gpus_per_node up to {gpus}, one a GPU"
    return (
        f"trainer.n_gpus_per_node up to {cores}, one a core; more may share them "
        "(ray_kwargs.ray_init.num_cpus)"
    )


PARTS = (
    ("many processes, many machines", "ray", "ray"),
    ("LoRA adapters", "peft", "lora"),
    ("Liger's kernels, on CUDA (use_liger)", "liger_kernel", "liger"),
    ("serving over HTTP", "fastapi", "serve"),
    ("math rewards", "math_verify", "math"),
    ("reasoning-gym tasks", "reasoning_gym", "tasks"),
    *((f"tracker {name}", name, name) for name in TRACKER_LIBRARIES),
    ("S3 files", "s3fs", "remote"),
    ("ModelScope", "modelscope", "remote"),
)
"""Optional parts: the module that shows that one is installed, and the extra that has it."""
MEGATRON = "pip install --no-deps megatron-core; without it PyTorch's own engine trains, in the same layouts"


def _parts(facts: Facts) -> Section:
    rows = []
    for name, module, extra in PARTS:
        version = _version(module)
        rows.append((name, version or "no", "" if version else f"pip install 'hybridflow[{extra}]'"))
    megatron = _version("megatron") and _version("megatron.core")
    rows.append(("megatron-core (strategy=megatron)", megatron or "no", "" if megatron else MEGATRON))
    return "Optional parts", ("optional part", "there", "to have it"), rows


def _version(module: str) -> str | None:
    """Return the version of the package of a module, or None where it is not installed."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        return "yes"


SECTIONS: dict[str, Callable[[Facts], Section]] = {
    "machine": _machine,
    "engines": _engines,
    "sandbox": _sandbox,
    "optional parts": _parts,
}
