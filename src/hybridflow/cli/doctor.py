"""`hybridflow doctor`: what is here, what a run can ask for here, and what to mend.

doctor_facts reads the machine ──► doctor_checks finds ──► tables, or JSON; status 1 where nothing can train
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

import hybridflow
from hybridflow.cli import doctor_checks, doctor_facts
from hybridflow.cli.doctor_checks import Finding
from hybridflow.distributed.accelerators import features
from hybridflow.observability.machine import cpu_model


@dataclass(frozen=True)
class Section:
    """A table of what is here."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


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
    Part("Trackio", "trackio", "trackio", "trackio"),
    Part("ClearML", "clearml", "clearml", "clearml"),
    Part("Weave", "weave", "weave", "weave"),
    Part("S3 files", "s3fs", "s3fs", "remote"),
    Part("ModelScope", "modelscope", "modelscope", "remote"),
)


class Facts:
    """What was read of this machine: each fact once, when a check first asks for it."""

    @cached_property
    def probe(self) -> doctor_facts.Probe:
        return doctor_facts.probe()

    @cached_property
    def installed(self) -> dict[str, doctor_facts.Distribution]:
        return doctor_facts.distributions()

    @cached_property
    def memory(self) -> doctor_facts.Memory:
        return doctor_facts.memory()

    @cached_property
    def layers(self) -> dict[str, str]:
        """The reason why a layer of the sandbox is not active, or "", by layer."""
        from hybridflow.sandbox.sandbox import find_layers

        return find_layers()

    @property
    def missing_layers(self) -> list[str]:
        """The layers that a run with programs of the model may not be without, and that are not active."""
        from hybridflow.sandbox.layers import missing_layers

        return missing_layers(self.layers, is_root=os.geteuid() == 0)


def show_machine(*, as_json: bool = False) -> int:
    """Print what is here and what to mend; return 1 if training is impossible here, else 0."""
    facts = Facts()
    found = findings(facts)
    shown = sections(facts, found)
    status = int(any(each.level == "stop" for each in found))
    if as_json:
        tables = {each.title: [dict(zip(each.columns, row)) for row in each.rows] for each in shown}
        content = {
            "hybridflow": hybridflow.__version__,
            "can_train": not status,
            "findings": [asdict(each) for each in found],
            "tables": tables,
        }
        print(json.dumps(content, indent=2, ensure_ascii=False))
        return status
    console = Console()
    console.print(Text(_summary(found)))
    for each in shown:
        table = Table(*each.columns, title=each.title, title_justify="left")
        for row in each.rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
    if found:
        console.print(_findings_table(found))
    return status


def findings(facts: Facts) -> list[Finding]:
    """Run all checks, the gravest findings first. A check that breaks is a finding itself."""
    checks: Mapping[str, Callable[[], Iterable[Finding]]] = {
        "imports": lambda: doctor_checks.check_imports(facts.probe),
        "torchvision": lambda: doctor_checks.check_torchvision(facts.installed),
        "requirements": lambda: doctor_checks.check_requirements(facts.installed),
        "shared packages": lambda: doctor_checks.check_together(facts.installed),
        "compilers": lambda: doctor_checks.check_compilers(
            doctor_facts.compilers(),
            header=doctor_facts.python_header(),
            on_gpu=bool(facts.probe.cards),
        ),
        "links of GPUs": lambda: doctor_checks.check_links(doctor_facts.nvidia_smi("topo", "-m")),
        "ports": lambda: doctor_checks.check_ports(doctor_facts.listening(), doctor_facts.ephemeral_ports()),
        "memory": lambda: doctor_checks.check_memory(facts.memory),
        "shared memory": lambda: doctor_checks.check_shared_memory(
            doctor_facts.shared_memory(), facts.memory, ray=importlib.util.find_spec("ray") is not None
        ),
        "GPUs": lambda: doctor_checks.check_cards(facts.probe, doctor_facts.cards_of_driver()),
        "disk": lambda: doctor_checks.check_disk(doctor_facts.free_disk()),
        "open files": lambda: doctor_checks.check_process_limits(doctor_facts.open_files()),
        "locale": lambda: doctor_checks.check_encoding(doctor_facts.encoding()),
        "clock": lambda: doctor_checks.check_clock(*doctor_facts.clock()),
        "sandbox": lambda: doctor_checks.check_layers(facts.missing_layers, facts.layers),
    }
    found: list[Finding] = []
    for name, check in checks.items():
        try:
            found += check()
        except Exception as error:  # whatever a strange machine brings: the other checks still count
            found.append(
                Finding("note", name, f"this check broke: {_broken(error)}", "the others still hold")
            )
    grades = ("stop", "warn", "note")
    return sorted(found, key=lambda each: grades.index(each.level))


