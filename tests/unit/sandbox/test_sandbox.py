"""Programs in the sandbox: verdicts, limits, and that nothing stays from one to the next."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from endings import gone, wait_until
from hybridflow.config.reward import SandboxConfig
from hybridflow.errors import ConfigError
from hybridflow.sandbox.sandbox import Sandbox, SandboxPool
from hybridflow.sandbox.verdict import Limits, Verdict

pytestmark = pytest.mark.xdist_group("sandbox")
WIDE = SandboxConfig(timeout=60, memory_limit_mb=256, max_processes=16)
"""Generous in time, so that no test fails by the clock."""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(WIDE)
    try:
        sandbox.layers()
    except ConfigError as error:
        pytest.skip(f"layers are missing here: {error}")
    yield sandbox
    sandbox.close()


def limits(**changes: float) -> Limits:
    return dataclasses.replace(Limits(wall_s=60, memory_mb=256, processes=16), **changes)  # type: ignore[arg-type]


def test_a_program_reads_its_input_its_files_and_its_arguments(sandbox: Sandbox) -> None:
    code = "import sys\nprint(input(), open('data/a.txt').read(), sys.argv)\nprint('e', file=sys.stderr)"
    verdict = sandbox.run(code, stdin="é\n", files={"data/a.txt": "text"}, arguments=["x"])
    assert (verdict.status, verdict.exit_code, verdict.ok) == ("ok", 0, True)
    assert verdict.stdout == "é text ['main.py', 'x']\n"
    assert verdict.stderr == "e\n"
    assert verdict.wall_s > 0 and verdict.cpu_s > 0 and verdict.peak_memory_mb > 1


@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [
        ("1 / 0", "raised", 1),
        ("import sys; sys.exit(7)", "raised", 7),
        ("exit(0)", "ok", 0),
        ("not python", "raised", 1),
        ("import os; os._exit(3)", "raised", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "killed", -15),
        ("import ctypes; ctypes.string_at(0)", "killed", -11),
        ("x = bytearray(5 << 30)", "memory_exceeded", 1),
    ],
)
def test_a_program_ends_by_itself(sandbox: Sandbox, code: str, status: str, exit_code: int) -> None:
    verdict = sandbox.run(code)
    assert (verdict.status, verdict.exit_code) == (status, exit_code), verdict


@pytest.mark.parametrize(
    ("code", "tight", "status"),
    [
        ("import time; print('begun', flush=True); time.sleep(600)", {"wall_s": 0.5}, "timed_out"),
        ("while True: pass", {"cpu_s": 0.2}, "cpu_exceeded"),
        ("import os\nos.fork()\nos.fork()\nwhile True: pass", {"cpu_s": 1}, "cpu_exceeded"),
        ("x = b'1' * (200 << 20)\nimport time; time.sleep(600)", {"memory_mb": 64}, "memory_exceeded"),
        ("while True: print('x' * 1000)", {"output_kb": 8}, "output_exceeded"),
        (
            "import os, time\nfor _ in range(9):\n    if os.fork() == 0: time.sleep(600)\ntime.sleep(600)",
            {"processes": 6},
            "process_exceeded",
        ),
    ],
)
def test_a_program_is_stopped_at_a_limit(
    sandbox: Sandbox, code: str, tight: dict[str, float], status: str
) -> None:
    verdict = sandbox.run(code, limits=limits(**tight))
    assert verdict.status == status, verdict
    if status == "timed_out":
        assert verdict.stdout == "begun\n"
        assert verdict.exit_code is None
    if status == "output_exceeded":
        assert len(verdict.stdout) == 8 << 10
        assert verdict.cut
    assert sandbox.run("print(1)").stdout == "1\n"


def test_half_of_a_pair_of_characters_is_the_programs_mistake(sandbox: Sandbox) -> None:
    assert sandbox.run("print('\ud800')").status == "raised"
    read = "import sys\nprint(len(sys.stdin.buffer.read()))"
    assert sandbox.run(read, stdin="\ud800", files={"a": "\ud800"}).stdout == "3\n"


def test_a_limit_of_a_call_only_tightens(sandbox: Sandbox) -> None:
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_AS)[0] >> 20)"
    assert sandbox.run(code, limits=limits(address_space_mb=512)).stdout == "512\n"
    assert sandbox.run(code, limits=limits(address_space_mb=1 << 30)).stdout == "4096\n"


LEAVE = """
import builtins, ctypes, os, random, subprocess, sys, threading, time
builtins.left = sys.left = 1
os.environ['LEFT'] = '1'
open('left.txt', 'w').write('1')
if os.access('/tmp', os.W_OK):  # it is not where the interpreter lies below it
    open('/tmp/left2.txt', 'w').write('1')
