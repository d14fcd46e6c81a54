"""Rules of asynchronous schedules compared in a simulation: staleness, idle trainer, groups thrown away.

    python benchmarks/schedules.py [--seeds 10] [--steps 80] [--quick]

There is no model. A step trains 16 groups and takes 1.0; a group takes a quarter of a Pareto variable and at
most 12 (tail 1.2 is heavy, 2.0 moderate). Groups are generated beside training and do not slow each other
down. The deadline rule is `Schedule` of the trainer itself; the others are written here, a few lines each.
Writes `benchmarks/results/schedules.md`, the same on every machine, in seconds.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from hybridflow.trainer.schedules.schedule import Schedule

RESULTS = Path(__file__).parent / "results"
GROUPS = 16
TRAIN = 1.0
TAILS = (1.2, 2.0)
LONGEST = 12.0
NO_BOUND = 10**6


@dataclass
class Run:
    """The state of one simulated run; `active` has versions by index, in the order of admission."""

    version: int = 0
    num_taken: int = 0
    in_batch: int = 0
    num_admitted: int = 0
    generating: int = 0
    active: dict[int, int] = field(default_factory=dict)
    ready: dict[int, None] = field(default_factory=dict)


class Deadline:
    """Our rule: admission by the published version; any ready group that pushes none past its deadline."""

    def __init__(self, ahead: float, bound: int) -> None:
        self.schedule = Schedule(GROUPS, ahead, bound, total_steps=NO_BOUND)
        self.name = f"deadline rule, S={ahead:g}, M={bound}"
        self.bound: int | None = bound
        self.concurrency = GROUPS + self.schedule.groups_ahead

    def may_admit(self, run: Run) -> bool:
        """Return whether one more group may start."""
        return self.schedule.may_admit(run.num_taken, len(run.active), run.version)

    def choose(self, run: Run) -> int | None:
        """Return the group that the step in progress takes next."""
        return self.schedule.choose(run.version, run.in_batch, run.active, run.ready)

    def too_stale(self, run: Run) -> list[int]:
        """Return the groups to throw away."""
        return []


class Fifo(Deadline):
    """Groups are trained in the order of admission, whenever the oldest is ready."""

    def __init__(self, ahead: float) -> None:
        super().__init__(ahead, NO_BOUND)
        self.name = f"strict FIFO, S={ahead:g}"
        self.bound = int(ahead)

    def choose(self, run: Run) -> int | None:
        oldest = next(iter(run.active), None)
        return oldest if oldest in run.ready else None


class Window(Deadline):
    """The first ready group within a window of indices behind the oldest that is active."""

    def __init__(self, ahead: int, fraction: float = 0.3) -> None:
        super().__init__(ahead, NO_BOUND)
        self.window = int(fraction * (ahead + 1) * GROUPS)
        self.name = f"windowed FIFO, S={ahead}, window {self.window}"
        self.bound = ahead + -(-(self.window - 1) // GROUPS)

    def choose(self, run: Run) -> int | None:
        oldest = next(iter(run.active), 0)
        return min((index for index in run.ready if index < oldest + self.window), default=None)


class ReadyFirst(Deadline):
    """The same admission, and whichever group is ready first."""

    def __init__(self, ahead: float) -> None:
        super().__init__(ahead, NO_BOUND)
        self.name = f"admission only, ready first, S={ahead:g}"
        self.bound = None

    def choose(self, run: Run) -> int | None:
        return next(iter(run.ready), None)


class GreedyDrop(ReadyFirst):
    """Generation never waits for training; groups that are too stale once they are ready are thrown away."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit
        self.name = f"greedy, drop above {limit}"
        self.bound = limit

    def may_admit(self, run: Run) -> bool:
        return run.generating + len(run.ready) < 4 * self.concurrency

    def too_stale(self, run: Run) -> list[int]:
        return [index for index in run.ready if run.version - run.active[index] > self.limit]


@dataclass(frozen=True)
class Figures:
    """Results of one simulated run."""

    largest: int
    mean: float
    idle: float
    """Share of the time in which the trainer waits for a batch."""
    dropped: float
    """Share of the groups that were ready and then thrown away."""
    length: float
    """Mean duration of the trained groups, over that of all that were admitted."""


