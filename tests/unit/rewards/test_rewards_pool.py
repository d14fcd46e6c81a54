"""Reward functions that misbehave, in workers and in process: counted and survived, or refused."""

from __future__ import annotations

import logging
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from endings import gone, wait_until
from hybridflow.config.reward import CustomRewardConfig, RewardConfig
from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards import RewardManager, ScoreRequest, ScoringOutcome
from hybridflow.rewards.build import build_reward_manager
from hybridflow.rewards.manager import ScoredBatch
from hybridflow.rewards.pool import RewardPool

TIMEOUT = 60.0
"""Seconds for a row whose outcome is another one than that they have passed."""
SHORT = 1.0
"""Seconds for a row that hangs: whatever the machine does, they pass."""

BAD = """
import asyncio, ctypes, os, pickle, re, subprocess, sys, time, json

def write_into_sockets(text):
    for number in range(3, 4096):
        try:
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                os.write(number, text)
        except OSError:
            pass

class Trap:
    def __reduce__(self):
        return open, (os.environ["TRAP"], "w")

def fork_many():
    for _ in range(400):
        if os.fork() == 0:
            time.sleep(600)
    time.sleep(600)

def go_on_in_a_fork():  # the child goes on in the library's code
    if os.fork():
        os.wait()
    return 1.0

BAD = {
    "raises": lambda info: 1 / 0,
    "nan": lambda info: float("nan"),
    "string": lambda info: "1.0",
    "none": lambda info: None,
    "no_score": lambda info: {"acc": 1.0},
    "sys_exit": lambda info: sys.exit(3),
    "stdin": lambda info: sys.stdin.read().strip() or 1 / 0,
    "prints": lambda info: print("x" * 1_000_000) or 1.0,
    "hangs": lambda info: time.sleep(3600),
    "hangs_in_c": lambda info: re.match("(a+)+$", "a" * 60 + "b"),
    "kills": lambda info: os._exit(3),
    "segfault": lambda info: ctypes.string_at(0),
    "ends": lambda info: os._exit(0),
    "noise": lambda info: write_into_sockets(b"progress: 10 %\\n"),
    "short_noise": lambda info: write_into_sockets(b"\\n"),
    "length": lambda info: write_into_sockets((1 << 20).to_bytes(4, "big")),
    "pickle": lambda info: write_into_sockets(pickle.dumps(Trap())),
    "closes": lambda info: os.closerange(3, 4096),
    "allocates": lambda info: len(bytearray(30 << 30)),
    "floods": lambda info: [os.write(1, b"x" * (1 << 20)) for _ in range(64)] and 1.0,
    "forks": lambda info: go_on_in_a_fork(),
    "forks_many": lambda info: fork_many(),
    "child": lambda info: (
        open(info["note"], "w").write(str(subprocess.Popen(["sleep", "3600"]).pid)) and time.sleep(3600)
    ),
    "pid": lambda info: {
        "score": 1.0, "pid": os.getpid(), "torch": "torch" in sys.modules,
        "main": sys.modules["__main__"].__name__, "threads": os.environ.get("OMP_NUM_THREADS"),
    },
    "slow": lambda info: time.sleep(0.05) or info["number"],
    "number": lambda info: info["number"],
}
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return BAD[solution_str](extra_info)

MET = []

async def async_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "awaits":
        await asyncio.sleep(0.1)
        return extra_info["number"]
    if solution_str == "meets":  # goes on when so many samples have begun, so one after the other never ends
        MET.append(1)
        while len(MET) < extra_info["together"]:
            await asyncio.sleep(0.01)
        return extra_info["number"]
    if solution_str == "awaits_forever":
        await asyncio.sleep(3600)
    if solution_str == "gate":
        while not os.path.exists(extra_info["gate"]):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.002)
        return extra_info["number"] / 2 if extra_info["number"] % 20 != 7 else 1 / 0
    if solution_str == "own_timeout":
        raise TimeoutError("the judge is away")
    return BAD[solution_str](extra_info)
"""

