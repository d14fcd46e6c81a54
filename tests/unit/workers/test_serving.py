"""Serving without an end and weights in flight, in this process; the same scenes run on Ray."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_scenes import (
    SCENES,
    Groups,
    factories,
    keeping_factories,
    request,
    scored,
    serving_all_the_time,
    submit,
)
from transformers import DynamicCache

from hybridflow.controller import LocalBackend
from hybridflow.errors import RolloutError, WorkerLost
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest
from hybridflow.rollout.client import ReplicaLost
from hybridflow.rollout.engine_replica import ReplicaUse
from hybridflow.rollout.native import session as native
from hybridflow.weight_sync.push import RemotePush
from hybridflow.workers.rollout import COLLECTOR_NUMBERS, RolloutWorker
from hybridflow.workers.rollout_replica import WorkerReplica

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))


class Apart(LocalBackend):
    """One process that says it is two."""

    def are_colocated(self, role: str, other: str) -> bool:
        return False


@pytest.mark.parametrize("scene", SCENES)
def test_in_this_process(scene: Callable[[Groups], None]) -> None:
    scene(Groups(Apart(factories)))


def test_a_shared_module_cannot_be_staged() -> None:
    groups = Groups(LocalBackend(factories))
    assert not groups.rollout.can_stage(groups.actor)
    with pytest.raises(RolloutError, match=r"version 3 cannot be staged.*trainer\.placement\.rollout"):
        groups.rollout.stage(groups.actor, 3)


class Sent:
    """A role's workers that note what is sent to them, and may be out of reach."""

    role = "rollout"

    def __init__(self, *, lost: bool = False) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.lost = lost

    def call_one(self, rank: int, method: Any, *args: Any) -> None:
        if self.lost:
            raise WorkerLost("rollout-0 is gone")
        sent = [one.request_id for one in args[0]] if method is RolloutWorker.submit else args[0]
        self.calls.append((method.__name__, sent))


def test_requests_of_one_round_of_an_event_loop_are_sent_together() -> None:
    group = Sent()
    replica = WorkerReplica(group, 0)  # type: ignore[arg-type]
    replica.open()

    async def ask() -> None:
        for number in (0, 1):
            replica.submit(request(number))
        assert not group.calls and replica.load == 2
        await asyncio.sleep(0)
        replica.submit(request(2))
        replica.abort([2])  # not before it was sent

    asyncio.run(ask())
    replica.submit(request(3))  # outside of an event loop
    assert group.calls == [("submit", [0, 1]), ("submit", [2]), ("abort", [2]), ("submit", [3])]


def test_requests_that_cannot_be_sent_are_lost() -> None:
    replica = WorkerReplica(Sent(lost=True), 0)  # type: ignore[arg-type]
    replica.open()

    async def ask() -> GenerationOutput:
        return await asyncio.wrap_future(replica.submit(request(0)))

    with pytest.raises(ReplicaLost, match="rollout-0 was not reached: WorkerLost: rollout-0 is gone"):
        asyncio.run(ask())


def test_requests_that_another_call_was_to_send_are_lost_with_it() -> None:
    group = Sent(lost=True)
    replica = WorkerReplica(group, 0)  # type: ignore[arg-type]
    replica.open()

    async def ask() -> None:
        answers = [asyncio.wrap_future(replica.submit(request(number))) for number in (1, 2)]
        replica.abort([2])
        for answer in answers:
            with pytest.raises(ReplicaLost, match="was not reached"):
                await answer

    asyncio.run(ask())
    assert replica.failure and replica.load == 0


def with_kept_keys(
    policies: dict[int, PolicyModel], asked: GenerationRequest, output: GenerationOutput
) -> list[float]:
    """Log-probs of a response whose keys and values stay as the weights of their time made them: a token is
    read, and its successor scored, by the weights that sampled the successor.
    """
    cache = DynamicCache()
    log_probs = []
    new = list(asked.prompt_token_ids)
    for token, version in zip(output.token_ids, output.policy_versions):
        hf = policies[version].hf
        hf.set_attn_implementation("eager")
        with torch.no_grad():
            logits = hf(torch.tensor([new]), past_key_values=cache, use_cache=True).logits[0, -1]
        log_probs.append(float(logits.log_softmax(-1)[token]))
        new = [token]
    return log_probs


def test_kept_keys_and_values_give_the_log_probs_of_the_mixed_cache() -> None:
    groups = Groups(Apart(keeping_factories))
    group = groups.rollout
    asked = request(1)
    with group.opened(), serving_all_the_time(group):
        heard = submit(group, [asked])[1]
        for version in (1, 2):
            submit(group, [request(10 * version + 1, 4)])[10 * version + 1].result(60)
            groups.learn(0.4)
            group.update_from(groups.actor, version)
        output = heard.result(60)
    assert set(output.policy_versions) == {0, 1, 2}
    policies = {version: groups.policy(version) for version in range(3)}
    assert output.log_probs == pytest.approx(with_kept_keys(policies, asked, output), abs=1e-4)
    anew = [scored(policies[version], asked, output) for version in range(3)]
    of_their_version = [anew[version][place] for place, version in enumerate(output.policy_versions)]
    assert output.log_probs != pytest.approx(of_their_version, abs=1e-3), "nothing was computed again"


