"""The watch over processes that die, fall silent or take too long."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import sleeper
from ray import cloudpickle

from hybridflow.controller.ray.cluster import RayCluster
from hybridflow.controller.ray.running import Failure, Process, RayPart, Running, Traffic
from hybridflow.controller.ray.watchdog import Watchdog
from hybridflow.controller.worker import Place
from hybridflow.errors import WorkerError, WorkerLost, WorkerTraceback

# Ray starts slowly on a busy machine: once for all
pytestmark = [pytest.mark.timeout(1800), pytest.mark.xdist_group("ray")]


WAIT = 120.0
"""Seconds that a test waits for something that takes one or two on a quiet machine."""


class House:
    """Two processes and the watch over them."""

    def __init__(self, **settings: float) -> None:
        cloudpickle.register_pickle_by_value(sleeper)  # so that the processes need not find the module
        remote: Any = ray.remote
        actor = remote(num_cpus=0, concurrency_groups={"control": 1}, max_restarts=0)(sleeper.Sleeper)
        self.processes = [Process(Place(rank=rank, world_size=2), actor.remote()) for rank in range(2)]
        for process in self.processes:
            process.pid = ray.get(process.actor.ping.remote())
            process.node_id = ray.get_runtime_context().get_node_id()
        self.watch = Watchdog(self.processes, **({"heartbeat_timeout": WAIT} | settings))
        self.watch.expect_signs()

    def call(
        self, *seconds: float, limit: float = 60.0, task: str = "invoke", starting: str = ""
    ) -> dict[int, RayPart]:
        """A task of as many ranks as there are numbers."""
        parts, statuses = {}, {}
        for rank, number in enumerate(seconds):
            statuses[rank], result = getattr(self.processes[rank].actor, task).remote(
                *([number] if task == "invoke" else [])
            )
            parts[rank] = RayPart(result, "actor", "update", rank, Traffic())
        processes = dict(enumerate(self.processes[: len(seconds)]))
        self.watch.follow(Running("actor", "update", processes, parts, limit, "a.key", starting), statuses)
        return parts

    def close(self) -> None:
        self.watch.stop(WorkerError("over"))
        for process in self.processes:
            ray.kill(process.actor)


@pytest.fixture
def house(cluster: RayCluster, request: pytest.FixtureRequest) -> Iterator[House]:
    house = House(**getattr(request, "param", {}))
    yield house
    house.close()


def test_a_killed_process_ends_the_calls_in_it_and_all_later_ones(house: House) -> None:
    assert [part.exception(timeout=WAIT) for part in house.call(0.0, 0.1).values()] == [None, None]
    assert house.watch.idle
    parts = house.call(0.01, 60.0)
    assert parts[0].exception(timeout=WAIT) is None
    os.kill(house.processes[1].pid, 9)
    error = parts[1].exception(timeout=WAIT)
    assert isinstance(error, WorkerLost) and (error.role, error.rank, error.method) == ("actor", 1, "update")
    assert "signal 9" in str(error) and f"process {house.processes[1].pid}" in str(error)
    assert not house.watch.idle
    with pytest.raises(WorkerLost, match="actor rank 1 is lost"):
        house.watch.check("critic.update")


def test_what_is_lost_with_a_process_that_ended_is_told_as_the_reason_why_it_ended(house: House) -> None:
    late = house.call(60.0, limit=0.5)[0].exception(timeout=WAIT)
    assert "has not finished after" in str(late)
    part = RayPart(None, "rollout", "update", 1, Traffic())
    running = Running("rollout", "update", {1: house.processes[1]}, {1: part}, 60.0, "a.key")
    answer: concurrent.futures.Future[Failure] = concurrent.futures.Future()
    answer.set_result(Failure.of(WorkerLost("an argument is lost with the process"), Place(rank=1)))
    house.watch._answered(running, 1, answer)
    assert part.exception(timeout=WAIT) is late


@pytest.mark.slow
def test_a_process_that_dies_between_calls_is_noticed(house: House) -> None:
    os.kill(house.processes[0].pid, 9)
    until = time.monotonic() + WAIT
    with pytest.raises(WorkerLost, match=r"rank 0 of pool global is lost .*signal 9"):
        while time.monotonic() < until:
            house.watch.check("actor.update")
            time.sleep(0.05)


@pytest.mark.parametrize("house", [{"heartbeat_timeout": 4.0}], indirect=True)
def test_a_process_without_a_sign_of_life_is_lost(house: House) -> None:
    began = time.monotonic()
    parts = house.call(0.0, 0.0, task="freeze")
    error = parts[0].exception(timeout=WAIT)
    assert (
        isinstance(error, WorkerLost)
        and "no sign of life for 4 s" in str(error)
        and "heartbeat_timeout" in str(error)
    )
    assert time.monotonic() - began >= 4


@pytest.mark.slow
@pytest.mark.parametrize("house", [{"report_every": 1.0}], indirect=True)
def test_slow_calls_are_reported_with_a_stack_and_end_at_their_deadline(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hybridflow"):
        parts = house.call(0.01, 60.0, limit=2.5)
        error = parts[1].exception(timeout=WAIT)
    said = [record.getMessage() for record in caplog.records]
    assert re.match(r"actor\.update has been running for \d+ s on ranks \[1\]; rank 1 \(global/1\)", said[0])
    assert "asleep in invoke" in said[0]
    assert isinstance(error, WorkerError) and not isinstance(error, WorkerLost)
    assert "actor.update has not finished after 2 s on ranks [1]" in str(error) and "a.key" in str(error)
    assert "asleep in invoke" in error.__notes__[0]


@pytest.mark.slow
def test_calls_that_are_late_together_end_with_the_error_of_the_first(house: House) -> None:
    first = house.call(0.01, 60.0, limit=2.5)
    second = house.call(0.01, 0.0, limit=2.5)  # it waits for the first one to end
    assert first[1].exception(timeout=WAIT) is second[1].exception(timeout=WAIT)


def test_processes_that_start_are_counted_and_only_late_ones_warned_about(
    house: House, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridflow.controller.ray.watchdog.START_SECONDS", 0.5)
    with caplog.at_level(logging.INFO, "hybridflow"):
        error = house.call(0.0, 60.0, limit=10.0, starting="starting 2 worker processes")[1].exception(
            timeout=WAIT
        )
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    counted = [text for level, text in said if level == "INFO"]
    late = [text for level, text in said if level == "WARNING"]
    assert counted and all("starting 2 worker processes: 1 have started after" in text for text in counted)
    assert late and "but not global/1; the run gives up after 10 s (a.key)" in late[0]
    assert said.index(("WARNING", late[0])) >= len(counted), "only what is late is warned about"
    assert "starting 2 worker processes has not finished after 10 s" in str(error)


def ranks_of(errors: dict[int, tuple[float, Exception]], waiting: tuple[int, ...] = ()) -> Running:
    process = Process(Place(), None)
    running = Running("actor", "update", dict.fromkeys((*errors, *waiting), process), {}, 60.0, "a.key")
    for rank, (at, error) in errors.items():
        running.fail(rank, error, at)
    return running


def test_the_failure_that_came_first_is_reported() -> None:
    error = ranks_of(
        {0: (2.0, RuntimeError("connection closed")), 2: (1.0, ValueError("bad row\nmore"))}, (1,)
    ).first_error()
    assert isinstance(error, ValueError)
    assert error.__notes__[0] == "then failed rank 0: RuntimeError: connection closed"
    assert "did not end on ranks [1]" in error.__notes__[1]


def test_a_lost_process_explains_the_failures_of_others() -> None:
    error = ranks_of(
        {0: (1.0, RuntimeError("connection closed")), 1: (2.0, WorkerLost("gone"))}
    ).first_error()
    assert isinstance(error, WorkerLost)


def test_of_ranks_that_failed_alike_the_lowest_speaks() -> None:
    errors = {rank: (9.0 - rank, ValueError("no luck")) for rank in range(3)}
    error = ranks_of(errors).first_error()
    assert error is errors[0][1] and error.__notes__ == ["the same on ranks [1, 2]"]


def test_a_failure_travels_with_its_type_notes_and_traceback() -> None:
    try:
        raise WorkerError("no room", role="actor", rank=3, method="update")
    except WorkerError as raised:
        raised.add_note("in actor.update, rank 3")
        error = Failure.of(raised, Place("train", 3, 4, 1, "node-7")).exception("actor", "update", 3)
    assert isinstance(error, WorkerError) and error.rank == 3 and str(error) == "no room"
    assert error.__notes__[0] == "in actor.update, rank 3" and len(error.__notes__) == 2
    assert error.__notes__[1].startswith("there: pool train, node node-7")
    assert isinstance(error.__cause__, WorkerTraceback) and 'raise WorkerError("no room"' in str(
        error.__cause__
    )