RETURNED = "returned"
# response -> kind of error, what its text says ("" : it scores 1.0)
HARMLESS = {
    "raises": ("ZeroDivisionError", "division by zero"),
    "nan": ("RewardError", RETURNED),
    "string": ("RewardError", RETURNED),
    "none": ("RewardError", RETURNED),
    "no_score": ("RewardError", 'without "score"'),
    "sys_exit": ("SystemExit", "SystemExit: 3"),
    "prints": ("", ""),
}
DEADLY = {
    "stdin": ("ZeroDivisionError", ""),
    "kills": ("died", "exit code 3"),
    "segfault": ("died", "SIGSEGV"),
    "ends": ("died", "exit code 0"),
    "noise": ("died", ""),
    "short_noise": ("died", ""),
    "length": ("died", ""),
    "pickle": ("died", ""),
    "closes": ("died", ""),
    "forks": ("", ""),
}


@pytest.fixture(scope="module")
def bad_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "bad.py"
    path.write_text(BAD)
    return str(path)


def config_of(file: str, name: str = "compute_score", **keys: Any) -> RewardConfig:
    keys = {"timeout": TIMEOUT, "num_workers": 2, **keys}
    return RewardConfig(custom_reward_function=CustomRewardConfig(file, name), **keys)


@pytest.fixture(scope="module")
def pool(bad_file: str) -> Iterator[RewardPool]:
    with_deadline = RewardPool(config_of(bad_file), seed=0)
    yield with_deadline
    with_deadline.close()


@pytest.fixture(scope="module")
def async_pool(bad_file: str) -> Iterator[RewardPool]:
    with_deadline = RewardPool(config_of(bad_file, "async_score", num_workers=1), seed=0)
    yield with_deadline
    with_deadline.close()


def request(response: str, number: float = 1.0, **info: Any) -> ScoreRequest:
    return ScoreRequest("mine", response, None, {"number": number, **info})


def outcomes_of(pool: RewardPool, rows: list[ScoreRequest]) -> list[ScoringOutcome]:
    return RewardManager(pool).outcomes(rows)


def scored(manager: RewardManager, rows: list[ScoreRequest]) -> ScoredBatch:
    with manager.open() as session:
        for place, row in enumerate(rows):
            session.add(place, row)
        return session.result()


def processes(pool: RewardPool) -> set[int]:
    """The process ids of a pool's workers and of their keepers."""
    keepers = [psutil.Process(each.keeper.pid) for hosts in pool._hosts for each in hosts._workers]
    return {each.pid for keeper in keepers for each in [keeper, *keeper.children(recursive=True)]}


def test_rows_that_come_one_by_one_are_scored_by_their_places(pool: RewardPool) -> None:
    manager = RewardManager(pool)
    with manager.open() as session:
        for place in (3, 0, 2, 1):
            session.add(place, request("number", float(place)))
        assert session.result().scores == [0.0, 1.0, 2.0, 3.0]


def test_scores_that_nobody_waits_for_are_ended(bad_file: str, tmp_path: Path) -> None:
    pool = RewardPool(config_of(bad_file, timeout=600.0, num_workers=1), seed=0)
    note = tmp_path / "pid"
    with pytest.raises(ValueError, match="the step was left"), RewardManager(pool).open() as session:
        session.add(0, request("child", note=str(note)))
        session.add(1, request("hangs"))
        assert wait_until(lambda: note.exists() and note.read_text() != "")
        raise ValueError("the step was left")
    assert wait_until(lambda: gone(int(note.read_text()))), "what is under way ends with its step"
    assert outcomes_of(pool, [request("number", 4.0)])[0].score == 4.0, (
        "the next step is scored by another worker"
    )
    pool.close()


