"""A run without a model: groups take random times, fail, are filtered; the process is killed and resumes.

    may_admit ──► generating ──random time──► ready | failed | filtered ──choose──► batch ──► published

It keeps what happens in a `LedgerState` and, beside it, in plain sets. After every event it checks the
promises of a schedule, and raises AssertionError where one does not hold.
"""

from __future__ import annotations

import heapq
import random
from copy import deepcopy
from dataclasses import dataclass, field

from hybridflow.trainer.schedules.ledger_state import (
    Admitted,
    Failed,
    Filtered,
    Finished,
    LedgerState,
    Published,
    Restarted,
    Scored,
    Taken,
    Transition,
)
from hybridflow.trainer.schedules.schedule import Schedule

TAILS = ("constant", "uniform", "exponential", "pareto")


@dataclass(frozen=True)
class World:
    """All that a schedule does not decide. Probabilities are of a group; durations are in the same unit."""

    seed: int = 0
    tail: str = "pareto"
    train_duration: float = 1.0
    concurrency: int | None = None
    failing: float = 0.0
    filtering: float = 0.0
    drains: bool = False
    """New weights wait until no group is being generated; otherwise they change within groups."""
    kills: int = 0
    """Times that the run is killed and resumes from its last checkpoint."""


@dataclass
class Accounts:
    """What has become of the groups, as plain sets, and which versions sampled their tokens."""

    batches: list[list[int]] = field(default_factory=list)
    """Indices in the order in which each step took them; the last list is of the step in progress."""
    failed: set[int] = field(default_factory=set)
    filtered: set[int] = field(default_factory=set)
    versions: dict[int, set[int]] = field(default_factory=dict)

    def trained(self) -> set[int]:
        """All indices that a batch has."""
        return {index for batch in self.batches for index in batch}


