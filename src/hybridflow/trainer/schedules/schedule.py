"""When a group may be admitted to generation, and when a finished one may be trained: a value, no state.

    counts of the ledger ──may_admit──► the next group starts ──► it is ready ──choose──► batch of step k

A *group* is a prompt with its responses; its index says in which order groups were admitted. `version`
is the number of training steps whose weights everyone who generates has. Steps count from 0, so step k
trains weights of version k. A group admitted under version v and trained in step k has the staleness
k - v. None of its tokens has more, because weights only become newer while it is generated.

Why `max_staleness` (M) holds, with P groups a step and S steps of running ahead: while step k has b
groups, let A(d) be the number of active groups that must be trained in step d or before. The invariant

    A(d) <= (P - b) + P (d - k)   for every d >= k

says that they fit into the room up to step d. An admission under version v <= k leaves at most
(v + 1) P + floor(S P) - k P - b groups active, and because S <= M that many fit into the room up to step
v + M. `choose` takes no group that would break the invariant, which at the end of step k says A(k) <= 0.
The group with the earliest deadline may always be taken, so nothing waits for ever while every rollout
ends. And nothing is thrown away for being stale.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from hybridflow.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """How far generation runs ahead of training, and the bound on staleness: `Schedule(16, 1.0, 3, 100)`.

    Raises ConfigError where `max_staleness` is below `run_ahead`, because no such bound can hold.
    """

    groups_per_step: int
    """Groups that one training step learns from (P), at least 1."""
    run_ahead: float
    """Steps that generation runs ahead of training (S), at least 0; it sets the mean staleness. A fraction
    is a part of a step's groups."""
    max_staleness: int
    """Largest staleness of a token that is trained (M), in steps. Where it equals `run_ahead`, groups are
    trained in the order of their versions; where it is far above, whichever is ready first."""
    total_steps: int
    """Steps of the run; no more groups are admitted than these need."""

    def __post_init__(self) -> None:
        assert self.groups_per_step >= 1, f"a step learns from {self.groups_per_step} groups: at least 1"
        if not 0 <= self.run_ahead <= self.max_staleness:
            raise ConfigError(
                f"trainer.async.run_ahead={self.run_ahead} with max_staleness={self.max_staleness}: a group "
                "that is generated so many steps ahead is as stale when it is trained. Set max_staleness to "
                f"at least {max(0, math.ceil(self.run_ahead))}, or a smaller run_ahead, 0 or more."
            )

    @property
    def groups_ahead(self) -> int:
        """Groups that `run_ahead` steps take, rounded down: how many may be active beyond one batch."""
        return math.floor(Fraction(str(self.run_ahead)) * self.groups_per_step)

    def may_admit(self, trained: int, active: int, version: int) -> bool:
        """Return whether one more group may start to be generated, under weights `version`.

        `trained` counts the groups of all batches, also of the one that is being filled or trained;
        `active` counts those that were admitted, are in no batch, and have neither failed nor been
        filtered. Taking a batch makes no room: publishing the weights trained on it does.
        """
        room = (version + 1) * self.groups_per_step + self.groups_ahead
        return trained + active < min(room, self.total_steps * self.groups_per_step)

    def deadline(self, version: int) -> int:
        """Return the last step in which a group admitted under `version` may be trained."""
        return version + self.max_staleness

    def holds(self, step: int, taken: int, active: Mapping[int, int]) -> bool:
        """Return whether all active groups can be trained in time; arguments are those of `choose`."""
        return all(due <= room for _, due, room in self._due(step, taken, active))

    def latest_deadline(self, step: int, taken: int, active: Mapping[int, int]) -> float:
        """Return the largest deadline that a group taken now may have; infinity where any may be taken.

        Arguments are those of `choose`. Where the answer is a number, the groups with deadlines up to it
        fill all the room that is left to them, and all others wait.
        """
        left = self.groups_per_step - taken
        assert left > 0, f"the batch of step {step} is full: {taken} of {self.groups_per_step} groups"
        for version, due, room in self._due(step, taken, active):
            assert due <= room, (
                f"the staleness of {due - room} groups would pass {self.max_staleness}: {due} groups were "
                f"admitted under version {version} or before it, and step {step} has {taken} of its groups. "
                "Another schedule must have admitted them."
            )
            if due == room:
                return self.deadline(version)
        return math.inf

    def choose(self, step: int, taken: int, active: Mapping[int, int], ready: Iterable[int]) -> int | None:
        """Return the index of the group that `step` takes next, or None: wait until another one is ready.

        `taken` is the number of groups that the step has. `active` has the version of every active group
        by its index. `ready` has those that can be trained, in the order in which they became ready.
        """
        latest = self.latest_deadline(step, taken, active)
        return next((index for index in ready if self.deadline(active[index]) <= latest), None)

    def _due(self, step: int, taken: int, active: Mapping[int, int]) -> Iterator[tuple[int, int, int]]:
        """Yield (version, groups of it and older ones, room for them up to their deadline), by version."""
        due = 0
        for version, number in sorted(Counter(active.values()).items()):
            due += number
            yield version, due, self.groups_per_step * (self.deadline(version) - step + 1) - taken
