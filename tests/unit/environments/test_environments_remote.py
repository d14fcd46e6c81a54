"""Environments in processes of their own: the protocol, what goes wrong, and worlds of other libraries."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from endings import gone, wait_until
from hybridflow.environments.load import open_environment
from hybridflow.environments.remote import RemoteEnvironment, RemoteError
from hybridflow.errors import ConfigError
from hybridflow.processes.errors import CallTooLong
from hybridflow.processes.hosts import Hosts
from hybridflow.processes.local import LocalObject

WORLD = """
import json, os, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    if asked["method"] == "reset":
        answer = {"observation": [os.getpid(), asked["seed"], asked["step_seed"], asked["row"]["index"]]}
    elif asked["text"] == "raise":
        answer = {"error": "ValueError: too hot"}
    elif asked["text"] == "hang":
        time.sleep(10000)
    elif asked["text"] == "die":
        os._exit(3)
    elif asked["text"] == "babble":
        print("hello")
        continue
    else:
        done = asked["text"] == "bye"
        answer = {"observation": asked["text"] * 2, "reward": 0.5, "done": done, "extra": {"n": 1}}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "world.py").write_text(WORLD)
    return [sys.executable, "-S", str(tmp_path / "world.py")]


def begin(command: list[str], deadline_s: float = 300.0) -> tuple[RemoteEnvironment, int]:
    environment = open_environment("remote", {"command": command, "deadline_s": deadline_s}, 7, 8)
    assert isinstance(environment, RemoteEnvironment)
    pid, *rest = environment.reset({"index": 5, "odd": {1, 2}})  # type: ignore[misc]
    assert rest == [7, 8, 5], "ids and whatever else JSON has come over as they are"
    return environment, pid


def test_turns_go_over_and_a_process_serves_one_trajectory_after_another(command: list[str]) -> None:
    first, pid = begin(command)
    second, other = begin(command)
    assert pid != other, "each has a process while it lasts"
    step = first.step("ab")
    assert (step.observation, step.reward, step.done, step.extra) == ("abab", 0.5, False, {"n": 1})
    assert second.step("bye").done
    first.close()
    first.close()
    third, again = begin(command)
    assert again == pid
    third.close()
    second.close()


@pytest.mark.parametrize(
    ("text", "deadline_s", "message"),
    [
        ("raise", 300.0, "ValueError: too hot"),
        ("hang", 0.2, "no answer within 0.2 seconds"),
        ("die", 300.0, "has ended"),
        ("babble", 300.0, "Expecting value"),
    ],
)
def test_what_goes_wrong_is_told_and_the_process_is_ended(
    command: list[str], text: str, deadline_s: float, message: str
) -> None:
    environment, pid = begin(command)
    environment.deadline_s = deadline_s
    with pytest.raises(RemoteError, match=message):
        environment.step(text)
    environment.close()
    after, other = begin(command)
    assert other != pid, "a process that went wrong serves nobody else"
    after.close()


def test_a_process_that_owes_an_answer_is_ended_and_serves_nobody_else(command: list[str]) -> None:
    async def play() -> tuple[int, int]:
        environment, pid = begin(command)
        owing = LocalObject(environment)
        with pytest.raises(CallTooLong):
            await owing.call("step", "hang", deadline_s=0.05)
        await owing.call("close", deadline_s=300.0)
        after, other = begin(command)
        after.close()
        return pid, other

    pid, other = asyncio.run(play())
    assert other != pid and gone(pid)


def test_it_stays_with_its_worker_and_its_process_ends_with_it(command: list[str]) -> None:
    hosts = Hosts(1)

    async def play(factory: str) -> list[Any]:
        hosted = await hosts.create(factory, "remote", {"command": command}, 7, 8, deadline_s=300.0)
        first = await hosted.call("reset", {"index": 5}, deadline_s=300.0)
        step = await hosted.call("step", "ab", deadline_s=300.0)
        await hosted.call("close", deadline_s=300.0)
        await hosted.close()
        return [first[0], step.observation]

    async def play_twice() -> list[list[Any]]:
        factory = "hybridflow.environments.load:open_environment"
        return [await play(factory), await play(factory)]

    try:
        (pid, observation), again = asyncio.run(play_twice())
    finally:
        hosts.close()
    assert observation == "abab" and again == [pid, "abab"], "the process is there for the next trajectory"
    assert wait_until(lambda: gone(pid))


def test_a_command_that_can_not_be_started_is_named() -> None:
    with pytest.raises(RemoteError, match=r"/nowhere/python can not be started"):
        open_environment("world", {"world": "gymnasium", "python": "/nowhere/python"}).reset({})
    with pytest.raises(ConfigError, match="wanted a list of words"):
        open_environment("remote", {"command": "python world.py"})
    with pytest.raises(RemoteError, match="no world 'gim', only gymnasium"):
        open_environment("world", {"world": "gim"}).reset({})


def test_gymnasium_s_frozen_lake_is_walked() -> None:
    pytest.importorskip("gymnasium")
    options = {"id": "FrozenLake-v1", "render_mode": "ansi", "is_slippery": False}
    actions = ["left", "down", "right", "up"]
    lake = open_environment("world", {"world": "gymnasium", "actions": actions, **options})
    assert "[S]FFF" in str(lake.reset({}))
    invalid = lake.step("fly")
    assert "Wanted: left, down" in str(invalid.observation) and invalid.extra == {"invalid": 1}  # type: ignore[union-attr]
    steps = [lake.step(text) for text in ("go down", "1", "right", "down", "right", "right")]
    assert [step.reward for step in steps] == [0, 0, 0, 0, 0, 1] and steps[-1].done  # type: ignore[union-attr]
    lake.close()


def test_textarena_s_tower_is_moved() -> None:
    pytest.importorskip("textarena")
    tower = open_environment("world", {"world": "textarena", "id": "TowerOfHanoi-v0"})
    first = str(tower.reset({}))
    moves = [tower.step(f"[{move}]") for move in ("A C", "A B", "C B", "A C", "B A", "B C", "A C")]
    assert "Tower of Hanoi" in first and "Tower of Hanoi" not in str(moves[0].observation)  # type: ignore[union-attr]
    assert moves[-1].done and moves[-1].reward == 1.0  # type: ignore[union-attr]
    tower.close()
