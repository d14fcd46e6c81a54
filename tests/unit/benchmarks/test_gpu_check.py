"""The GPU check: stages that pass, fail and hang, and the one file that tells of them; no GPU is needed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_check
import gpu_check_machine as machine
import gpu_check_page
import gpu_check_stages as stages
import pytest

from endings import gone

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "gpu_check.sh"
DEADLINE = 600
HANGS = "import os, time\nif os.fork() == 0:\n    print('child', os.getpid(), flush=True)\ntime.sleep(3600)"
NO_DRIVER = {"version": "", "devices": [], "error": "nvidia-smi: No such file"}
DRIVER = {"version": "535.1", "devices": [{"name": "A10"}], "error": ""}


def stage(name: str, code: str, limit_s: float = DEADLINE) -> dict[str, Any]:
    return {
        "name": name,
        "meaning": f"it {name}",
        "command": [sys.executable, "-c", code],
        "limit_s": limit_s,
    }


def command(folder: Path, *listed: dict[str, Any]) -> list[str]:
    file = folder / "stages.json"
    file.write_text(json.dumps(listed))
    return [str(SCRIPT), "--stages", str(file), "--out", str(folder / "out"), "--work", str(folder / "work")]


def one_file(folder: Path) -> dict[str, Any]:
    (found,) = (folder / "out").iterdir()
    assert found.name.startswith("gpu_check_") and found.suffix == ".md"
    return gpu_check_page.read(found)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHON": sys.executable}


def test_a_stage_that_fails_or_hangs_stops_no_other_and_all_is_in_one_file(tmp_path: Path) -> None:
    result = tmp_path / "work" / "passes" / "gpu_speed.json"
    writes = (
        f"import pathlib; pathlib.Path({str(result)!r}).write_text('{{\"tokens_per_s\": 7}}'); print('fine')"
    )
    words = command(
        tmp_path,
        stage("hangs", HANGS, limit_s=3.0),
        stage("fails", "print('```'); raise SystemExit('a planted failure')"),
        {**stage("absent", ""), "command": ["/no/such/program"]},
        stage("passes", writes),
    )
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 1, done.stderr
    found = one_file(tmp_path)
    hangs, fails, absent, passes = found["stages"]
    assert [each["status"] for each in found["stages"]] == ["over its limit", "failed", "failed", "passed"]
    assert "ended after 3 s" in hangs["reason"] and hangs["seconds"] >= 3
    (child,) = hangs["output"]
    assert gone(int(child.split()[1])), "what a stage has started ends with it"
    assert fails["exit_code"] == 1 and fails["output"] == ["```", "a planted failure"]
    assert "could not be started" in absent["reason"] and "/no/such/program" in absent["reason"]
    assert passes["results"] == {"gpu_speed": {"tokens_per_s": 7}} and passes["output"] == ["fine"]
    assert {"date", "device", "driver", "commit", "machine", "took"} <= found["facts"].keys()
    (page,) = (tmp_path / "out").iterdir()
    assert "\n````\n```\na planted failure\n````\n" in page.read_text()
    assert str(page) in done.stdout


def test_after_ctrl_c_the_file_is_there_with_what_there_was(tmp_path: Path) -> None:
    words = command(tmp_path, stage("passes", "pass"), stage("hangs", HANGS), stage("never", "pass"))
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL)
    log = tmp_path / "work" / "hangs.log"
    began = time.monotonic()
    while not (log.is_file() and log.read_text().startswith("child")):
        assert process.poll() is None and time.monotonic() - began < DEADLINE
        time.sleep(0.05)
    before = one_file(tmp_path)["stages"]
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE) == 130
    assert [each["status"] for each in before] == ["passed"], "the file is written after each stage"
    passes, hangs, never = one_file(tmp_path)["stages"]
    assert (passes["status"], hangs["status"], never["status"]) == ("passed", "interrupted", "left out")
    assert gone(int(hangs["output"][0].split()[1])) and never["reason"] == "the check was interrupted before"


def test_stages_for_which_no_time_is_left_are_named(tmp_path: Path) -> None:
    words = [*command(tmp_path, stage("late", "pass")), "--minutes", "0"]
    subprocess.run(words, env=environment(), check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE)
    (late,) = one_file(tmp_path)["stages"]
    assert late["status"] == "left out" and "time of the whole check was over" in late["reason"]


def test_without_a_driver_it_says_so_and_downloads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "driver_facts", lambda: NO_DRIVER)
    check = gpu_check.Check(
        gpu_check.parser().parse_args(["--out", str(tmp_path), "--work", str(tmp_path / "w")])
    )
    check.run()
    check.save()
    assert check.outcomes == [] and check.exit_status() == 2
    assert "install NVIDIA's driver" in check.summary()
    (page,) = tmp_path.glob("*.md")
    assert page.name.endswith("_no-gpu.md") and "**missing**: nvidia-smi shows no device" in page.read_text()


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        ({"error": "ModuleNotFoundError: No module named 'torch'"}, "torch cannot be imported"),
        ({"version": "2.10.0+cu128", "cuda": "12.8", "available": True}, "2.11 or newer is wanted"),
        ({"version": "2.13.0+cpu", "cuda": None, "available": False}, "is not a CUDA build"),
        ({"version": "2.13.0", "cuda": "13.0", "available": False}, "the driver (535.1) may be too old"),
    ],
)
def test_what_is_missing_of_torch_is_said_with_the_way_out(torch: dict[str, Any], said: str) -> None:
    (told,) = machine.missing(DRIVER, torch, "python")
    assert said in told


def test_torch_that_sees_a_device_is_enough() -> None:
    torch = {"version": "2.11.0+cu130", "cuda": "13.0", "available": True}
    assert machine.missing(NO_DRIVER, torch, "python") == []


def test_tests_that_were_all_skipped_are_no_pass(tmp_path: Path) -> None:
    report = tmp_path / "tests" / "tests.xml"
    case = '<testcase classname="gpu" name="one"><skipped message="no CUDA device"/></testcase>'
    code = f"import pathlib; pathlib.Path({str(report)!r}).write_text('<testsuite>{case}</testsuite>')"
    outcome = stages.run(stages.Stage(**stage("tests", code)), tmp_path, root=ROOT, left_s=DEADLINE)
    assert outcome.status == stages.EMPTY
    assert outcome.results["tests"]["skips"] == {"gpu::one": "no CUDA device"}


def test_every_test_of_a_gpu_is_where_the_check_looks() -> None:
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    assert {path.parent for path in marked if path != Path(__file__)} == {ROOT / "tests" / "gpu"}


def test_the_stages_of_the_check_are_commands_of_this_clone(tmp_path: Path) -> None:
    facts = {"environment": {"torch": {"available": True}, "engine_errors": {"vllm": "no module"}}}
    options = gpu_check.parser().parse_args([])
    made = {each.name: each for each in gpu_check.check_stages(options, "python", tmp_path, facts)}
    assert made["conformance-vllm"].reason == "vllm cannot be imported (no module)"
    assert made["conformance-native"].environment["HYBRIDFLOW_CONFORMANCE_DEVICE"] == "cuda"
    assert not made["conformance-sglang"].reason
    for each in made.values():
        scripts = [word for word in each.command if word.startswith(("benchmarks/", "tests/"))]
        assert len(scripts) == 1 and (ROOT / scripts[0]).exists()
    first = {"tests", "step", "update", "generation", "conformance-native", "curve"}
    assert sum(made[name].limit_s for name in first) <= gpu_check.MINUTES * 60


def test_the_file_does_not_tell_where_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    text = gpu_check_page.anonymous("/home/someone/clone/src: /home/someone/x", Path("/home/someone/clone"))
    assert text == "CLONE/src: ~/x"