def _broken(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def sections(facts: Facts, found: list[Finding]) -> list[Section]:
    """Return the tables of what is here; one that breaks is left out, and that becomes a finding."""
    shown = []
    builders: Mapping[str, Callable[[], Section]] = {
        "machine": lambda: _machine(facts),
        "engines": _engines,
        "sandbox": lambda: _sandbox(facts),
        "optional parts": _parts,
    }
    for name, build in builders.items():
        try:
            shown.append(build())
        except Exception as error:  # as above
            found.append(Finding("note", name, f"the table broke: {_broken(error)}", "the others still hold"))
    return shown


def _findings_table(found: list[Finding]) -> Table:
    table = Table("", "what", "found", "what to do", title="What to mend", title_justify="left")
    for each in found:
        table.add_row(each.level, each.check, Text(each.here), Text(each.todo))
    return table


def _summary(found: list[Finding]) -> str:
    """Return the line that stands above all tables."""
    if not found:
        return "What to mend: nothing, all checks are fine"
    numbers = Counter(each.level for each in found)
    parts = [f"{number} {level}" for level, number in numbers.items()]
    return f"What to mend: {', '.join(parts)} (the last table)"


def _machine(facts: Facts) -> Section:
    torch = facts.probe.facts
    rows = [("hybridflow", hybridflow.__version__), ("Python", doctor_facts.python_version())]
    for name in ("torch", "transformers", "tensordict", "hydra-core"):
        rows.append((name, _here(facts, name)))
    rows.append(("openai", doctor_checks.wishes(facts.installed, "openai")))
    cores = _usable_cores()
    threads = torch.get("threads", "?")
    cards = facts.probe.cards
    rows.append(
        (
            "CPU cores",
            f"{cores} usable; torch uses {threads} threads (OMP_NUM_THREADS, trainer.num_threads)",
        )
    )
    rows.append(("CPU", f"{cpu_model()}, {torch.get('vectors', '?')}"))
    rows.append(("memory", f"{_memory_gib():.1f} GiB"))
    shared = doctor_facts.shared_memory()
    if shared is not None:
        rows.append(("shared memory", f"{shared[1] / 2**30:.1f} GiB free: batches of many processes"))
    rows.append(("disk free here", f"{shutil.disk_usage('.').free / 2**30:.1f} GiB"))
    compilers = doctor_facts.compilers()
    rows.append(("compilers", ", ".join(compilers) or "none"))
    for index, card in enumerate(cards):
        rows.append(
            (f"{card['device'].upper()} device {index}", f"{card['name']}, {card['bytes'] / 2**30:.0f} GiB")
        )
    if cards:
        rows.append(("training engine", "fsdp2, bfloat16 with float32 masters"))
        graphs = "none on this kind of device"
        if any(features(card["device"]).records_steps for card in cards):
            graphs = "decode steps are recorded, unless rollout.enforce_eager=true"
        rows.append(("CUDA graphs", graphs))
    else:
        rows.append(("CUDA", "none: runs use the CPU in float32"))
        rows.append(("training engine", "fsdp2, float32"))
        rows.append(("CUDA graphs", "no CUDA"))
    rows.append(("attention over rows of any length", _varlen()))
    rows.append(("processes of a run", _processes(len(cards), cores)))
    return Section("This machine", ("what", "here"), rows)


def _here(facts: Facts, name: str) -> str:
    if name in facts.installed:
        return facts.installed[name].version
    return "no"


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


def _engines() -> Section:
    """Return a table of the engines: whether each can run here, and what to do where it cannot."""
    from hybridflow.config.engine_features import ENGINES

    rows = []
    for name, engine in ENGINES.items():
        state = ENGINE_STATES.get(name, partial(_server, name))
        here, way = state()
        rows.append((name, here, ". ".join(text for text in (engine.what, way) if text)))
    columns = ("engine", "here", "what it is, and how to have it")
    return Section("Generation (actor_rollout_ref.rollout.name)", columns, rows)


def _sandbox(facts: Facts) -> Section:
    """Return a table of the sandbox's layers: whether each is active here, and why not."""
    from hybridflow.sandbox.layers import LAYERS

    rows = []
    for name, layer in LAYERS.items():
        here = "yes"
        if reason := facts.layers[name]:
            here = f"no: {reason}"
        rows.append((name, here, f"{layer.what}; without it {layer.without}"))
    columns = ("layer", "here", "what it is; without it")
    return Section("Sandbox for programs of the model (reward.sandbox)", columns, rows)


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


def _parts() -> Section:
    rows = []
    for part in PARTS:
        version = _version(part.module, part.distribution)
        todo = "" if version else f"pip install 'hybridflow[{part.extra}]'"
        rows.append((part.name, version or "no", todo))
    rows.append(("training by Megatron", "no", "not in this version"))
    return Section("Optional parts", ("optional part", "there", "to have it"), rows)


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
