"""The escape suite: nothing gets out, each attempt ends in a verdict, and who runs it lives on.

As root and as an ordinary user, with the caps of cgroups and without. A layer that the machine does not
have is a skip that names it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attempts import ATTEMPTS, START, Attempt

from hybridflow.sandbox.process_tree import usage_of_descendants

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sandbox"), pytest.mark.timeout(300)]
USER = "64321"
"""An id that no account has."""
ROOMS = [("root", "yes"), ("root", "no"), (USER, "yes"), (USER, "no")]


class Driver:
    """The process that runs programs, and what they try to reach."""

    def __init__(self, user: str, cgroup: str, folder: Path) -> None:
        self.home = folder / "home"
        self.outside = folder / "outside"
        for each in (folder, self.home, self.outside):
            each.mkdir(exist_ok=True)
            each.chmod(0o777)
        self.secret = self.home / "secret.txt"
        self.secret.write_text("top-secret")
        self.server = socket.create_server(("127.0.0.1", 0))
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0hybridflow-{os.getpid()}-{user}-{cgroup}")
        self.abstract.listen()
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("driver.py")), user, cgroup],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TOP_SECRET": "top-secret", "HOME": str(self.home), "TMPDIR": "/tmp"},
        )
        self.hello = self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, "the driver is gone"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, attempt: Attempt) -> dict[str, Any]:
        code = START + f"json_file = {json.__file__!r}\n" + attempt.code
        names = {
            "SECRET": str(self.secret),
            "OUTSIDE": str(self.outside),
            "PORT": str(self.server.getsockname()[1]),
            "SOCKET": self.abstract.getsockname()[1:].decode(),
            "PARENT": str(self.process.pid),
        }
        for name, value in names.items():
            code = code.replace(name, value)
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"code": code, "limits": attempt.limits}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def num_processes(self) -> int:
        proc = os.open("/proc", os.O_RDONLY)
        try:
            return len(usage_of_descendants(self.process.pid, proc).pids)
        finally:
            os.close(proc)

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()
        self.server.close()
        self.abstract.close()


@pytest.fixture(scope="module", params=ROOMS, ids=["root-cgroup", "root", "user-cgroup", "user"])
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    user, cgroup = request.param
    if os.geteuid() != 0 and user == "root":
        pytest.skip("this suite does not run as root")
    folder = tmp_path_factory.mktemp("escape")
    for parent in (folder, *folder.parents):
        if parent.owner() != "root" or not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
        if str(parent) == "/tmp":
            break
    driver = Driver(user, cgroup, folder)
    if "missing" in driver.hello:
        pytest.skip(f"layers are missing here: {driver.hello['missing']}")
    if cgroup == "yes" and driver.hello["layers"]["cgroup"]:
        driver.close()
        pytest.skip(f"cgroup: {driver.hello['layers']['cgroup']}")
    yield driver
    driver.close()


@pytest.mark.parametrize("name", ATTEMPTS)
def test_nothing_escapes(driver: Driver, name: str) -> None:
    attempt = ATTEMPTS[name]
    if reason := driver.hello["layers"][attempt.layer]:
        pytest.skip(f"{attempt.layer}: {reason}")
    verdict = driver.run(attempt)
    printed = verdict["stdout"] + verdict["stderr"]
    assert "ESCAPED" not in printed and "top-secret" not in printed, printed[-2000:]
    assert verdict["status"] in attempt.statuses, verdict
    assert driver.num_processes() <= 2  # the launcher and the fork server
    assert not list(driver.outside.iterdir())
    assert driver.secret.read_text() == "top-secret"
    after = driver.run(Attempt("print(1)"))
    assert (after["status"], after["stdout"]) == ("ok", "1\n"), after


def test_there_are_at_least_25_attempts() -> None:
    assert len(ATTEMPTS) >= 25


def test_nobody_reached_the_server(driver: Driver) -> None:
    driver.server.settimeout(0.0)
    with pytest.raises(BlockingIOError):
        driver.server.accept()
