"""Generation as the driver sees it, in this process; the same scenes run on Ray in `unit/controller/ray`."""

from __future__ import annotations

import concurrent.futures
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))

from rollout_scenes import SCENES, factories, group_on, request
from scripted_engine import ScriptedEngine

from hybridflow.controller import LocalBackend, MeshInfo, RankInfo
from hybridflow.controller.backend import Part
from hybridflow.controller.dispatch import Call, Lane
from hybridflow.errors import RolloutError, WorkerLost
from hybridflow.rollout.client import LLMClient, ReplicaLost
from hybridflow.workers.rollout import COLLECTOR_NUMBERS, RolloutWorker
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


@pytest.fixture
def seldom_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for outputs without a long wait: the calls of `Two` come one after the other."""
    monkeypatch.setattr("hybridflow.workers.rollout_group.POLL_SECONDS", 0.01)


class Two(LocalBackend):
    """Two processes, each of one replica, in this one."""

    def __init__(self, engines: list[ScriptedEngine], ranks: int = 1) -> None:
        super().__init__(lambda host: {"rollout": lambda info: RolloutWorker(engines[0])})
        self.ranks = ranks
        self.workers = [RolloutWorker(engine) for engine in engines]
        for rank, worker in enumerate(self.workers):
            worker.rank_info = RankInfo("rollout", rank, len(engines))

    def mesh(self, role: str) -> MeshInfo:
        size = len(self.workers)
        return MeshInfo(size, (("dp", size // self.ranks), ("tp", self.ranks)))

    def run(self, role: str, method: str, calls: Sequence[Call | None]) -> list[Any]:
        found = []
        for worker, call in zip(self.workers, calls, strict=True):
            if call is not None:
                result = getattr(worker, method)(*call.args, **call.kwargs)
                if call.returns:
                    found.append(result)
        return found

    def submit(self, role: str, method: str, calls: Sequence[Call | None], lane: Lane = "ordered") -> Any:
        parts = {}
        for rank, call in enumerate(calls):
            if call is not None:
                only = [call if place == rank else None for place in range(len(calls))]
                part: Part = concurrent.futures.Future()
                try:
                    part.set_result(next(iter(self.run(role, method, only)), None))
                except Exception as error:
                    part.set_exception(error)
                parts[rank] = part
        return parts


def tokens_of(group: RolloutGroup, numbers: Sequence[int], last: int, **options: Any) -> list[list[int]]:
    found = group.generate([request(number, 1, last) for number in numbers], **options).outputs
    return [output.token_ids for output in found]


@pytest.mark.usefixtures("seldom_idle")
def test_what_is_left_of_requests_never_answers_later_ones_of_the_same_numbers() -> None:
    engines = [ScriptedEngine(), ScriptedEngine()]
    group = RolloutGroup(Two(engines), "rollout")

    def leave(output: object) -> None:
        raise KeyError("a mistake of the caller")

    for _ in range(5):
        with pytest.raises(KeyError, match="a mistake of the caller"):
            tokens_of(group, range(4), 10, finished=leave)
        assert tokens_of(group, range(4), 20) == [[21]] * 4


@pytest.mark.usefixtures("seldom_idle")
def test_an_error_that_was_raised_is_not_raised_again() -> None:
    engines = [ScriptedEngine(dies_at=1), ScriptedEngine(dies_at=1)]
    group = RolloutGroup(Two(engines), "rollout")
    with pytest.raises(RolloutError, match="out of memory"):
        group.generate([request(1), request(2, last=7)])
    for engine in engines:
        engine.dies_at = None
    assert tokens_of(group, range(4), 20) == [[21]] * 4


@pytest.mark.usefixtures("seldom_idle")
def test_an_engine_of_several_ranks_that_has_failed_is_used_no_more() -> None:
    group = RolloutGroup(Two([ScriptedEngine(dies_at=1), ScriptedEngine()], ranks=2), "rollout")
    with pytest.raises(RolloutError, match="out of memory"):
        group.generate([request(1)])
    with pytest.raises(RolloutError, match="generates no more: a rank of an engine has failed"):
        group.generate([request(1)])


class OneLost(Two):
    """Rank 1 is gone, which is noticed when it is asked for outputs."""

    def run(self, role: str, method: str, calls: Sequence[Call | None]) -> list[Any]:
        if method == "collect" and calls[1] is not None:
            raise WorkerLost("rollout rank 1 is lost: its node is gone")
        return super().run(role, method, calls)


def test_the_loss_of_a_rank_counts_before_the_error_that_another_engine_has_of_it() -> None:
    """An engine wakes by a collective of all ranks, which breaks where one of them is lost: only a loss
    brings a restart.
    """
    group = RolloutGroup(OneLost([ScriptedEngine(dies_at=1), ScriptedEngine()]), "rollout")
    with pytest.raises(WorkerLost, match="rank 1 is lost: its node is gone") as lost:
        group.generate([request(1), request(2, last=7)])
    assert any("then failed rollout-0" in note and "out of memory" in note for note in lost.value.__notes__)


def test_an_output_that_cannot_be_delivered_is_an_error() -> None:
    group = group_on(LocalBackend(factories))

    def deliver(rank: int, output: object) -> None:
        raise OSError("no way to the collector")

    group.call(RolloutWorker.deliver_by, deliver)
    with group.opened():
        group.call_one(0, RolloutWorker.submit, [request(COLLECTOR_NUMBERS, last=7)]).result()
        with pytest.raises(OSError, match="no way to the collector"):
            group.serve(lambda: False)


def test_an_engine_that_dies_while_it_is_paused_is_told() -> None:
    engine = ScriptedEngine()

    def sleep(level: int = 1) -> None:
        raise OSError("out of memory")

    engine.sleep = sleep  # type: ignore[method-assign]
    group = group_on(LocalBackend(lambda host: {"rollout": lambda info: RolloutWorker(engine)}))
    with pytest.raises(RolloutError, match="OSError: out of memory"):
        group.generate([request(1)])
