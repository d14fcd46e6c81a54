"""What the doctor finds: from facts that are given, and once from an installation that is really broken."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hybridflow.cli import doctor, doctor_checks, doctor_facts
from hybridflow.cli.doctor_checks import GIB
from hybridflow.cli.doctor_facts import Distribution, Memory, Probe
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


def test_a_torchvision_that_breaks_transformers_is_named_as_the_cause() -> None:
    broken = {
        "torchvision": "RuntimeError: operator torchvision::nms does not exist",
        "transformers": "ModuleNotFoundError: Could not import module 'LlamaForCausalLM'",
    }
    (found,) = doctor_checks.check_imports(failing(**broken))
    assert (found.level, found.check) == ("stop", "torchvision")
    assert "nms" in found.here and "pip uninstall torchvision" in found.todo
    (alone,) = doctor_checks.check_imports(failing(torchvision=broken["torchvision"]))
    assert alone.level == "warn"
    (other,) = doctor_checks.check_imports(failing(transformers="ImportError: no tokenizers"))
    assert (other.level, other.check) == ("stop", "transformers") and "no tokenizers" in other.here
    assert not list(doctor_checks.check_imports(WELL))


def test_a_probe_that_died_is_told() -> None:
    (early,) = doctor_checks.check_imports(Probe({}, "it was ended by signal 11"))
    assert (early.level, early.check) == ("stop", "torch") and "signal 11" in early.here
    (late,) = doctor_checks.check_imports(replace(WELL, ended="it was ended by signal 6"))
    assert (late.level, late.check) == ("stop", "transformers") and "signal 6" in late.here
    (cuda,) = doctor_checks.check_imports(failing(cuda="RuntimeError: no driver"))
    assert cuda.level == "warn"


def test_packages_that_want_other_versions() -> None:
    installed = dict(
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
    (vision,) = doctor_checks.check_torchvision(installed)
    assert "torchvision 0.27.0 wants torch==2.12.0, and 2.13.0+cpu is here" in vision.here
    (openai,) = doctor_checks.check_together(installed)
    assert "openai 2.31.0 is here; langchain-openai wants openai>=2.45.0; openai-agents wants" in openai.here
    missing, old = doctor_checks.check_requirements(installed)
    assert (missing.level, missing.todo) == ("stop", "pip install 'transformers>=5.17'")
    assert old.level == "stop" and "2.31.0 is here" in old.here
    wishes = doctor_checks.wishes(installed, "openai")
    assert wishes == "2.31.0; langchain-openai wants >=2.45.0; openai-agents wants <4,>=3.0.0"
    assert doctor_checks.wishes(installed, "vllm") == "no"
    (unknown,) = doctor_checks.check_requirements({})
    assert unknown.level == "note"


def test_this_environment_is_read_and_fits() -> None:
    installed = doctor_facts.distributions()
    assert installed["hydra-core"].version
    assert not list(doctor_checks.check_requirements(installed))
    assert all("extra" not in str(wanted.marker) for wanted in installed["transformers"].requires)


def test_compilers() -> None:
    everything = {"cc": "/usr/bin/cc", "g++": "/usr/bin/g++", "nvcc": "/nvcc", "ninja": "/ninja"}
    assert not list(doctor_checks.check_compilers(everything, header=True, on_gpu=True))
    on_cpu = list(doctor_checks.check_compilers({}, header=False, on_gpu=False))
    assert [each.level for each in on_cpu] == ["note"] * 3
    on_gpu = list(doctor_checks.check_compilers({}, header=False, on_gpu=True))
    assert [each.level for each in on_gpu] == ["warn", "note", "warn", "note", "note"]
    assert "build-essential" in on_gpu[0].todo and "nvcc" in on_gpu[3].here


def test_links_between_gpus() -> None:
    links = doctor_checks.gpu_links(TOPOLOGY)
    assert links == {("GPU0", "GPU1"): "NV12", ("GPU0", "GPU2"): "SYS", ("GPU1", "GPU2"): "PHB"}
    (found,) = doctor_checks.check_links(TOPOLOGY)
    assert "2 of 3 pairs" in found.here and "PHB, SYS" in found.here and "NCCL_P2P_DISABLE=1" in found.todo
    assert not list(doctor_checks.check_links(TOPOLOGY.replace("SYS", "NV12").replace("PHB", "NV6")))
    assert not list(doctor_checks.check_links("")) and not doctor_checks.gpu_links("no devices were found")


def test_ports() -> None:
    usual = (32_768, 60_999)
    assert not list(doctor_checks.check_ports({22: "sshd"}, usual))
    (taken,) = doctor_checks.check_ports({8000: "python3"}, usual)
    assert taken.here == "python3 listens on port 8000" and "--port" in taken.todo
    (hidden,) = doctor_checks.check_ports({6379: ""}, usual)
    assert "another user's process" in hidden.here
    many, wide = doctor_checks.check_ports(dict.fromkeys(range(11_000, 13_000), "x"), (1024, 60_999))
    assert many.level == "warn" and "2000 of the ports" in many.here and "from 1024 on" in wide.here


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


def test_memory_and_shared_memory() -> None:
    assert not list(doctor_checks.check_memory(ROOMY))
    tight = Memory(total=64 * GIB, available=GIB, swap_used=3 * GIB, limit=8 * GIB)
    limit, little, swap = doctor_checks.check_memory(tight)
    assert "8.0 GiB of 64.0 GiB" in limit.here and little.level == "warn" and "3.0 GiB" in swap.here
    docker = (64 * 2**20, 60 * 2**20)
    (small,) = doctor_checks.check_shared_memory(docker, ROOMY, ray=True)
    assert small.level == "warn" and "9.6 GiB" in small.here and "--shm-size" in small.todo
    assert not list(doctor_checks.check_shared_memory(docker, ROOMY, ray=False))
    assert not list(doctor_checks.check_shared_memory((16 * GIB, 15 * GIB), ROOMY, ray=True))
    (none,) = doctor_checks.check_shared_memory(None, ROOMY, ray=True)
    assert none.level == "note"


def test_gpus_that_torch_does_not_see_or_that_are_busy() -> None:
    driver = [{"index": "0", "name": "T4", "memory.total": "16000", "memory.used": "9000"}]
    unseen, busy = doctor_checks.check_cards(WELL, driver)
    assert unseen.level == "warn" and "it is a CPU build" in unseen.here
    assert busy.here == "9000 of 16000 MiB of GPU 0 are in use"
    old = Probe({**WELL.facts, "cards": [{"name": "T4", "bytes": 16 * GIB, "major": 7}]})
    (found,) = doctor_checks.check_cards(old, [{**driver[0], "memory.used": "[N/A]"}])
    assert "older than Ampere" in found.here


def test_disk_limits_locale_clock_and_sandbox() -> None:
    (disk,) = doctor_checks.check_disk({"run folders (here), /a": 2 * GIB, "b": 50 * GIB})
    assert "2.0 GiB free for run folders (here), /a" in disk.here
    (files,) = doctor_checks.check_process_limits(1024)
    assert "ulimit -n" in files.todo
    assert not list(doctor_checks.check_process_limits(-1)), "-1 stands for no limit"
    (encoding,) = doctor_checks.check_encoding("ANSI_X3.4-1968")
    assert encoding.todo == "export PYTHONUTF8=1"
    assert not list(doctor_checks.check_encoding("UTF-8"))
    day = 86_400.0
    (clock,) = doctor_checks.check_clock(10 * day, 40 * day)
    assert "30 days behind" in clock.here
    assert not list(doctor_checks.check_clock(40 * day, 10 * day))
    (layers,) = doctor_checks.check_layers(["seccomp"], {"seccomp": "the kernel has none", "cgroup": "no"})
    assert "give_up=[seccomp]" in layers.todo and "the kernel has none" in layers.here


def test_every_fact_of_this_machine_can_be_read() -> None:
    memory = doctor_facts.memory()
    assert 0 < memory.available <= memory.total
    assert doctor_facts.ephemeral_ports()[0] > 0
    assert len(doctor_facts.free_disk()) == 3 and min(doctor_facts.free_disk().values()) > 0
    assert doctor_facts.open_files() != 0 and doctor_facts.encoding()
    now, installed = doctor_facts.clock()
    assert now > installed > 0


def test_ports_that_listen_are_seen_with_their_process() -> None:
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert "py" in doctor_facts.listening()[port]


def well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_facts, "probe", lambda: WELL)
    monkeypatch.setattr(doctor_facts, "memory", lambda: ROOMY)
    monkeypatch.setattr(doctor_facts, "shared_memory", lambda: (16 * GIB, 16 * GIB))
    monkeypatch.setattr(doctor_facts, "free_disk", lambda: {"here": 100 * GIB})


def test_json_holds_findings_and_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    well(monkeypatch)
    monkeypatch.setattr(doctor_facts, "encoding", lambda: "latin-1")
    assert main(["doctor", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["can_train"] is True
    assert {"level": "warn", "check": "locale"}.items() <= shown["findings"][0].items()
    machine = {row["what"]: row["here"] for row in shown["tables"]["This machine"]}
    assert machine["torch"] and machine["CUDA"].startswith("none")


@pytest.mark.parametrize(
    ("found", "first"),
    [
        ([], "What to mend: nothing, all checks are fine"),
        ([doctor_checks.Finding("warn", "clock", "1970", "set it")], "What to mend: 1 warn (the last table)"),
    ],
)
def test_the_first_line_says_whether_there_is_anything_to_mend(
    found: list[doctor_checks.Finding],
    first: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    well(monkeypatch)
    monkeypatch.setattr(doctor, "findings", lambda facts: found)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == first
    assert ("set it" in shown) == bool(found)


def test_a_check_that_breaks_is_a_line_and_the_rest_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks() -> Memory:
        raise FileNotFoundError("/proc/meminfo")

    well(monkeypatch)
    monkeypatch.setattr(doctor_facts, "memory", breaks)
    monkeypatch.setattr(doctor, "_parts", breaks)
    assert main(["doctor", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    broken = {each["check"] for each in shown["findings"] if "broke: FileNotFoundError" in each["here"]}
    assert broken == {"memory", "shared memory", "optional parts"}
    assert "This machine" in shown["tables"]


def test_where_nothing_can_train_the_status_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    well(monkeypatch)
    monkeypatch.setattr(doctor_facts, "probe", lambda: Probe({}, "it was ended by signal 11"))
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
    (found,) = doctor_checks.check_imports(probe)
    assert found.check == "torchvision"


def test_a_probe_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_facts, "_PROBE", "import time; time.sleep(600)")
    assert doctor_facts.probe(seconds=0.1).ended == "it had not ended after 0 s"
    monkeypatch.setattr(doctor_facts, "_PROBE", "import os; os.kill(os.getpid(), 11)")
    assert doctor_facts.probe().ended == "it was ended by signal 11"
