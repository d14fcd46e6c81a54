"""Processes that a reward function starts end with its worker, however they detach themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.config.reward import CustomRewardConfig, RewardConfig
from hybridflow.rewards import RewardManager, ScoreRequest
from hybridflow.rewards.pool import RewardPool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")

TIMEOUT = 2.0
FUNCTION = """
import os, subprocess, time

def note_pid(info, pid):
    with open(info["note"], "a") as file:
        file.write(f"{pid} ")

def session(info):
    note_pid(info, subprocess.Popen(["sleep", "600"], start_new_session=True).pid)

def daemon(info):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            note_pid(info, os.getpid())
            os.execvp("sleep", ["sleep", "600"])
        os._exit(0)
    os.wait()
    while not os.path.exists(info["note"]) or not open(info["note"]).read():
        time.sleep(0.01)

def tree(info):
    # a shell in a session of its own, whose child is in another one
    subprocess.Popen(["setsid", "sh", "-c", "setsid sleep 600 & echo $! $$ >> " + info["note"] + "; wait"])
    while not os.path.exists(info["note"]) or not open(info["note"]).read().endswith("\\n"):
        time.sleep(0.01)

def compute_score(data_source, solution_str, ground_truth, extra_info):
    how, then = solution_str.split()
    globals()[how](extra_info)
    if then == "hangs":
        time.sleep(600)
    if then == "exits":
        os._exit(7)
    if then == "aborts":
        os.abort()
    return 1.0
"""
TRAINER = """
import os, signal, sys, threading
from hybridflow.config.reward import CustomRewardConfig, RewardConfig
from hybridflow.rewards import RewardManager, ScoreRequest
from hybridflow.rewards.pool import RewardPool
pool = RewardPool(RewardConfig(custom_reward_function=CustomRewardConfig(sys.argv[1]), num_workers=1), 0)
# the pool is used by a thread that ends before the process: its workers must not end with it
scored = []
request = ScoreRequest("x", f"{sys.argv[3]} returns", None, {"note": sys.argv[2]})
thread = threading.Thread(target=lambda: scored.extend(RewardManager(pool).outcomes([request])))
thread.start()
thread.join()
print(scored[0].score, *(worker.keeper.pid for worker in pool._hosts[0]._workers), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie that nobody reaps has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition: Callable[[], bool], seconds: float = 600.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def function(tmp_path: Path) -> str:
    (tmp_path / "starts.py").write_text(FUNCTION)
    return str(tmp_path / "starts.py")


def pool_of(function: str) -> RewardPool:
    config = RewardConfig(custom_reward_function=CustomRewardConfig(function), num_workers=1, timeout=TIMEOUT)
    return RewardPool(config, seed=0)


def noted(note: Path) -> list[int]:
    pids = [int(pid) for pid in note.read_text().split()]
    assert pids
    return pids


@pytest.mark.parametrize("how", ["session", "daemon", "tree"])
def test_nothing_is_left_after_close(function: str, how: str, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    pool = pool_of(function)
    assert (
        RewardManager(pool)
        .outcomes([ScoreRequest("x", f"{how} returns", None, {"note": str(note)})])[0]
        .score
        == 1.0
    )
    started = noted(note)
    assert not any(gone(pid) for pid in started), "they live as long as the worker does"
    pool.close()
    assert all(gone(pid) for pid in started)


@pytest.mark.parametrize("how", ["session", "daemon"])
@pytest.mark.parametrize(("then", "kind"), [("hangs", "timeout"), ("exits", "died"), ("aborts", "died")])
def test_nothing_is_left_when_a_worker_ends(
    function: str, how: str, then: str, kind: str, tmp_path: Path
) -> None:
    note = tmp_path / "pids"
    pool = pool_of(function)
    outcome = RewardManager(pool).outcomes([ScoreRequest("x", f"{how} {then}", None, {"note": str(note)})])[0]
    assert outcome.error == kind
    assert {"hangs": "2 seconds", "exits": "exit code 7", "aborts": "SIGABRT"}[then] in outcome.detail
    pool.close()
    assert all(gone(pid) for pid in noted(note))


@pytest.mark.parametrize("how", ["session", "tree"])
def test_nothing_is_left_of_a_killed_trainer(function: str, how: str, tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    note = tmp_path / "pids"
    words = [sys.executable, str(tmp_path / "trainer.py"), function, str(note), how]
    trainer = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert trainer.returncode == -signal.SIGKILL, trainer.stderr
    score, worker = trainer.stdout.split()
    assert score == "1.0"
    for pid in [int(worker), *noted(note)]:
        assert wait_until(lambda pid=pid: gone(pid)), os.popen(f"ps -p {pid}").read()