os.umask(0)
print(random.random())
sys.stdout.flush()
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""
LOOK = """
import builtins, os, random, sys
print(hasattr(builtins, 'left'), hasattr(sys, 'left'), 'LEFT' in os.environ, os.listdir('.'), os.umask(0))
print(random.random())
try:
    os.kill(-1, 0)
    print('others')
except ProcessLookupError:
    print('alone')
"""


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_nothing_is_left_for_the_next_program(sandbox: Sandbox) -> None:
    before = sandbox.run(LOOK).stdout.splitlines()
    left = sandbox.run(LEAVE)
    assert sandbox._worker
    (server,) = children(sandbox._worker.process.pid)
    assert children(server) == []
    after = sandbox.run(LOOK).stdout.splitlines()
    assert left.status == "ok", left
    assert before[0] == after[0] == "False False False ['main.py'] 18"
    assert len({before[1], left.stdout.strip(), after[1]}) == 3  # each draws randomness of its own
    assert after[2] == before[2]


def test_a_program_finds_no_earlier_one_in_its_memory(sandbox: Sandbox) -> None:
    secret = "".join(["s3cr3t", "-of-the-", "first"])
    sandbox.run(f"x = {secret!r}", stdin=secret, files={"a": secret})
    code = """
import gc
parts = ['s3cr3t', '-of-the-', 'first']
found = [o for o in gc.get_objects() if isinstance(o, dict) for v in o.values() if v == ''.join(parts)]
print(len(found))
"""
    assert sandbox.run(code).stdout == "0\n"


@pytest.mark.parametrize("name", ["../up", "/etc/x", "a/../../b", "", "a\0b"])
def test_a_file_outside_of_the_folder_is_refused(sandbox: Sandbox, name: str) -> None:
    verdict = sandbox.run("print(1)", files={name: "x"})
    assert verdict.status == "refused"
    assert "path" in verdict.stderr


def test_a_lost_worker_is_a_verdict_and_another_takes_its_place(sandbox: Sandbox) -> None:
    sandbox.run("pass")
    assert sandbox._worker
    os.kill(sandbox._worker.process.pid, signal.SIGKILL)
    sandbox._worker.process.wait()
    assert sandbox.run("print(1)").status == "lost"
    assert sandbox.run("print(1)").status == "ok"


def test_closing_leaves_neither_processes_nor_folders_nor_groups(sandbox: Sandbox) -> None:
    closed = Sandbox(WIDE)
    closed.run("pass")
    worker = closed._worker
    assert worker
    groups = list(worker.cgroup.folders.values()) if worker.cgroup else []
    assert all(each.exists() for each in groups)
    closed.close()
    assert worker.process.returncode == 0
    assert not Path(worker.folder).exists()
    assert not any(each.exists() for each in groups)


def test_a_pool_runs_side_by_side_in_an_event_loop(sandbox: Sandbox) -> None:
    async def run_all(pool: SandboxPool) -> list[Verdict]:
        return await asyncio.gather(*[pool.run_async("print(input())", stdin=str(n)) for n in range(6)])

    with SandboxPool(WIDE, num_workers=2) as pool:
        verdicts = asyncio.run(run_all(pool))
    assert [each.stdout for each in verdicts] == [f"{n}\n" for n in range(6)]


def test_two_programs_talk_over_a_channel_and_see_its_end(sandbox: Sandbox) -> None:
    asks = """
import os, socket
channel = socket.socket(fileno=os.dup(3))
channel.sendall(b'ping')
print(channel.recv(4))
os.close(3)
channel.close()
"""
    answers = """
import socket
channel = socket.socket(fileno=3)
print(channel.recv(4))
channel.sendall(b'pong')
print(channel.recv(4))
"""
    mine, theirs = socket.socketpair()
    with Sandbox(WIDE) as other, ThreadPoolExecutor(1) as thread:
        running = thread.submit(other.run, answers, channel=theirs)
        asked = sandbox.run(asks, channel=mine)
        answered = running.result()
    assert asked.stdout == "b'pong'\n", asked
    assert answered.stdout == "b'ping'\nb''\n", answered
    assert mine.fileno() == theirs.fileno() == -1
    assert sandbox.run("import os\nprint(os.fstat(3))").status == "raised"


def test_packages_and_further_interpreters_are_there(sandbox: Sandbox) -> None:
    code = "import numpy, subprocess, sys\nprint(numpy.arange(3).sum(), flush=True)\n"
    code += "subprocess.run([sys.executable, '-c', 'print(4)'])"
    verdict = sandbox.run(code)
    assert verdict.stdout == "3\n4\n", verdict


def test_nothing_lives_on_when_its_owner_is_killed(sandbox: Sandbox) -> None:
    program = "import sys\nfrom hybridflow.sandbox.sandbox import Sandbox\ns = Sandbox()\ns.layers()\n"
    program += "print(s._worker.process.pid, s._worker.folder, flush=True)\n"
    program += "s.run('import time; time.sleep(600)')"
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout
    launcher, folder = owner.stdout.readline().split()
    assert not Path(folder).exists()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    # the launcher ends after all that is below it, and is the last of its session
    assert wait_until(lambda: gone(int(launcher))), "the launcher lives on"
