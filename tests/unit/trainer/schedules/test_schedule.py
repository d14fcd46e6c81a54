"""A schedule keeps its promises in random runs, and wrong schedules are found not to."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_run import TAILS, SimulatedRun, World

from hybridflow.errors import ConfigError
from hybridflow.trainer.schedules.schedule import Schedule

RUN_AHEAD = (0, 0.1, 0.25, 0.5, 0.9, 1, 1.5, 2, 2.3, 3, 4)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    run_ahead = draw(st.sampled_from(RUN_AHEAD))
    return Schedule(
        groups_per_step=draw(st.integers(1, 8)),
        run_ahead=run_ahead,
        max_staleness=math.ceil(run_ahead) + draw(st.integers(0, 4)),
        total_steps=draw(st.integers(1, 12)),
    )


worlds = st.builds(
    World,
    seed=st.integers(0, 2**31),
    tail=st.sampled_from(TAILS),
    train_duration=st.sampled_from((0.0, 0.05, 0.3, 1.0, 4.0)),
    concurrency=st.none() | st.integers(1, 40),
    failing=st.sampled_from((0.0, 0.0, 0.1, 0.4)),
    filtering=st.sampled_from((0.0, 0.0, 0.2, 0.5)),
    drains=st.booleans(),
    kills=st.integers(0, 3),
)


@settings(max_examples=300)
@given(schedules(), worlds)
def test_promises_hold_in_random_runs(schedule: Schedule, world: World) -> None:
    SimulatedRun(schedule, world).run()


def random_run(seed: int) -> SimulatedRun:
    """A run whose schedule and world are drawn evenly from all that the strategies above may give."""
    chance = random.Random(seed)
    run_ahead = chance.choice(RUN_AHEAD)
    bound = math.ceil(run_ahead) + chance.randint(0, 4)
    schedule = Schedule(chance.randint(1, 8), run_ahead, bound, chance.randint(1, 12))
    world = World(
        seed=seed,
        tail=chance.choice(TAILS),
        train_duration=chance.choice((0.0, 0.05, 0.3, 1.0, 4.0)),
        concurrency=chance.choice((None, chance.randint(1, 40))),
        failing=chance.choice((0.0, 0.0, 0.1, 0.4)),
        filtering=chance.choice((0.0, 0.0, 0.2, 0.5)),
        drains=chance.random() < 0.5,
        kills=chance.randint(0, 3),
    )
    return SimulatedRun(schedule, world)


@pytest.mark.slow
def test_promises_hold_in_2500_random_runs() -> None:
    seen: Counter[str] = Counter()
    for seed in range(2500):
        run = random_run(seed).run()
        bound = run.schedule.max_staleness
        seen["killed"] += run.num_kills > 0
        seen["failed"] += len(run.accounts.failed) > 0
        seen["filtered"] += len(run.accounts.filtered) > 0
        seen["fraction"] += run.schedule.run_ahead % 1 > 0
        seen["as stale as allowed"] += run.state.staleness[bound] > 0 and bound > 0
        seen["versions mixed in a group"] += any(len(each) > 1 for each in run.accounts.versions.values())
    assert len(seen) == 6 and min(seen.values()) > 300, (
        f"what random runs must reach, and how many did: {seen}"
    )


@settings(max_examples=50)
@given(st.integers(1, 8), worlds)
def test_without_staleness_exactly_one_step_is_held_at_a_time(groups: int, world: World) -> None:
    run = SimulatedRun(Schedule(groups, 0.0, 0, 6), world).run()
    admitted_under = {index: min(versions) for index, versions in run.accounts.versions.items()}
    for step, batch in enumerate(run.accounts.batches[:-1]):
        assert {admitted_under[index] for index in batch} == {step}
    if not (world.failing or world.filtering):
        expected = [list(range(step * groups, (step + 1) * groups)) for step in range(6)]
        assert [sorted(batch) for batch in run.accounts.batches[:-1]] == expected


@settings(max_examples=50)
@given(st.integers(1, 8), st.integers(0, 3), st.integers(0, 2**31))
def test_the_smallest_bound_trains_versions_in_their_order(groups: int, ahead: int, seed: int) -> None:
    run = SimulatedRun(Schedule(groups, ahead, ahead, 10), World(seed)).run()
    order = [min(run.accounts.versions[index]) for batch in run.accounts.batches for index in batch]
    assert order == sorted(order)


def test_a_far_bound_trains_whatever_is_ready_first() -> None:
    schedule = Schedule(2, 3, 1000, 10)
    assert schedule.choose(5, 0, {7: 2, 8: 3, 9: 4, 10: 5}, [10, 8]) == 10


def test_a_group_that_is_due_keeps_its_place() -> None:
    schedule = Schedule(groups_per_step=2, run_ahead=1, max_staleness=1, total_steps=10)
    active = {4: 1, 5: 1, 6: 2, 7: 2}
    assert schedule.choose(2, 0, active, [7, 6]) is None
    assert schedule.choose(2, 0, active, [7, 5]) == 5
    assert schedule.latest_deadline(2, 0, active) == 2
    assert schedule.latest_deadline(2, 1, {4: 1, 6: 2}) == 2
    assert schedule.choose(2, 1, {6: 2, 7: 2}, [7]) == 7
    assert schedule.latest_deadline(2, 1, {6: 2, 7: 2}) == math.inf


@given(schedules(), st.integers(0, 2**31))
def test_the_choice_is_that_of_the_rule_as_it_is_written(schedule: Schedule, seed: int) -> None:
    """Compare with the inequality for every deadline, over active groups for which it holds beforehand."""
    chance = random.Random(seed)
    step = chance.randint(0, 6)
    taken = chance.randrange(schedule.groups_per_step)

    def fits(active: Mapping[int, int], batch: int) -> bool:
        deadlines = [schedule.deadline(version) for version in active.values()]
        return all(
            sum(each <= day for each in deadlines)
            <= schedule.groups_per_step - batch + schedule.groups_per_step * (day - step)
            for day in range(step, step + schedule.max_staleness + 2)
        )

    active: dict[int, int] = {}
    for index in range(chance.randint(0, 30)):
        version = chance.randint(max(0, step - schedule.max_staleness), step)
        if fits(active | {index: version}, taken):
            active[index] = version
    ready = chance.sample(sorted(active), chance.randint(0, len(active)))
    allowed = [i for i in ready if fits({j: v for j, v in active.items() if j != i}, taken + 1)]
    assert schedule.choose(step, taken, active, ready) == (allowed[0] if allowed else None)


def test_a_fraction_of_a_step_is_counted_exactly() -> None:
    assert Schedule(10, 0.1, 1, 5).groups_ahead == 1
    assert Schedule(100, 0.29, 1, 5).groups_ahead == 29  # as a float product it is 28.999999999999996
    assert Schedule(4, 0.1, 1, 5).groups_ahead == 0
    assert Schedule(4, 2.5, 3, 5).groups_ahead == 10


def test_credit_returns_with_the_version() -> None:
    schedule = Schedule(groups_per_step=4, run_ahead=0.5, max_staleness=1, total_steps=3)
    assert schedule.may_admit(trained=0, active=5, version=0)
    assert not schedule.may_admit(trained=0, active=6, version=0)
    assert not schedule.may_admit(trained=4, active=2, version=0), "a batch that is taken makes no room"
    assert schedule.may_admit(trained=4, active=2, version=1)
    assert not schedule.may_admit(trained=8, active=4, version=2), "the run needs no more groups"


def test_a_bound_below_the_run_ahead_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run_ahead=1\.5 with max_staleness=1: .* Set .* to at least 2"):
        Schedule(4, 1.5, 1, 10)
    with pytest.raises(ConfigError, match=r"run_ahead=-1 .* or a smaller run_ahead, 0 or more"):
        Schedule(4, -1, 1, 10)


def test_groups_of_another_schedule_are_not_trained_too_late() -> None:
    with pytest.raises(
        AssertionError, match=r"the staleness of 1 groups would pass 1: 3 groups .* version 0"
    ):
        Schedule(2, 1, 1, 10).choose(1, 0, {0: 0, 1: 0, 2: 0}, [0, 1, 2])


class CreditAtTaking(Schedule):
    """Planted: a batch makes room when it is taken."""

    def may_admit(self, trained: int, active: int, version: int) -> bool:
        room = self.groups_per_step + self.groups_ahead
        return active < room and trained + active < self.total_steps * self.groups_per_step


class ReadyFirst(Schedule):
    """Planted: admission alone is thought to bound staleness."""

    def choose(self, step: int, taken: int, active: Mapping[int, int], ready: Iterable[int]) -> int | None:
        return next(iter(ready), None)


class WindowByIndex(Schedule):
    """Right, with a wider bound: what is ready among the indices of a window behind the oldest active one."""

    window = 6

    def choose(self, step: int, taken: int, active: Mapping[int, int], ready: Iterable[int]) -> int | None:
        inside = [index for index in ready if index < min(active) + self.window]
        return min(inside, default=None)


class WindowByPosition(WindowByIndex):
    """Planted: the window counts positions in the list of active groups, and so moves on past the oldest."""

    def choose(self, step: int, taken: int, active: Mapping[int, int], ready: Iterable[int]) -> int | None:
        positions = set(sorted(active)[: self.window])
        return min((index for index in ready if index in positions), default=None)


class AdmissionByIndex(SimulatedRun):
    """Planted: groups that have failed or were filtered count as if they were trained."""

    def may_admit(self) -> bool:
        active = len(self.state.active)
        return self.schedule.may_admit(self.state.num_admitted - active, active, self.state.version)


def runs(schedule: Schedule, kind: type[SimulatedRun] = SimulatedRun, failing: float = 0.0) -> None:
    for seed in range(20):
        kind(schedule, World(seed, failing=failing)).run()


class AnyRoom(SimulatedRun):
    """Looks at staleness only, whatever is held at once."""

    def check_room(self) -> None:
        pass


def test_credit_at_taking_is_found_to_hold_too_much() -> None:
    runs(Schedule(4, 1, 1, 20))
    with pytest.raises(AssertionError, match="held at once"):
        runs(CreditAtTaking(4, 1, 1, 20))


@pytest.mark.parametrize("planted", [CreditAtTaking, ReadyFirst])
def test_planted_schedules_are_found_too_stale(planted: type[Schedule]) -> None:
    with pytest.raises(AssertionError, match=r"too stale|staleness of \d+ groups would pass 1"):
        runs(planted(4, 1, 1, 20), AnyRoom)


def test_a_window_by_position_is_found_too_stale() -> None:
    bound = 2 + math.ceil((WindowByIndex.window - 1) / 4)
    runs(WindowByIndex(4, 2, bound, 40))
    with pytest.raises(AssertionError, match="too stale"):
        runs(WindowByPosition(4, 2, bound, 40))


def test_admission_by_index_is_found_to_deadlock() -> None:
    runs(Schedule(4, 1, 2, 20), failing=0.3)
    with pytest.raises(AssertionError, match="deadlock: version"):
        runs(Schedule(4, 1, 2, 20), AdmissionByIndex, failing=0.3)
