"""Generation as the driver sees it, in this process; the same scenes run on Ray in `unit/controller/ray`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))

from rollout_scenes import SCENES, factories, group_on, request
from scripted_engine import ScriptedEngine

from hybridflow.controller import LocalBackend
from hybridflow.errors import RolloutError
from hybridflow.rollout.client import LLMClient, ReplicaLost
from hybridflow.workers.rollout import RolloutWorker
from hybridflow.workers.rollout_group import RolloutGroup


@pytest.mark.parametrize("scene", SCENES)
def test_in_this_process(scene: Callable[[RolloutGroup], None]) -> None:
    scene(group_on(LocalBackend(factories)))


def test_an_engine_that_dies_ends_the_work_with_its_own_error() -> None:
    engine = ScriptedEngine(dies_at=3)
    group = group_on(LocalBackend(lambda host: {"rollout": lambda info: RolloutWorker(engine)}))
    seen: list[Exception] = []

    async def work(client: LLMClient) -> None:
        try:
            await client.generate(request(1, 10))
        except ReplicaLost as error:
            seen.append(error)
            raise

    with pytest.raises(RolloutError, match="failed with 1 requests left: RuntimeError: out of memory"):
        group.run(work)
    assert "generation has ended: RolloutError: the engine failed" in str(seen[0])
    assert engine.sleeps == 1, "its memory is given back"
    engine.dies_at = None
    assert len(group.generate([request(1, 4)]).outputs[0].token_ids) == 4


def test_a_loop_that_cannot_begin_is_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_files_left() -> None:
        raise OSError("too many open files")

    async def work(client: LLMClient) -> None:
        raise AssertionError("never begun")

    group = group_on(LocalBackend(factories))
    monkeypatch.setattr("asyncio.runners.events.new_event_loop", no_files_left)
    with pytest.raises(OSError, match="too many open files"):
        group.run(work)