@pytest.mark.parametrize("salted", [True, False])
def test_no_prefix_is_hit_across_versions(salted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One session over two versions; without following the weights, the second reads keys of the first."""
    if not salted:
        monkeypatch.setattr(native.Session, "_follow_weights", lambda self: None)
    groups = Groups(Apart(keeping_factories))
    group = groups.rollout
    first = request(1, 24)
    with group.opened(), serving_all_the_time(group):
        output = submit(group, [first])[1].result(60)
        groups.learn(0.4)
        group.update_from(groups.actor, 1)
        longer = request(2, 12)
        longer = replace(longer, prompt=Prompt(first.prompt_token_ids + tuple(output.token_ids)))
        second = submit(group, [longer])[2].result(60)
    wanted = scored(groups.policy(1), longer, second)
    assert (second.log_probs == wanted) == salted


def test_a_replica_is_busy_while_it_is_stepped_for_requests_and_stands_while_they_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = ["empty"]

    class Noted(ReplicaUse):
        def note(self, replica: object, **facts: bool | None) -> None:
            super().note(replica, **facts)
            state = self._occupancy.be(states[-1])
            self._occupancy.be(state)
            if state != states[-1]:
                states.append(state)

    monkeypatch.setattr("hybridflow.workers.rollout.ReplicaUse", Noted)
    groups = Groups(Apart(factories))
    group = groups.rollout
    with group.opened():
        first = submit(group, [request(1, 4), request(2)])
        first[1].add_done_callback(lambda _: group.wake())
        group.serve(lambda: first[1].done())  # preempted with the second one begun
        group.update_from(groups.actor, 1)
        group.generate([request(3, 2)])  # of a list in between
        first[2].add_done_callback(lambda _: group.wake())
        group.serve(lambda: first[2].done())
    assert states == ["empty", "standing", "busy", "standing", "busy", "standing", "busy", "empty"]
    assert group.seconds_in("busy") > 0 and group.seconds_in("standing") > 0


class SlowPush(RemotePush):
    """A push that takes a moment, and looks at the group meanwhile."""

    def __init__(self, push: RemotePush, look: Callable[[], None]) -> None:
        super().__init__(push.policy, push.holding)
        self.look = look

    def update(self, *args: Any) -> None:
        self.look()
        super().update(*args)


def test_requests_stand_and_the_clock_of_their_deadlines_too_while_weights_change() -> None:
    groups = Groups(Apart(keeping_factories))
    group = groups.rollout
    (replica,) = group.replicas
    looks = []

    def look() -> None:
        before = group.seconds_in("busy"), replica.clock
        submit(group, [request(2, 2)])
        stood = group.seconds_in("standing")
        time.sleep(0.01)
        looks.append((group.seconds_in("busy"), replica.clock) == before)
        looks.append(group.seconds_in("standing") > stood)

    worker = group.backend.worker("rollout")  # type: ignore[attr-defined]
    worker.pushed = SlowPush(worker.pushed, look)
    with group.opened(), serving_all_the_time(group):
        submit(group, [request(1, 2)])[1].result(60)
        group.update_from(groups.actor, 1)
        clock = replica.clock
        group.generate([request(2, 2)])
        submit(group, [request(3, 2)])[3].result(60)
        assert replica.clock > clock > 0
    assert looks == [True, True]


class Patient(Apart):
    """One process, whose calls may take a moment only."""

    call_timeout = 0.05


def silent(self: native.Session) -> list[GenerationOutput]:
    time.sleep(0.001)
    return []


def test_an_engine_that_samples_nothing_any_more_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Groups(Patient(factories)).rollout
    with group.opened():
        (answer,) = submit(group, [request(1)]).values()
        monkeypatch.setattr(native.Session, "step", silent)
        with pytest.raises(WorkerLost, match=r"rollout-0 has read and sampled no token for 0\.05 s"):
            group.serve(answer.done)
        with pytest.raises(ReplicaLost, match="an engine hangs"):
            answer.result(0)


def test_a_step_without_an_end_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    def step(self: native.Session) -> list[GenerationOutput]:
        goes_on.wait(600)
        return []

    monkeypatch.setattr(native.Session, "step", step)
    group = Groups(Patient(factories)).rollout
    with pytest.raises(WorkerLost, match=r"for 0\.05 s"):
        group.generate([request(1)])
    goes_on.set()


def test_requests_that_the_driver_does_not_know_are_watched_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.Session, "step", silent)
    group = Groups(Patient(factories)).rollout
    with group.opened(), serving_all_the_time(group) as failures:
        group.call_one(0, RolloutWorker.submit, [request(COLLECTOR_NUMBERS)]).result(60)
        wait_for(lambda: bool(failures))
    assert isinstance(failures[0], WorkerLost)


def test_an_engine_without_requests_and_a_long_change_of_weights_are_no_silence() -> None:
    groups = Groups(Patient(keeping_factories))
    group = groups.rollout
    group.backend.call_timeout = 1.0  # type: ignore[misc]
    worker = group.backend.worker("rollout")  # type: ignore[attr-defined]
    worker.pushed = SlowPush(worker.pushed, lambda: time.sleep(1.5))
    with group.opened(), serving_all_the_time(group) as failures:
        submit(group, [request(1, 2)])[1].result(60)
        time.sleep(1.5)
        (answer,) = submit(group, [request(2, 1000)]).values()
        group.update_from(groups.actor, 1)
        group.call_one(0, RolloutWorker.abort, [2])
        answer.result(60)
        with group._main.set_aside():
            (answer,) = submit(group, [request(3, 2)]).values()
            time.sleep(1.5)
        answer.result(60)
    assert not failures


def wait_for(ready: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not ready() and time.monotonic() < until:
        time.sleep(0.01)
