from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from hybridflow.controller.ray.cluster import RayCluster
from hybridflow.controller.resource_pool import Placement, ResourcePool
from hybridflow.errors import ConfigError
from ray_nodes import RayNodes, descendants

DRIVER = str(Path(__file__).with_name("cluster_driver.py"))


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, DRIVER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # a signal to its group must not reach the tests
        # tests in the background ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def said(driver: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line of JSON that a driver prints; AssertionError with its stderr if it ends instead."""
    assert driver.stdout is not None and driver.stderr is not None
    for line in driver.stdout:
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise AssertionError(driver.stderr.read())


def left_behind(temp_dir: str, pids: list[int]) -> list[str]:
    """Processes that name the folder of a run's own Ray, and which of the pids are alive."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = command.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if temp_dir in text or int(command.parent.name) in pids:
            found.append(f"{command.parent.name} {text[:100]}")
    return found


def listening(pid: int) -> list[tuple[str, str]]:
    """(process, address) of every socket on which a process or one that it started accepts connections."""
    found = []
    for each in [pid, *descendants(pid)]:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(each)
            sockets = process.net_connections("inet")
            found += [(process.name(), s.laddr.ip) for s in sockets if s.status == psutil.CONN_LISTEN]
    return found


def own_and_signal(tmp_path: Path, how: signal.Signals, to_group: bool) -> tuple[dict[str, Any], int]:
    driver = start("own", str(tmp_path / "timeline.json"))
    try:
        found = said(driver)
        assert left_behind(found["temp_dir"], found["pids"])
        sockets = listening(driver.pid)
        assert {"gcs_server", "raylet"} <= {name for name, _ in sockets}
        assert [each for each in sockets if not each[1].removeprefix("::ffff:").startswith("127.")] == []
        os.killpg(driver.pid, how) if to_group else driver.send_signal(how)
        status = driver.wait(timeout=120)
        until = time.monotonic() + 120
        while left_behind(found["temp_dir"], found["pids"]) and time.monotonic() < until:
            time.sleep(0.1)
        assert left_behind(found["temp_dir"], found["pids"]) == []
        return found, status
    finally:
        driver.kill()
        driver.communicate()


def test_a_ray_of_our_own_ends_with_the_run(tmp_path: Path) -> None:
    """Ctrl-C in a terminal, which reaches the whole group, while a worker hangs in a call outside Python."""
    found, status = own_and_signal(tmp_path, signal.SIGINT, to_group=True)
    assert status != 0 and not Path(found["temp_dir"]).exists()
    assert found["device"] == "cpu" and found["local_ranks"] == [0, 1, 2] and found["still_there"]
    assert json.loads((tmp_path / "timeline.json").read_text())
    assert "asks for 1000 processes, a CPU each, but this machine offers" in found["too_many"]
    assert not found["in_ray_before"], "that is said before a Ray is started"
    message = found["no_room"]
    assert message.startswith("ConfigError: the run wants 5 CPUs, but the Ray of this run's own has 4.")
    assert "pool 'rollout', 1 node × 2" in message and "ray_kwargs.ray_init.num_cpus" in message
    assert "1 free of 4 CPUs" in found["taken"] and "Others hold what is missing" in found["taken"]
    assert found["late"].startswith("WorkerError") and "1 free of 4 CPUs" in found["late"]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_ray_of_our_own_ends_when_the_driver_is_killed(tmp_path: Path, how: signal.Signals) -> None:
    found, status = own_and_signal(tmp_path, how, to_group=False)
    assert status != 0
    if how is signal.SIGTERM:
        assert not Path(found["temp_dir"]).exists()
    else:  # Ray's own reaper ends the processes; nobody is left to remove the folder
        shutil.rmtree(found["temp_dir"])


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """A head and two nodes more."""
    started = RayNodes([1, 2, 2])
    yield started
    started.stop()


@pytest.mark.xdist_group("ray")
def test_a_node_that_does_not_answer_is_not_there(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself counts it as alive until some seconds have passed."""
    here = ray.nodes()
    monkeypatch.setattr(ray, "nodes", lambda: [*here, {**here[0], "NodeID": "f" * 56, "NodeManagerPort": 1}])
    assert [node.id for node in cluster.nodes()] == [node["NodeID"] for node in here]


@pytest.mark.xdist_group("ray")
def test_devices_that_a_cluster_does_not_have_are_missed(cluster: RayCluster) -> None:
    (node,) = cluster.nodes()
    for pools, says in (
        ((ResourcePool("global", (node.total + 1,)),), f"has {node.total}.*Lower trainer.nnodes"),
        ((ResourcePool("global", (1, 1)),), "not on as many nodes as wanted"),
        ((ResourcePool("train", (1,)), ResourcePool("rollout", (node.total,))), "pool 'rollout', 1 node"),
    ):
        placement = Placement(pools, {f"on {pool.name}": (pool.name,) for pool in pools})
        with pytest.raises(ConfigError, match=f"(?s){says}"):
            cluster.check(placement, "cpu", wait=0.1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_pool_spans_nodes_and_one_of_them_dies(nodes: RayNodes) -> None:
    driver = start("spread", nodes.address)
    assert driver.stdin is not None
    try:
        found = said(driver)
        assert found["local_ranks"] == [0, 1, 0, 1] and found["as_planned"] and found["num_processes"] == 4
        assert found["nodes"] in (["node1", "node1", "node2", "node2"], ["node2", "node2", "node1", "node1"])
        assert found["too_many"].startswith("ConfigError: the run wants 6 CPUs, but the Ray cluster at")
        assert "3 nodes × 2" in found["too_many"] and "start more nodes" in found["too_many"]
        nodes.kill(1)
        driver.stdin.write("\n")
        driver.stdin.flush()
        found = said(driver)
        assert found["noticed"], "a node that is gone must be noticed sooner than Ray does by itself"
        assert "has 3." in found["missing"] and "node1" not in found["missing"]
        nodes.add(2)
        driver.stdin.write("\n")
        driver.stdin.flush()
        assert sorted(set(said(driver)["nodes"])) == ["node2", "node3"]
        assert not said(driver)["in_ray"]
        assert driver.wait(timeout=120) == 0
    finally:
        driver.kill()
        driver.communicate()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_cluster_of_another_version_and_one_that_was_only_left(nodes: RayNodes) -> None:
    """The driver of the test before has left; the cluster still answers."""
    driver = start("version", nodes.address)
    try:
        found = said(driver)
        assert (
            "differ, install the same versions on all nodes" in found["message"]
            and "Ray: 2.0.0" in found["message"]
        )
    finally:
        driver.kill()
        driver.communicate()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_driver_alone_decides_about_signals() -> None:
    """Ctrl-C reaches the whole group of a terminal, SIGTERM the driver: its own handlers see them, nobody
    ends.
    """
    driver = start("handles", "")
    assert driver.stdin is not None
    try:
        found = said(driver)
        os.killpg(driver.pid, signal.SIGINT)
        for pid in found["pids"]:
            os.kill(pid, signal.SIGINT)
        driver.send_signal(signal.SIGTERM)
        time.sleep(5)  # Ray's native handler would abort the driver after three seconds
        driver.stdin.write("\n")
        driver.stdin.flush()
        after = said(driver)
        assert sorted(after["caught"]) == [signal.SIGINT, signal.SIGTERM] and after["same"]
        assert driver.wait(timeout=120) == 0
        assert not Path(found["temp_dir"]).exists()
    finally:
        driver.kill()
        driver.communicate()
