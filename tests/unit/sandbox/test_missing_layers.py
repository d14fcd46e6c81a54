"""Where the kernel allows no namespaces, as in many containers: refused, or run behind the layers left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from endings import gone, wait_until

pytestmark = [
    pytest.mark.xdist_group("sandbox"),
    pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux"),
]

# the sandbox's own filter of system calls refuses namespaces to this process and those below it
PROGRAM = """
import dataclasses, json, sys
from hybridflow.config.reward import SandboxConfig
from hybridflow.errors import ConfigError
from hybridflow.sandbox import seccomp
from hybridflow.sandbox.sandbox import Sandbox
seccomp.install()
try:
    Sandbox().layers()
except ConfigError as error:
    print(json.dumps(str(error)))
config = SandboxConfig(timeout=60, max_processes=16, give_up=["private_root", "namespaces", "other_uid"])
with Sandbox(config) as sandbox:
    print(json.dumps(sandbox.layers()))
    for code in sys.argv[1:]:
        print(json.dumps(dataclasses.asdict(sandbox.run(code))))
"""
# mounting is refused, namespaces are not
WITHOUT_MOUNTS = """
import json
from hybridflow.config.reward import SandboxConfig
from hybridflow.errors import ConfigError
from hybridflow.sandbox import seccomp
from hybridflow.sandbox.sandbox import Sandbox
seccomp.DENIED = {"mount_setattr": seccomp.DENIED["mount_setattr"]}
seccomp.install()
for give_up in (["private_root"], ["private_root", "namespaces", "other_uid"]):
    try:
        with Sandbox(SandboxConfig(give_up=give_up)) as sandbox:
            print(json.dumps(sandbox.layers()))
    except ConfigError as error:
        print(json.dumps(str(error)))
"""
OWNER = """
from hybridflow.config.reward import SandboxConfig
from hybridflow.sandbox import seccomp
from hybridflow.sandbox.sandbox import Sandbox
seccomp.install()
sandbox = Sandbox(SandboxConfig(timeout=600, give_up=["private_root", "namespaces", "other_uid"]))
sandbox.layers()
print(sandbox._worker.folder, flush=True)
sandbox.run("import time; time.sleep(600)")
"""
LEAVE = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(600)
    os._exit(0)
time.sleep(0.2)
open('left', 'w').write('x')
"""


def test_it_is_refused_unless_given_up_and_then_the_other_layers_hold(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("top-secret")
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)
    connect = "import socket\nsocket.socketpair()\nprint(1)\nsocket.socket(socket.AF_UNIX)"
    read = f"import os\nprint(os.listdir('.'), os.getuid())\nprint(open({str(secret)!r}).read())"
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, "print(1)", LEAVE, connect, read],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    refused, layers, one, left, connecting, reading = map(json.loads, run.stdout.splitlines())
    assert "private_root" in refused and "reward.sandbox.give_up=[private_root,namespaces" in refused
    assert layers["namespaces"] and layers["private_root"]
    assert one["stdout"] == "1\n"
    assert wait_until(lambda: gone(int(left["stdout"]))), "it was left behind"
    assert connecting["stdout"] == "1\n" and "PermissionError" in connecting["stderr"]
    assert (reading["stdout"].split()[1] == str(os.geteuid())) == bool(layers["other_uid"])
    assert "['main.py']" in reading["stdout"]
    if layers["landlock"]:
        pytest.skip(f"landlock: {layers['landlock']}")
    assert "top-secret" not in reading["stdout"] and "PermissionError" in reading["stderr"]


def test_without_a_private_root_there_are_no_namespaces() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT_MOUNTS], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    refused, layers = map(json.loads, run.stdout.splitlines())
    assert "namespaces (it needs" in refused
    assert "reward.sandbox.give_up=[private_root,namespaces" in refused
    assert layers["private_root"] and layers["namespaces"]


def test_its_folder_goes_when_its_owner_is_killed() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout
    folder = Path(owner.stdout.readline().strip())
    assert wait_until(lambda: (folder / "scratch" / "main.py").exists())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert wait_until(lambda: not folder.exists())