def simulate(rule: Deadline, tail: float, seed: int, steps: int) -> Figures:
    """Run `steps` training steps under a rule; raises AssertionError where it breaks its own bound."""
    chance = random.Random(seed)
    run = Run()
    events: list[tuple[float, int]] = []
    durations: list[float] = []
    trained: list[int] = []
    staleness: list[int] = []
    now = 0.0
    idle = 0.0
    waits_since: float | None = 0.0
    trained_at = 0.0
    dropped = 0
    while run.version < steps:
        while waits_since is not None:
            for index in rule.too_stale(run):
                del run.active[index], run.ready[index]
                dropped += 1
            index = rule.choose(run)
            if index is None:
                break
            staleness.append(run.version - run.active.pop(index))
            trained.append(index)
            del run.ready[index]
            run.num_taken += 1
            run.in_batch += 1
            if run.in_batch == GROUPS:
                idle += now - waits_since
                trained_at = now + TRAIN
                waits_since = None
        while run.generating < rule.concurrency and rule.may_admit(run):
            durations.append(min(0.25 * chance.paretovariate(tail), LONGEST))
            run.active[run.num_admitted] = run.version
            heapq.heappush(events, (now + durations[-1], run.num_admitted))
            run.num_admitted += 1
            run.generating += 1
        if waits_since is None and (not events or trained_at <= events[0][0]):
            now = trained_at
            waits_since = now
            run.version += 1
            run.in_batch = 0
            continue
        assert events, f"{rule.name}: nothing can go on"
        now, index = heapq.heappop(events)
        run.generating -= 1
        run.ready[index] = None
    assert rule.bound is None or max(staleness) <= rule.bound, f"{rule.name}: {max(staleness)}"
    return Figures(
        largest=max(staleness),
        mean=statistics.mean(staleness),
        idle=idle / now,
        dropped=dropped / (dropped + len(trained)),
        length=statistics.mean(durations[index] for index in trained) / statistics.mean(durations),
    )


RULES: list[Deadline] = [
    Deadline(0, 0),
    Fifo(1),
    Window(1),
    Fifo(4),
    Fifo(6),
    Window(4),
    ReadyFirst(1),
    ReadyFirst(2),
    GreedyDrop(2),
    *(
        Deadline(ahead, bound)
        for ahead, bound in (
            (0.25, 1),
            (0.5, 1),
            (0.5, 4),
            (1, 1),
            (1, 2),
            (1, 4),
            (1, 8),
            (2, 4),
            (2, 6),
            (2, 8),
            (4, 6),
            (4, 8),
        )
    ),
]


def row(rule: Deadline, runs: list[Figures]) -> str:
    """Return the line of the table for the runs of a rule, one a seed."""
    idle = [each.idle for each in runs]
    cells = [
        rule.name,
        str(rule.concurrency),
        "none" if rule.bound is None else str(rule.bound),
        str(max(each.largest for each in runs)),
        f"{statistics.mean(each.mean for each in runs):.2f}",
        f"{statistics.mean(idle):.1%} ({min(idle):.1%} to {max(idle):.1%})",
        f"{statistics.mean(each.dropped for each in runs):.0%}",
        f"{statistics.mean(each.length for each in runs):.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def page_of(seeds: int, steps: int) -> str:
    """Return the page, with a table for each tail."""
    lines = [
        "# Rules of asynchronous schedules, simulated",
        "",
        f"Written by `benchmarks/schedules.py`, without a model and without a clock: {steps} steps of "
        f"{GROUPS} groups, {seeds} seeds. A step takes {TRAIN:g}; a group takes 0.25 times a Pareto "
        f"variable, and at most {LONGEST:g}. As many groups are generated at once as a rule admits, and they "
        "do not slow each other down, which real engines do not grant: the table compares rules, and "
        "predicts no run.",
        "",
        "*Staleness* is the training step less the version that a group was admitted under. *At once* is the "
        "number of groups that a rule lets be generated at once. *Idle* is the share of the time in which "
        "the trainer waits for a batch: the mean over seeds, and their range. *Length* is the mean duration "
        "of the trained groups over that of all admitted ones. Some of those are still being generated at "
        "the end, long ones above all, so it is a little below 1 also where nothing is thrown away.",
    ]
    for tail in TAILS:
        lines += [
            "",
            f"## Tail {tail:g}",
            "",
            "| rule | at once | bound | largest staleness | mean | trainer idle | thrown away | length |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for rule in RULES:
            lines.append(row(rule, [simulate(rule, tail, seed, steps) for seed in range(seeds)]))
    return "\n".join([*lines, "", READING.rstrip()])


READING = """## What it says

- The deadline rule never passes its bound and throws nothing away. At bound 6 it waits less than the window
  on the mean of the seeds (S=2 beside S=4), with half the mean staleness and fewer groups at once. With the
  moderate tail the ranges over seeds are wider than that difference.
- Admission alone (ready first, S=2) hardly waits, and has no bound: single groups become several times as
  stale as S says. Dropping what is too stale keeps the bound at the price of most groups, of the long ones
  above all.
- S sets the mean staleness, and M how long the trainer waits for the longest groups: one that takes 12 steps
  and may be at most 8 steps stale makes it wait under every rule that trains it. From S=2 on, a larger S
  gives nothing at the same M. Below it S counts, with the moderate tail more than with the heavy one.
"""


def main() -> None:
    """Simulate, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--quick", action="store_true", help="one seed and 20 steps, and write nothing")
    options = parser.parse_args()
    if options.quick:
        options.seeds = 1
        options.steps = 20
    page = page_of(options.seeds, options.steps)
    print(page)
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "schedules.md").write_text(page + "\n")


if __name__ == "__main__":
    main()