class SimulatedRun:
    """One run to its last step: `SimulatedRun(schedule, world).run()`."""

    def __init__(self, schedule: Schedule, world: World) -> None:
        self.schedule = schedule
        self.world = world
        self.random = random.Random(world.seed)
        self.state = LedgerState()
        self.history: list[Transition] = []
        self.accounts = Accounts(batches=[[]])
        self.events: list[tuple[float, int, int | None]] = []
        """Time, number, and the index of the group that ends; None: the end of a training step."""
        self.now = 0.0
        self.num_events = 0
        self.num_kills = 0
        self.generating: set[int] = set()
        self.training = False
        self.trained = False
        self.checkpoint = (0, frozenset[int](), deepcopy(self.accounts))
        expected = 3 * schedule.groups_per_step * schedule.total_steps
        self.kills_at = {self.random.randint(1, expected) for _ in range(world.kills)}

    def run(self) -> SimulatedRun:
        """Run to the end; raises AssertionError where a promise is broken, or nothing can go on."""
        while self.state.version < self.schedule.total_steps:
            self.fill()
            self.admit()
            self.check()
            assert self.events, f"deadlock: {self.state.open_items()}"
            self.now, _, index = heapq.heappop(self.events)
            self.num_events += 1
            if self.num_events in self.kills_at:
                self.resume()
            elif index is None:
                self.trained = True
            else:
                self.end_of(index)
            if self.trained and not (self.world.drains and self.generating):
                self.publish()
        self.check_end()
        return self

    def note(self, transition: Transition) -> None:
        """Take in a transition, as a ledger would."""
        self.state.apply(transition)
        self.history.append(transition)

    def position(self) -> int:
        """Return how many transitions there are."""
        return len(self.history)

    def rewind(self, position: int) -> None:
        """Undo all transitions after a position."""
        self.history = self.history[:position]
        self.state = LedgerState()
        for transition in self.history:
            self.state.apply(transition)

    def may_admit(self) -> bool:
        """Ask the schedule."""
        state = self.state
        return self.schedule.may_admit(state.num_taken, len(state.active), state.version)

    def admit(self) -> None:
        """Start as many groups as may start; none while new weights wait for those that are generated."""
        concurrency = self.world.concurrency or 10**9
        while len(self.generating) < concurrency and self.may_admit() and not self.trained:
            index = self.state.num_admitted
            self.note(Admitted(index, version=self.state.version))
            self.start(index)

    def start(self, index: int) -> None:
        """Begin to generate a group under the weights of now."""
        self.generating.add(index)
        self.accounts.versions[index] = {self.state.version}
        self.later(self.duration(), index)

    def duration(self) -> float:
        """Draw how long a group takes."""
        match self.world.tail:
            case "constant":
                return 1.0
            case "uniform":
                return self.random.uniform(0.0, 2.0)
            case "exponential":
                return self.random.expovariate(1.0)
        return min(0.25 * self.random.paretovariate(1.1), 50.0)

    def later(self, delay: float, index: int | None) -> None:
        """Plan an event; those of one time come in random order."""
        heapq.heappush(self.events, (self.now + delay, self.random.getrandbits(30), index))

    def end_of(self, index: int) -> None:
        """A group ends: it fails, is filtered, or is ready."""
        self.generating.remove(index)
        if self.random.random() < self.world.failing:
            self.note(Failed(index, cause="planned"))
            self.accounts.failed.add(index)
            return
        self.note(Finished(index))
        self.note(Scored(index))
        if self.random.random() < self.world.filtering:
            self.note(Filtered(index))
            self.accounts.filtered.add(index)

    def fill(self) -> None:
        """Take what the schedule chooses; a full batch is trained."""
        batch = self.accounts.batches[-1]
        while not self.training:
            state = self.state
            index = self.schedule.choose(state.version, len(batch), state.active, state.ready)
            if index is None:
                return
            self.note(Taken(index, step=state.version))
            batch.append(index)
            if len(batch) == self.schedule.groups_per_step:
                self.training = True
                self.later(self.world.train_duration, None)

    def publish(self) -> None:
        """Publish the weights of a step: groups that are being generated go on under them."""
        self.check_bound()
        self.training = False
        self.trained = False
        self.note(Published(self.state.version + 1))
        self.accounts.batches.append([])
        for index in self.generating:
            self.accounts.versions[index].add(self.state.version)
        if self.random.random() < 0.5:
            self.checkpoint = (self.position(), frozenset(self.state.ready), deepcopy(self.accounts))

    def resume(self) -> None:
        """Go on from the last checkpoint: what was ready is kept, and other active groups start anew."""
        self.num_kills += 1
        position, saved, accounts = self.checkpoint
        self.rewind(position)
        self.accounts = deepcopy(accounts)
        self.events = []
        self.generating = set()
        self.training = False
        self.trained = False
        for index in self.state.active:
            if index not in saved:
                self.note(Restarted(index, version=self.state.version))
                self.start(index)

    def check_bound(self) -> None:
        """Check the staleness of each token of the step that is trained."""
        step = self.state.version
        for index in self.accounts.batches[-1]:
            oldest = step - min(self.accounts.versions[index])
            newest = step - max(self.accounts.versions[index])
            bound = self.schedule.max_staleness
            assert 0 <= newest <= oldest <= bound, f"group {index} has tokens too stale: {oldest} > {bound}"

    def check(self) -> None:
        """Check what holds at any time."""
        state, schedule, accounts = self.state, self.schedule, self.accounts
        overdue = [i for i, version in state.active.items() if schedule.deadline(version) < state.version]
        assert not overdue, f"too stale, and not yet trained: {overdue}"
        self.check_room()
        parts = (accounts.trained(), set(state.active), accounts.failed, accounts.filtered)
        assert set().union(*parts) == set(range(state.num_admitted)), "a group is lost"
        assert sum(map(len, parts)) == state.num_admitted, "a group has two fates"

    def check_room(self) -> None:
        """Check how many groups are held at once: the rows that memory must have room for."""
        room = self.schedule.groups_per_step + self.schedule.groups_ahead
        held = len(self.state.active) + len(self.accounts.batches[-1])
        assert held <= room, f"{held} groups are held at once, more than {room}"

    def check_end(self) -> None:
        """Check what the whole run has promised."""
        state, schedule = self.state, self.schedule
        batches = self.accounts.batches[:-1]
        assert [len(batch) for batch in batches] == [schedule.groups_per_step] * schedule.total_steps
        assert state.trained_per_step == [schedule.groups_per_step] * schedule.total_steps
        assert len(self.accounts.trained()) == sum(map(len, batches)), "a group was trained twice"
        assert not state.active, f"admitted, and never trained: {state.open_items()}"
