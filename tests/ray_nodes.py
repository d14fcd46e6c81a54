"""Several Ray nodes on this machine, each by its own `ray start`, as on several machines; to be killed one by
one.

nodes = RayNodes([2, 2])     # the CPUs that each offers; the first is the head, where drivers run
nodes.address                # for ray_kwargs.ray_init.address or RAY_ADDRESS
nodes.kill(1)                # SIGKILL to all its processes at once, as if its plug had been pulled
nodes.add(2); nodes.stop()
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

RAY = str(Path(sys.executable).with_name("ray"))
START_SECONDS = 600.0  # on a busy machine
# as the launch scripts of examples/cluster set them, but shorter
HEALTH = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "4",
}


class RayNodes:
    """A cluster whose nodes all live here. RuntimeError, with Ray's output, if one does not come up."""

    def __init__(
        self, num_cpus: Sequence[int], *, dashboard_port: int | None = None, health: dict[str, str] = HEALTH
    ) -> None:
        self.folder = tempfile.mkdtemp(prefix="hf-nodes-", dir="/tmp")
        self._env = {
            **os.environ,
            **health,
            "RAY_AUTH_MODE": "disabled",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
        }
        # Ray's own 30 are too few on a busy machine
        self._env["RAY_raylet_start_wait_time_s"] = str(int(START_SECONDS - 10))
        for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN"):
            self._env.pop(name, None)
        self._nodes: list[subprocess.Popen[bytes]] = []
        port = _free_port()
        client_port = _free_port()
        self.address = f"127.0.0.1:{port}"
        dashboard = [f"--include-dashboard={dashboard_port is not None}"]
        if dashboard_port is not None:
            dashboard.append(f"--dashboard-port={dashboard_port}")
        try:
            self._bring_up(
                num_cpus[0],
                "--head",
                f"--port={port}",
                f"--ray-client-server-port={client_port}",
                "--disable-usage-stats",
                "--no-monitor",
                *dashboard,
            )
            self.address = (
                self._log(0).partition("ray start --address='")[2].partition("'")[0] or self.address
            )
            for count in num_cpus[1:]:
                self.add(count)
        except BaseException:
            self.stop()
            raise

    def add(self, num_cpus: int) -> None:
        """Another node."""
        self._bring_up(num_cpus, f"--address={self.address}")

    def kill(self, number: int) -> None:
        """SIGKILL to every process of a node at once: its raylet, its agents, the workers on it."""
        sigkill(self._nodes[number].pid)
        self._nodes[number].wait()

    def stop(self) -> None:
        """End all nodes and remove what they wrote."""
        for node in reversed(self._nodes):
            sigkill(node.pid)
            node.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _bring_up(self, num_cpus: int, *arguments: str) -> None:
        """Start a node, and once more where it fails."""
        for tries in range(2):
            self._start(num_cpus, *arguments)
            try:
                return self._await(len(self._nodes))
            except RuntimeError:
                if tries == 1:
                    raise
                node = self._nodes.pop()
                sigkill(node.pid)
                node.wait()

    def _start(self, num_cpus: int, *arguments: str) -> None:
        command = [
            RAY,
            "start",
            "--block",
            f"--num-cpus={num_cpus}",
            "--num-gpus=0",
            "--object-store-memory=100000000",
        ]
        command += [
            "--min-worker-port=0",
            "--max-worker-port=0",
            "--dashboard-agent-listen-port=0",
            f"--temp-dir={self.folder}",
        ]
        command += [f"--node-name=node{len(self._nodes)}", *arguments]
        with open(f"{self.folder}/node{len(self._nodes)}.log", "wb") as log:
            node = subprocess.Popen(
                command, env=self._env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        Path(f"{self.folder}/node{len(self._nodes)}.pid").write_text(str(node.pid))
        self._nodes.append(node)

    def _await(self, count: int) -> None:
        until = time.monotonic() + START_SECONDS
        for number in range(count):
            while "Ray runtime started" not in self._log(number) and self._nodes[number].returncode is None:
                if self._nodes[number].poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"node {number} did not start: {self._log(number)[-2000:]}")
                time.sleep(0.1)

    def _log(self, number: int) -> str:
        return Path(f"{self.folder}/node{number}.log").read_text(errors="replace")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that they started."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(
                int(stat.parent.name)
            )
    found = []
    waiting = [pid]
    while waiting:
        started = children.get(waiting.pop(), [])
        found += started
        waiting += started
    return found


def node_of(folder: str, name: str) -> int:
    """Process id of a node of the cluster whose `folder` that is, for `sigkill`; for processes that did not
    start it.
    """
    return int(Path(f"{folder}/{name}.pid").read_text())


def sigkill(pid: int) -> None:
    """SIGKILL to a process and all that it started, at once."""
    for each in [pid, *descendants(pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
