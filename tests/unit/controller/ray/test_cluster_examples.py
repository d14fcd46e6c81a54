"""The launch files of `examples/cluster` and the pages about them: what can be checked of them without a
cluster.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.config import PPOConfig
from hybridflow.config.tree import keys_of
from hybridflow.controller.ray.session import HEALTH_CHECKS

ROOT = Path(__file__).parents[4]
EXAMPLES = ROOT / "examples" / "cluster"
PAGES = [*sorted((ROOT / "docs" / "cluster").glob("*.md")), ROOT / "docs" / "debugging.md"]
SCRIPTS = sorted([*EXAMPLES.glob("*.sh"), *EXAMPLES.glob("*.sbatch")])
MANIFESTS = sorted([*EXAMPLES.glob("*.yaml"), *EXAMPLES.glob("*.yml")])
OVERRIDE = re.compile(
    r"(?<![\w./-])((?:data|actor_rollout_ref|critic|reward|algorithm|trainer|ray_kwargs)\.[\w.]+)="
)


def bash_accepts(text: str) -> str:
    return subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True).stderr


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash(path: Path) -> None:
    assert bash_accepts(path.read_text()) == ""


def test_a_head_is_not_started_on_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "RAY_PORT": port}
        done = subprocess.run(
            ["bash", str(EXAMPLES / "start_head.sh"), "--no-such-option"],
            env=environment,
            capture_output=True,
            text=True,
        )
    assert (
        done.returncode == 1
        and done.stderr.startswith(f"port {port} is in use")
        and "RAY_PORT" in done.stderr
    )


def manifest(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / name).read_text())
    return found


def test_shell_inside_manifests_is_bash() -> None:
    sky, dstack, job = (
        manifest("skypilot.yaml"),
        manifest("dstack.dstack.yml"),
        manifest("kuberay_rayjob.yaml"),
    )
    tools = manifest("skypilot_tools.yaml")
    for text in (
        sky["setup"],
        sky["run"],
        tools["setup"],
        tools["run"],
        *dstack["commands"],
        job["spec"]["entrypoint"],
    ):
        assert bash_accepts(text) == "", text


def test_the_rayjob_wants_what_its_cluster_has() -> None:
    spec = manifest("kuberay_rayjob.yaml")["spec"]
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    container = workers["template"]["spec"]["containers"][0]
    assert (
        f"trainer.nnodes={workers['replicas']} " in spec["entrypoint"]
        and workers["minReplicas"] == workers["replicas"]
    )
    assert (
        f"trainer.n_gpus_per_node={container['resources']['limits']['nvidia.com/gpu']} " in spec["entrypoint"]
    )
    assert set(yaml.safe_load(spec["runtimeEnvYAML"])) == {"env_vars"}
    head = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert {each["name"]: each["value"] for each in head["env"]} == {
        f"RAY_{name}": str(value) for name, value in HEALTH_CHECKS.items()
    }


def test_scripts_set_the_health_checks_of_a_ray_of_our_own() -> None:
    text = (EXAMPLES / "ray_env.sh").read_text()
    assert dict(re.findall(r"export RAY_(health_check_\w+)=\$\{\w+:-(\d+)\}", text)) == {
        k: str(v) for k, v in HEALTH_CHECKS.items()
    }
    for path in [*SCRIPTS, *MANIFESTS]:
        if "ray start" in path.read_text() and path.name != "ray_env.sh":
            assert "ray_env.sh" in path.read_text(), f"{path.name} starts Ray with its slow health checks"


def test_keys_in_scripts_and_pages_exist() -> None:
    known = set(keys_of(PPOConfig))
    for path in [*SCRIPTS, *MANIFESTS, *PAGES]:
        unknown = [key for key in OVERRIDE.findall(path.read_text()) if key not in known]
        assert not unknown, f"{path.name} sets {unknown}"


def test_the_runtime_environment_of_submitted_jobs() -> None:
    found = yaml.safe_load((ROOT / "src" / "hybridflow" / "trainer" / "runtime_env.yaml").read_text())
    assert set(found) == {"working_dir", "excludes", "env_vars"}
    assert all(isinstance(value, str) for value in found["env_vars"].values()), (
        "Ray refuses values that are not strings"
    )


def test_pages_name_every_file_and_every_link_leads_somewhere() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    for path in [*SCRIPTS, *MANIFESTS]:
        assert path.name in text, f"no page says what {path.name} is for"
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


SRUN = """
import signal, subprocess, sys
command = sys.argv[sys.argv.index("-w") + 2 :] if "-w" in sys.argv else sys.argv[1:]
child = subprocess.Popen(command)
signal.signal(signal.SIGTERM, lambda *_: child.kill())  # "srun: forcing job termination"
sys.exit(child.wait() % 256)
"""
HYBRIDFLOW = """
import os, pathlib, signal, sys, time
def save(*_):
    time.sleep(0.5)
    pathlib.Path(os.environ["SEEN"]).write_text("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
pathlib.Path(os.environ["SEEN"]).write_text(" ".join(sys.argv[1:]))
time.sleep(600)
"""
STAND_INS = {
    "srun": SRUN,
    "hybridflow": HYBRIDFLOW,
    "ray": "import sys, time\nprint(' node_1')\ntime.sleep(600 if sys.argv[1] == 'start' else 0)",
    "scontrol": "print('first')",
    "hostname": "print('10.0.0.1')",
}


def test_slurm_signals_the_driver_alone_and_waits_for_its_save(tmp_path: Path) -> None:
    """With stand-ins for Slurm's commands, whose srun kills what it started on SIGTERM, as the real
    one does.
    """
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!{sys.executable}\n{text}")
        (tmp_path / name).chmod(0o755)
    seen = tmp_path / "seen"
    job = {"JOB_NODELIST": "first", "JOB_ID": "1", "CPUS_PER_TASK": "1", "JOB_NUM_NODES": "1"}
    environment = {f"SLURM_{name}": value for name, value in job.items()} | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CLUSTER_SCRIPTS": str(EXAMPLES),
        "SEEN": str(seen),
    }
    script = subprocess.Popen(
        ["bash", str(EXAMPLES / "slurm.sbatch"), "--recipe", "grpo"], env=environment, start_new_session=True
    )
    try:
        until = time.monotonic() + 100
        while not (seen.exists() and seen.read_text()) and time.monotonic() < until:
            time.sleep(0.05)
        assert seen.read_text() == "train trainer.nnodes=1 trainer.n_gpus_per_node=0 --recipe grpo"
        script.send_signal(signal.SIGTERM)
        assert script.wait(timeout=100) == 143
        assert seen.read_text() == "saved"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
