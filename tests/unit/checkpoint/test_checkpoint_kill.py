"""A process that is killed while it saves, at every system call that matters and at random moments."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.checkpoint.layout import TRACKER
from hybridflow.checkpoint.store import CheckpointStore

KILLED = 9


def state_of(step: int) -> dict[str, Any]:
    return {"actor": {"w": torch.full((3000,), float(step)), "step": step}}


def in_child(body: Callable[[], None]) -> int:
    """Run `body` in a forked process; gives its process id."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        try:
            body()
        finally:
            os._exit(0)
    return child


def die_at(call: int) -> list[int]:
    """End this process without clean-up at the given call of fsync, replace or rmdir; give the counter."""
    count = [0]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if count[0] == call:
                os._exit(KILLED)
            count[0] += 1
            return real(*args, **kwargs)

        return wrapped

    for name in ("fsync", "replace", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    return count


def assert_whole(run_dir: Path, at_least: int) -> int:
    store = CheckpointStore(run_dir)
    loaded = store.load_latest()
    assert loaded is not None and loaded.step >= at_least
    assert loaded.state["actor"]["step"] == loaded.step
    assert loaded.state["actor"]["w"].equal(torch.full((3000,), float(loaded.step)))
    odd = [path.name for path in run_dir.iterdir() if path.name.startswith((".tmp_", ".old_", ".trash_"))]
    assert odd == [], "leftovers of the dead process are removed"
    return loaded.step


@pytest.mark.parametrize("second", [2, 1], ids=["next step, rotating", "same step again"])
def test_killed_at_every_call(tmp_path: Path, second: int) -> None:
    outcomes = []
    for call in range(100):
        run_dir = tmp_path / str(call)
        CheckpointStore(run_dir).save(1, state_of(1))

        def save(call: int = call, run_dir: Path = run_dir) -> None:
            die_at(call)
            CheckpointStore(run_dir, keep=1).save(second, state_of(second))

        _, status = os.waitpid(in_child(save), 0)
        outcomes.append(assert_whole(run_dir, at_least=1))
        if os.waitstatus_to_exitcode(status) != KILLED:
            break
    else:
        raise AssertionError("the save never ended")
    assert len(outcomes) > 10, "every call was tried"
    assert outcomes[0] == 1 and outcomes[-1] == second and outcomes == sorted(outcomes)
    assert (run_dir / TRACKER).read_text() == str(second)


def test_killed_at_random_moments(tmp_path: Path) -> None:
    CheckpointStore(tmp_path).save(1, state_of(1))
    moments, last = random.Random(0), 1
    for _ in range(8):

        def loop(start: int = last) -> None:
            store, step = CheckpointStore(tmp_path, keep=2), start
            while True:
                step += 1
                store.save(step, state_of(step))

        child = in_child(loop)
        time.sleep(moments.uniform(0.02, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        last = assert_whole(tmp_path, at_least=last)
    assert last > 1
    CheckpointStore(tmp_path, keep=2).save(last + 1, state_of(last + 1))
    assert {path.name for path in tmp_path.glob("global_step_*")} >= {f"global_step_{last + 1}"}
    assert len(list(tmp_path.glob("global_step_*"))) == 2, "what killed rotations left goes with the next"
