"""What comes back from a reward worker: plain values, whatever the function returns or writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.reward import CustomRewardConfig, RewardConfig
from hybridflow.errors import RewardError
from hybridflow.processes.channel import MARK, ChannelBroken, frame, take_messages
from hybridflow.rewards import ScoreRequest
from hybridflow.rewards.build import ExitGuard, build_reward_manager
from hybridflow.rewards.call import MAX_ANSWER
from hybridflow.rewards.result import normalize_result

FUNCTION = """
import os
import numpy as np

class Trap(float):
    def __reduce__(self):
        return open, (os.environ["TRAP"], "w")

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {
        "trap": {"score": Trap(1.0), "extra": Trap(2.0), "list": [Trap(3.0)]},
        "numpy": {"score": np.float32(1), "flag": np.bool_(True), "many": np.arange(3), "one": np.int64(4)},
        "object": {"score": 1.0, "pattern": object()},
        "huge": {"score": 1.0, "small": 1, "text": "x" * (70 << 20)},
        "plain": 1.0,
    }[solution_str]
"""


def test_what_comes_back_is_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd.py").write_text(FUNCTION)
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    function = CustomRewardConfig(str(tmp_path / "odd.py"))
    config = RewardConfig(custom_reward_function=function, num_workers=1, timeout=60)
    texts = ("trap", "numpy", "object", "huge", "plain")
    with build_reward_manager(config, seed=0) as manager:
        trap, numpy, unsendable, huge, fine = manager.outcomes(
            [ScoreRequest("x", text, None) for text in texts]
        )
    assert not (tmp_path / "sprung").exists(), "a value with __reduce__ runs no code in the trainer"
    assert trap.score == 1.0 and trap.extras == {"extra": 2.0, "list": [3.0]}
    assert [type(trap.score), type(trap.extras["extra"])] == [float, float]
    assert numpy.score == 1.0 and numpy.extras == {"flag": True, "many": [0, 1, 2], "one": 4}
    assert unsendable.error == "RewardError" and "'pattern'" in unsendable.detail
    assert "(object)" in unsendable.detail
    assert huge.error == "RewardError" and "'text'" in huge.detail and f"{MAX_ANSWER:,}" in huge.detail
    assert fine.score == 1.0


def test_frames_are_taken_whole_and_stray_bytes_refused() -> None:
    buffer = bytearray()
    taken = []
    for byte in frame(b"one") + frame(b"") + frame(b"x" * 5000):
        buffer.append(byte)
        taken += take_messages(buffer)
    assert taken == [b"one", b"", b"x" * 5000] and not buffer
    spoilt = bytearray(frame(b"one"))
    spoilt[-1] ^= 1
    for stray in (b"H!", b"\n", MARK + b"\xff" * 12, bytes(spoilt)):
        with pytest.raises(ChannelBroken):
            take_messages(bytearray(stray))


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ({1}, r"under 'k' \{1\} \(set\)"),
        (b"x", r"\(bytes\)"),
        ({"a": {"b": 1j}}, r"under 'k.a.b' 1j \(complex\)"),
        (10**400, "an integer beyond float64"),
    ],
    ids=["set", "bytes", "nested", "huge"],
)
def test_a_value_that_json_lacks_names_key_and_type(value: Any, got: str) -> None:
    with pytest.raises(RewardError, match=got):
        normalize_result({"score": 1.0, "k": value})
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(RewardError, match="under 'k' lists or dicts more than 20 levels deep"):
        normalize_result({"score": 1.0, "k": endless})


EXITING = """
import os, threading
from os import _exit
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "thread":
        thread = threading.Thread(target=os._exit, args=(0,))
        thread.start()
        thread.join()
    if solution_str == "fork":
        child = os.fork()
        if child == 0:
            os._exit(5)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    (os._exit if solution_str == "os" else _exit)(0)
async def asynchronous(data_source, solution_str, ground_truth, extra_info):
    os._exit(0)
"""
RUN = """
import sys
from hybridflow.config.reward import CustomRewardConfig, RewardConfig
from hybridflow.rewards import ScoreRequest
from hybridflow.rewards.build import build_reward_manager
config = RewardConfig(custom_reward_function=CustomRewardConfig(sys.argv[1], sys.argv[2]), num_workers=0)
with build_reward_manager(config, seed=0) as manager:
    print(manager.outcomes([ScoreRequest("x", sys.argv[3], None)])[0])
    with manager.open() as session:
        session.add(0, ScoreRequest("x", sys.argv[3], None))
        session.result()
"""


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("compute_score", "os", "called os._exit(0), which would have ended the run"),
        ("compute_score", "imported", "called os._exit(0), which would have ended the run"),
        ("asynchronous", "", "called os._exit(0), which would have ended the run"),
        ("compute_score", "thread", "the run ends with status 1"),
    ],
)
def test_os_exit_in_the_runs_own_process_is_no_success(
    name: str, text: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "exiting.py").write_text(EXITING)
    words = [sys.executable, "-c", RUN, str(tmp_path / "exiting.py"), name, text]
    run = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert run.returncode == 1 and said in run.stderr, run.stderr
    if text != "thread":
        assert "Outcome(score=0.0" in run.stdout and "RewardError: " in run.stderr


def test_the_exit_guard_lets_forks_end_and_goes_away(tmp_path: Path) -> None:
    real = os._exit
    (tmp_path / "exiting.py").write_text(EXITING)
    config = RewardConfig(
        custom_reward_function=CustomRewardConfig(str(tmp_path / "exiting.py")), num_workers=0
    )
    with build_reward_manager(config, seed=0) as manager:
        assert manager.outcomes([ScoreRequest("x", "fork", None)])[0].score == 5.0
    assert os._exit is real
    guard = ExitGuard()
    guard.remove()
    assert os._exit is real
