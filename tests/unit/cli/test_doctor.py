"""What the doctor finds: from facts that are given, and once from an installation that is really broken."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from hybridflow.cli import doctor, doctor_facts
from hybridflow.cli.doctor import GIB, Finding
from hybridflow.cli.doctor_facts import Distribution, Facts, Memory, Probe
from hybridflow.cli.main import main

WELL = Probe({"torch": "2.13.0+cpu", "threads": 1, "vectors": "AVX2", "cards": [], "failed": {}})
ROOMY = Memory(total=32 * GIB, available=24 * GIB, swap_used=0, limit=None)
TOPOLOGY = """
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV12\tSYS\tPIX\t0-31
GPU1\tNV12\t X \tPHB\tSYS\t0-31
GPU2\tSYS\tPHB\t X \tSYS\t32-63
NIC0\tPIX\tSYS\tSYS\t X
"""


def package(name: str, version: str, *requires: str) -> tuple[str, Distribution]:
    return name, Distribution(name, version, tuple(map(Requirement, requires)))


def failing(**errors: str) -> Probe:
    return Probe({**WELL.facts, "failed": errors})


def found_by(check: str, **facts: Any) -> list[Finding]:
    given: Any = SimpleNamespace(**facts)
    return list(doctor.CHECKS[check](given))


VISION = "RuntimeError: operator torchvision::nms does not exist"
MODELS = "ModuleNotFoundError: Could not import module 'LlamaForCausalLM'"
OLD_CARD = Probe({**WELL.facts, "cards": [{"name": "T4", "bytes": 16 * GIB, "major": 7}]})
DRIVER = {"index": "0", "name": "T4", "memory.total": "16000", "memory.used": "9000"}
DOCKER = (64 * 2**20, 60 * 2**20)
IN_DOCKER: dict[str, Any] = {"shared_memory": DOCKER, "memory": ROOMY, "ray": True}
USUAL = (32_768, 60_999)
DAY = 86_400.0
INSTALLED = dict(
    [
        package("torch", "2.13.0+cpu"),
        package("torchvision", "0.27.0", "torch==2.12.0"),
        package("torchaudio", "2.13.0", "torch==2.13.0"),
        package("openai", "2.31.0"),
        package("openai-agents", "0.24.0", "openai<4,>=3.0.0"),
        package("langchain-openai", "1.7.3", "openai>=2.45.0"),
        package("renderers", "0.1", "openai"),
        package("hybridflow", "0.1.0", "torch>=2.11", "transformers>=5.17", "openai>=2.0,<2.30"),
    ]
)


def case(check: str, *wanted: str, **facts: Any) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    return check, wanted, facts


CASES = [
    case("imports", probe=WELL),
    case(
        "imports",
        "stop torchvision: nms does not exist. transformers then fails",
        probe=failing(torchvision=VISION, transformers=MODELS),
    ),
    case("imports", "warn torchvision: or install its build", probe=failing(torchvision=VISION)),
    case("imports", "stop transformers: no tokenizers", probe=failing(transformers="no tokenizers")),
    case("imports", "stop torch: signal 11", probe=Probe({}, "it was ended by signal 11")),
    case("imports", "stop transformers: signal 6", probe=replace(WELL, ended="ended by signal 6")),
    case("imports", "warn CUDA: nvidia-smi", probe=failing(cuda="RuntimeError: no driver")),
    case(
        "torchvision",
        "warn torchvision: 0.27.0 wants torch==2.12.0, and 2.13.0+cpu is here",
        installed=INSTALLED,
    ),
    case(
        "shared packages",
        "warn openai: openai 2.31.0 is here; langchain-openai wants openai>=2.45.0; openai-agents",
        installed=INSTALLED,
    ),
    case(
        "requirements",
        "stop packages: pip install 'transformers>=5.17'",
        "stop packages: 2.31.0 is here",
        installed=INSTALLED,
    ),
    case("requirements", "note packages: not installed", installed={}),
    case("compilers", compilers=["cc", "g++", "nvcc", "ninja"], header=True, probe=OLD_CARD),
    case(
        "compilers",
        "note compilers: no C compiler",
        "note compilers: no C++",
        "note compilers: Python.h",
        compilers=[],
        header=False,
        probe=WELL,
    ),
    case(
        "compilers",
        "warn compilers: build-essential",
        "note compilers: no C++",
        "warn compilers: Python.h",
        "note compilers: nvcc",
        "note compilers: ninja",
        compilers=[],
        header=False,
        probe=OLD_CARD,
    ),
    case("links of GPUs", topology=""),
    case("links of GPUs", topology=TOPOLOGY.replace("SYS", "NV12").replace("PHB", "NV6")),
    case("links of GPUs", "note NCCL: 2 of 3 pairs of GPUs have no NVLink (PHB, SYS)", topology=TOPOLOGY),
    case("ports", listening={22: "sshd"}, ephemeral=USUAL),
    case("ports", "note ports: python3 listens on port 8000", listening={8000: "python3"}, ephemeral=USUAL),
    case("ports", "note ports: another user's process", listening={6379: ""}, ephemeral=USUAL),
    case(
        "ports",
        "warn ports: 2000 of the ports",
        "note ports: from 1024 on",
        listening=dict.fromkeys(range(11_000, 13_000), "x"),
        ephemeral=(1024, 60_999),
    ),
    case("memory", memory=ROOMY),
    case(
        "memory",
        "note memory: 8.0 GiB of 64.0 GiB",
        "warn memory: are available",
        "note memory: 3.0 GiB",
        memory=Memory(total=64 * GIB, available=GIB, swap_used=3 * GIB, limit=8 * GIB),
    ),
    case("shared memory", shared_memory=DOCKER, memory=ROOMY, ray=False),
    case("shared memory", shared_memory=(16 * GIB, 15 * GIB), memory=ROOMY, ray=True),
    case("shared memory", "warn shared memory: Ray wants 9.6 GiB", **IN_DOCKER),
    case("shared memory", "note shared memory: no /dev/shm", **{**IN_DOCKER, "shared_memory": None}),
    case(
        "GPUs",
        "warn CUDA: it is a CPU build",
        "note GPU memory: 9000 of 16000 MiB of GPU 0 are in use",
        probe=WELL,
        driver=[DRIVER],
    ),
    case("GPUs", "warn CUDA: older than Ampere", probe=OLD_CARD, driver=[DRIVER | {"memory.used": "[N/A]"}]),
    case("disk", "warn disk: 2.0 GiB free for here, /a", disk={"here, /a": 2 * GIB, "b": 50 * GIB}),
    case("open files", "note open files: ulimit -n", open_files=1024),
    case("open files", open_files=-1),
    case("locale", "warn locale: export PYTHONUTF8=1", encoding="ANSI_X3.4-1968"),
    case("locale", encoding="UTF-8"),
    case("clock", "warn clock: 30 days behind", clock=(10 * DAY, 40 * DAY)),
    case("clock", clock=(40 * DAY, 10 * DAY)),
    case(
        "sandbox",
        "warn sandbox: seccomp cannot be had: the kernel has none",
        missing_layers=["seccomp"],
        layers={"seccomp": "the kernel has none", "cgroup": "no"},
    ),
]


@pytest.mark.parametrize(("check", "wanted", "facts"), CASES)
def test_what_is_found(check: str, wanted: tuple[str, ...], facts: dict[str, Any]) -> None:
    found = found_by(check, **facts)
    heads = [f"{each.level} {each.check}" for each in found]
    assert heads == [each.partition(": ")[0] for each in wanted]
    for each, line in zip(found, wanted):
        assert line.partition(": ")[2] in f"{each.here} | {each.todo}"


def test_versions_that_others_wish_for_and_links_in_a_matrix() -> None:
    wishes = doctor.wishes(INSTALLED, "openai")
    assert wishes == "2.31.0; langchain-openai wants >=2.45.0; openai-agents wants <4,>=3.0.0"
    assert doctor.wishes(INSTALLED, "vllm") == "no"
    links = doctor.gpu_links(TOPOLOGY)
    assert links == {("GPU0", "GPU1"): "NV12", ("GPU0", "GPU2"): "SYS", ("GPU1", "GPU2"): "PHB"}
    assert not doctor.gpu_links("no devices were found")


def test_limits_of_memory_are_those_of_the_group_and_of_all_above(tmp_path: Path) -> None:
    job = tmp_path / "sys" / "slurm" / "job_7"
    (job / "step_0").mkdir(parents=True)
    (job / "memory.max").write_text("8000\n")
    (job / "step_0" / "memory.max").write_text("max\n")
    old = tmp_path / "sys" / "memory" / "docker"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("9000\n")
    groups = tmp_path / "cgroup"
    groups.write_text("5:cpu,cpuacct:/docker\n4:memory:/docker\n0::/slurm/job_7/step_0\n")
    assert sorted(doctor_facts._memory_limits(groups, tmp_path / "sys")) == [8000, 9000]
    assert not list(doctor_facts._memory_limits(tmp_path / "none", tmp_path / "sys"))


def test_every_fact_of_this_machine_can_be_read() -> None:
    facts = Facts()
    assert 0 < facts.memory.available <= facts.memory.total
    assert facts.ephemeral[0] > 0
    assert len(facts.disk) == 3 and min(facts.disk.values()) > 0
    assert facts.open_files != 0 and facts.encoding
    now, installed = facts.clock
    assert now > installed > 0
    assert facts.installed["hydra-core"].version
    assert not found_by("requirements", installed=facts.installed)
    assert all("extra" not in str(wanted.marker) for wanted in facts.installed["transformers"].requires)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert "py" in facts.listening[server.getsockname()[1]]


@pytest.fixture
def well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Facts, "probe", WELL)
    monkeypatch.setattr(Facts, "memory", ROOMY)
    monkeypatch.setattr(Facts, "shared_memory", (16 * GIB, 16 * GIB))
    monkeypatch.setattr(Facts, "disk", {"here": 100 * GIB})


@pytest.mark.usefixtures("well")
def test_json_holds_findings_and_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Facts, "encoding", "latin-1")
    assert main(["doctor", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["can_train"] is True
    assert {"level": "warn", "check": "locale"}.items() <= shown["findings"][0].items()
    machine = {row["what"]: row["here"] for row in shown["tables"]["This machine"]}
    assert machine["torch"] and machine["CUDA"].startswith("none")


@pytest.mark.usefixtures("well")
@pytest.mark.parametrize(
    ("found", "first"),
    [
        ([], "What to mend: nothing, all checks are fine"),
        ([Finding("warn", "clock", "1970", "set it")], "What to mend: 1 warn (the last table)"),
    ],
)
def test_the_first_line_says_whether_there_is_anything_to_mend(
    found: list[Finding], first: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "findings", lambda facts: found)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == first
    assert ("set it" in shown) == bool(found)


@pytest.mark.parametrize("version", ["0.16.1", None])
def test_megatron_core_is_told_and_what_trains_without_it(
    monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda _: version)
    *_, (name, there, way) = doctor._parts(SimpleNamespace())[2]  # type: ignore[arg-type]
    assert name == "megatron-core (strategy=megatron)" and there == (version or "no")
    assert way.startswith("" if version else "pip install --no-deps megatron-core") and bool(way) != bool(
        version
    )


@pytest.mark.usefixtures("well")
def test_a_check_that_breaks_is_a_line_and_the_rest_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(facts: Facts) -> Any:
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(Facts, "memory", property(breaks))
    monkeypatch.setitem(doctor.SECTIONS, "optional parts", breaks)
    assert main(["doctor", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    broken = {each["check"] for each in shown["findings"] if "broke: FileNotFoundError" in each["here"]}
    assert broken == {"memory", "shared memory", "optional parts"}
    assert "This machine" in shown["tables"]


@pytest.mark.usefixtures("well")
def test_where_nothing_can_train_the_status_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setattr(Facts, "probe", Probe({}, "it was ended by signal 11"))
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "stop" in shown and "ended by signal 11" in shown and "Optional parts" in shown


@pytest.mark.slow
def test_a_torchvision_that_cannot_be_imported_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    probe = doctor_facts.probe(seconds=600)
    assert probe.failed["torchvision"] == "RuntimeError: operator torchvision::nms does not exist"
    (found,) = found_by("imports", probe=probe)
    assert found.check == "torchvision"


def test_a_probe_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_facts, "_PROBE", "import time; time.sleep(600)")
    assert doctor_facts.probe(seconds=0.1).ended == "it had not ended after 0 s"
    monkeypatch.setattr(doctor_facts, "_PROBE", "import os; os.kill(os.getpid(), 11)")
    assert doctor_facts.probe().ended == "it was ended by signal 11"