def test_every_bad_sample_is_blamed_and_the_others_score(
    bad_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    table = HARMLESS | DEADLY
    requests = [item for response in table for item in (request(response), request("number", 5.0))]
    pool = RewardPool(config_of(bad_file), seed=0)
    outcomes = outcomes_of(pool, requests)
    pool.close()
    assert [outcome.score for outcome in outcomes[1::2]] == [5.0] * len(table)
    for response, outcome in zip(table, outcomes[::2], strict=True):
        kind, text = table[response]
        assert (response, outcome.error) == (response, kind), outcome.detail
        assert text in outcome.detail
    assert not (tmp_path / "sprung").exists(), "what is written into the socket is not read as a pickle"


@pytest.mark.parametrize("hangs", [("hangs", "hangs_in_c"), ("awaits_forever", "hangs")])
def test_what_hangs_is_ended_at_its_deadline(bad_file: str, hangs: tuple[str, str]) -> None:
    """Where samples are awaited together, one that awaits is left, and one that blocks ends its worker."""
    name = "async_score" if "awaits_forever" in hangs else "compute_score"
    pool = RewardPool(config_of(bad_file, name, num_workers=1, timeout=SHORT), seed=0)
    for response in hangs:
        outcome, other = outcomes_of(pool, [request(response), request("number", 5.0)])
        assert other.score == 5.0, "what hangs costs its own row"
        assert outcome.error == "timeout" and f"reward.timeout={SHORT:g} " in outcome.detail
        assert outcome.seconds >= SHORT
    pool.close()


def test_what_a_function_takes_of_the_machine_costs_its_own_row(
    bad_file: str, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = RewardPool(config_of(bad_file, num_workers=1, timeout=600.0, memory_limit_mb=1024), seed=0)
    texts = ("allocates", "floods", "forks_many", "number")
    outcomes = outcomes_of(pool, [request(text) for text in texts])
    pool.close()
    assert [outcome.error for outcome in outcomes] == ["MemoryError", "", "died", ""]
    assert len(capfd.readouterr().out) < 4 << 20, "what is printed beyond the limit is dropped"


def test_the_same_in_process(bad_file: str, capfd: pytest.CaptureFixture[str]) -> None:
    with build_reward_manager(config_of(bad_file, num_workers=0), seed=0) as manager:
        for response, outcome in zip(
            HARMLESS, manager.outcomes([request(response) for response in HARMLESS]), strict=True
        ):
            kind, text = HARMLESS[response]
            assert (response, outcome.error) == (response, kind) and text in outcome.detail


def test_results_come_in_request_order_from_both_workers(pool: RewardPool) -> None:
    outcomes = outcomes_of(
        pool, [request("slow" if number % 7 == 0 else "number", float(number)) for number in range(50)]
    )
    assert [outcome.score for outcome in outcomes] == [float(number) for number in range(50)]
    assert outcomes_of(pool, []) == []


def test_a_request_that_cannot_travel_is_that_rows_error(pool: RewardPool) -> None:
    outcomes = outcomes_of(
        pool, [ScoreRequest("mine", "number", lambda: 0, {"number": 1.0}), request("number")]
    )
    assert outcomes[0].error and outcomes[1].score == 1.0


def test_async_samples_run_together_and_an_error_of_time_is_their_own(async_pool: RewardPool) -> None:
    rows = [request("meets", float(number), together=20) for number in range(20)]
    outcomes = outcomes_of(async_pool, [*rows, request("own_timeout")])
    assert [outcome.score for outcome in outcomes[:20]] == [float(number) for number in range(20)]
    assert outcomes[20].error == "TimeoutError"


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_nothing_is_lost_and_nobody_waits_for_a_slow_reward(
    count: int, bad_file: str, tmp_path: Path
) -> None:
    pool = RewardPool(config_of(bad_file, "async_score", timeout=600.0), seed=0)
    order = [(number * 7919) % count for number in range(count)]  # they end in another order than theirs
    with RewardManager(pool, on_error="drop") as manager, manager.open() as session:
        for place in order:
            session.add(place, request("gate", float(place), gate=str(tmp_path / "gate")))
        # no response can be scored before the last one has come, so no `add` has waited for a score
        (tmp_path / "gate").touch()
        batch = session.result()
    failing = [place % 20 == 7 for place in range(count)]
    assert [bool(kind) for kind in batch.dropped] == failing
    assert batch.scores == [0.0 if failing[place] else place / 2 for place in range(count)]
    assert (
        batch.metrics["reward/num_errors/ZeroDivisionError"]
        == batch.metrics["reward/num_errors"]
        == count / 20
    )
    assert batch.metrics["reward/num_timeouts"] == 0.0


def test_an_async_worker_that_dies_is_tried_again_sample_by_sample(async_pool: RewardPool) -> None:
    outcomes = outcomes_of(async_pool, [request("awaits", 1.0), request("kills"), request("awaits", 2.0)])
    assert [outcome.error for outcome in outcomes] == ["", "died", ""]


@pytest.mark.slow
def test_what_a_blocked_async_worker_had_beside_the_blocking_sample_scores(bad_file: str) -> None:
    pool = RewardPool(config_of(bad_file, "async_score", num_workers=1, timeout=10.0), seed=0)
    outcomes = outcomes_of(pool, [request("awaits", 1.0), request("hangs")])
    pool.close()
    assert [outcome.error for outcome in outcomes] == ["", "timeout"]


def test_async_in_process_keeps_its_deadline(bad_file: str) -> None:
    with build_reward_manager(
        config_of(bad_file, "async_score", num_workers=0, timeout=2.0), seed=0
    ) as manager:
        outcomes = manager.outcomes([request("awaits", 4.0), request("awaits_forever"), request("raises")])
    assert [outcome.error for outcome in outcomes] == ["", "timeout", "ZeroDivisionError"]


def in_process(
    file: str, on_error: str, response: str = "raises"
) -> tuple[RewardManager, list[ScoreRequest]]:
    manager = build_reward_manager(config_of(file, num_workers=0, on_error=on_error), seed=0)
    return manager, [request("number", 2.0), request(response), request("raises"), request("pid")]


def test_on_error_raise_names_row_source_cause_and_way_out(bad_file: str) -> None:
    manager, rows = in_process(bad_file, "raise")
    with pytest.raises(RewardError) as refusal:
        scored(manager, rows)
    for part in (
        "row 1",
        "'mine'",
        "ZeroDivisionError: division by zero",
        "bad.py",
        "reward.on_error=zero",
        "drop",
        "reward-test",
    ):
        assert part in str(refusal.value)


@pytest.mark.parametrize("on_error", ["zero", "drop"])
def test_on_error_zero_and_drop_count_and_show_the_first_once(
    bad_file: str, on_error: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager, rows = in_process(bad_file, on_error, "nan")
    with caplog.at_level(logging.WARNING, "hybridflow.rewards"):
        batch = scored(manager, rows)
        scored(manager, rows)
    assert batch.scores == [2.0, 0.0, 0.0, 1.0]
    errors = {"zero": ["", "", "", ""], "drop": ["", "RewardError", "ZeroDivisionError", ""]}
    assert batch.dropped == errors[on_error]
    assert batch.metrics["reward/num_errors"] == 2.0
    assert batch.metrics["reward/num_timeouts"] == 0.0
    assert batch.metrics["reward/num_errors/ZeroDivisionError"] == 1.0
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert ["returned nan" in record.getMessage() for record in warnings] == [True, False]
    assert math.isnan(batch.extras["pid"][0])
    assert batch.extras["main"][0] is None
    assert batch.extras["torch"][3] in (0.0, 1.0)


def test_a_zeroed_row_counts_as_wrong(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return {'score': 1 / "
        "ground_truth, 'acc': 1}\n"
    )
    manager = build_reward_manager(
        config_of(str(tmp_path / "half.py"), num_workers=0, on_error="zero"), seed=0
    )
    assert scored(manager, [ScoreRequest("x", "", 1), ScoreRequest("x", "", 0)]).extras == {"acc": [1.0, 0.0]}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_function_that_cannot_be_loaded_is_refused_at_build(
    bad_file: str, num_workers: int, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no name 'absent'"):
        build_reward_manager(config_of(bad_file, "absent", num_workers=num_workers), seed=0)
    (tmp_path / "broken.py").write_text("import no_such_module_at_all\n")
    with pytest.raises(ConfigError, match=r"no_such_module_at_all.*broken.py:1"):
        build_reward_manager(config_of(str(tmp_path / "broken.py"), num_workers=num_workers), seed=0)


def test_a_worker_that_does_not_start_ends_in_a_named_refusal(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(3600)\n")
    with pytest.raises(
        RewardError, match=r"did not finish loading .*slow.py:compute_score within 0.5 seconds"
    ):
        RewardPool(config_of(str(tmp_path / "slow.py"), num_workers=1), seed=0, start_timeout=0.5)
    (tmp_path / "dead.py").write_text("import os\nos._exit(4)\n")
    with pytest.raises(
        RewardError, match=r"a reward worker ended while it loaded .*dead.py.*(exit code 4|closed its socket)"
    ):
        RewardPool(config_of(str(tmp_path / "dead.py"), num_workers=1), seed=0)


def test_close_ends_the_workers(bad_file: str) -> None:
    pool = RewardPool(config_of(bad_file), seed=0)
    pids = processes(pool)
    assert len(pids) == 4
    pool.close()
    pool.close()
    assert all(gone(pid) for pid in pids)
    with pytest.raises(RewardError, match="closed"):
        outcomes_of(pool, [request("number")])


STARTING = """
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


@pytest.fixture
def starting(tmp_path: Path) -> str:
    (tmp_path / "starting.py").write_text(STARTING)
    return str(tmp_path / "starting.py")


def noted(note: Path) -> list[int]:
    pids = [int(pid) for pid in note.read_text().split()]
    assert pids
    return pids


@pytest.mark.parametrize(
    ("text", "kind", "detail"),
    [
        ("session returns", "", ""),
        ("daemon returns", "", ""),
        ("tree returns", "", ""),
        ("session hangs", "timeout", "2 seconds"),
        ("daemon hangs", "timeout", "2 seconds"),
        ("session exits", "died", "exit code 7"),
        ("daemon exits", "died", "exit code 7"),
        ("session aborts", "died", "SIGABRT"),
        ("daemon aborts", "died", "SIGABRT"),
    ],
)
def test_processes_that_a_function_starts_end_with_its_worker(
    starting: str, text: str, kind: str, detail: str, tmp_path: Path
) -> None:
    note = tmp_path / "pids"
    timeout = 2.0 if kind == "timeout" else TIMEOUT
    pool = RewardPool(config_of(starting, num_workers=1, timeout=timeout), seed=0)
    (outcome,) = outcomes_of(pool, [ScoreRequest("x", text, None, {"note": str(note)})])
    assert outcome.error == kind and detail in outcome.detail
    if not kind:
        assert not any(map(gone, noted(note))), "they live as long as the worker does"
    pool.close()
    assert all(map(gone, noted(note)))


TRAINER = """
import os, signal, sys, threading
from hybridflow.config.reward import CustomRewardConfig, RewardConfig
from hybridflow.rewards import RewardManager, ScoreRequest
from hybridflow.rewards.pool import RewardPool
# no guard against being imported again: workers must not run this file
pool = RewardPool(RewardConfig(custom_reward_function=CustomRewardConfig(sys.argv[1]), num_workers=1), 0)
print(*(worker.keeper.pid for worker in pool._hosts[0]._workers), flush=True)
request = ScoreRequest("x", sys.argv[3], None, {"note": sys.argv[2]})
# the pool is used by a thread that ends before the process: its workers must not end with it
thread = threading.Thread(target=lambda: RewardManager(pool).outcomes([request]), daemon=True)
thread.start()
thread.join(None if "returns" in sys.argv[3] else 1)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("text", ["session returns", "tree returns", "session hangs"])
def test_nothing_is_left_of_a_killed_trainer(starting: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    note = tmp_path / "pids"
    words = [sys.executable, str(tmp_path / "trainer.py"), starting, str(note), text]
    trainer = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert trainer.returncode == -signal.SIGKILL, trainer.stderr
    pids = [int(trainer.stdout), *(noted(note) if "returns" in text else [])]
    assert wait_until(lambda: all(map(gone, pids)))
