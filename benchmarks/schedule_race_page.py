"""The page and the curves of the race between schedules: from what each run was like to a table.

runs ──by schedule, over seeds──► ratios to `sync` of the same seed ──► schedule_race.md, schedule_race.svg
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from learn_plot import plt, save
from schedule_race_task import (
    CLASSES,
    LENGTHS,
    MAX_RESPONSE,
    MEDIAN_SECONDS,
    MOST_SECONDS,
    SPREAD_OF_SECONDS,
)

Found = Mapping[str, Any]
BOUNDS = {"sync": 0, "one_step_off": 1, "exact_async": 2, "fully_async": 3, "colocated_async": 3}
CELLS = {
    "sync/apart": "sync",
    "one_step_off/apart": "one_step_off",
    "exact_async/apart": "exact_async",
    "fully_async/apart": "fully_async",
    "sync": "sync",
    "one_step_off": "one_step_off",
    "exact_async": "exact_async",
    "colocated_async": "colocated_async",
}
"""Runs of a seed, with their schedules: first those with generation in a process of its own."""
SMOOTHED = 3
"""Steps over which a score is averaged."""
PART = 0.8
"""Part of the rise of `sync` that the score to be reached has."""
ENOUGH_FASTER = 1.0
BUSY = 4.0
"""Load average above which times say more of the other work than of the schedules."""
TOO_BUSY = (
    "**The times here are not to be compared.** The load was many times what two cores bear, and differed "
    "from run to run (last column). Staleness and scores stand; shares of waiting are those of so busy a "
    "machine; the aim for the speed counts as missed, because it could not be tried."
)
NOISE = 0.05
"""How much the score after training may differ from that of `sync`, on the mean of the seeds."""
COLOURS = {
    "sync": "#666666",
    "one_step_off": "#2563a8",
    "exact_async": "#2a9d5c",
    "fully_async": "#c2410c",
    "colocated_async": "#c2410c",
}


def smoothed(score: Sequence[float]) -> list[float]:
    """Return the mean of each step's score and those before it, SMOOTHED of them."""
    return [statistics.mean(score[max(0, end - SMOOTHED) : end]) for end in range(1, len(score) + 1)]


def seconds_to_score(run: Found, reference: Found) -> float | None:
    """Return the seconds after which a run has the score that is PART of the way of `sync`; None: never."""
    goal = smoothed(reference["score"])
    wanted = goal[0] + PART * (goal[-1] - goal[0])
    reached = (at for at, score in zip(accumulate(run["seconds"]), smoothed(run["score"])) if score >= wanted)
    return next(reached, None)


def share(run: Found, name: str) -> float:
    """Return a share of each step's time as one of the whole time."""
    return sum(part * seconds for part, seconds in zip(run[name], run["seconds"])) / sum(run["seconds"])


def reference_of(run: Found, found: Sequence[Found]) -> Found | None:
    """Return the `sync` run of the same seed in the same place."""
    name = "sync/apart" if run["name"].endswith("/apart") else "sync"
    return next((each for each in found if each["name"] == name and each["seed"] == run["seed"]), None)


def pairs(name: str, found: Sequence[Found]) -> list[tuple[Found, Found]]:
    """Return the runs of a name, each with the `sync` run that it is compared with."""
    runs = [run for run in found if run["name"] == name]
    return [(run, reference) for run in runs if (reference := reference_of(run, found)) is not None]


def problems_of(found: Sequence[Found], seeds: Sequence[int]) -> list[str]:
    """Return the aims that are missed."""
    problems = []
    for name, schedule in CELLS.items():
        compared = pairs(name, found)
        if len(compared) < len(seeds):
            problems.append(f"{name}: {len(compared)} of {len(seeds)} seeds have run")
        if not compared:
            continue
        stalest = max(max(map(int, run["staleness"])) for run, _ in compared)
        stalest_token = max(run["stalest_token"] for run, _ in compared)
        if max(stalest, stalest_token) > BOUNDS[schedule]:
            problems.append(f"{name}: staleness {max(stalest, stalest_token):g}, bound {BOUNDS[schedule]}")
        lost = statistics.mean(reference["held_out"] - run["held_out"] for run, reference in compared)
        if lost > NOISE:
            problems.append(f"{name}: the score after training is {lost:.3f} below that of sync")
        if schedule == "sync":
            continue
        ratios = [_ratio(run, reference) for run, reference in compared]
        if None in ratios:
            problems.append(f"{name}: the score of sync is not reached in {ratios.count(None)} runs")
        elif statistics.median(ratio for ratio in ratios if ratio) <= ENOUGH_FASTER:
            problems.append(f"{name}: no faster than sync to the same score")
    return problems


def _ratio(run: Found, reference: Found) -> float | None:
    mine = seconds_to_score(run, reference)
    its = seconds_to_score(reference, reference)
    return its / mine if mine and its else None


def page(found: Sequence[Found], facts: str, problems: Sequence[str]) -> str:
    """Return the page."""
    loads = [run["load"] for run in found]
    seeds = sorted({run["seed"] for run in found})
    steps = len(found[0]["score"]) if found else 0
    lines = [
        "# The schedules in a race",
        "",
        f"{facts}. Written by benchmarks/schedule_race.py; do not edit.",
        "",
        f"Seeds {seeds}, {steps} steps each. The machine's load average was {min(loads, default=0):g} to "
        f"{max(loads, default=0):g} at the ends of the runs, of which two is what it can bear: other work "
        "ran beside them. The runs of a seed were made one after the other, and ratios are of those.",
        "",
        *([TOO_BUSY, ""] if max(loads, default=0) > BUSY else []),
        "A model of 0.4 M parameters is asked for a letter, and for as many as the question's class has: "
        f"{CLASSES} classes, whose lengths are the quantiles of a log-normal distribution ({LENGTHS[0]} to "
        f"{LENGTHS[-1]} tokens, at most {MAX_RESPONSE}). A warm-up teaches lengths, and letters in part; "
        "GRPO learns the letters, and the score is the share of right ones. A reward sleeps for a "
        f"log-normal time that belongs to the question (median {MEDIAN_SECONDS} s, sigma "
        f"{SPREAD_OF_SECONDS}, at most {MOST_SECONDS:g} s). A step has 32 questions with 4 answers each.",
        "",
        *_table("A process that trains and one that generates", "/apart", found),
        "",
        *_table("One process", "", found),
        "",
        READING.format(part=PART, smoothed=SMOOTHED).rstrip(),
        "",
        "![score by seconds](schedule_race.svg)",
        "",
        "## Aims",
        "",
        "The bound holds for every group and token; the score after as many steps is within "
        f"{NOISE} of that of sync, on the mean of the seeds; every other schedule is faster to the same "
        "score by the median of the seeds.",
        "",
        *([f"- missed: {problem}" for problem in problems] or ["All are met."]),
        "",
    ]
    return "\n".join(lines)


def _table(title: str, place: str, found: Sequence[Found]) -> list[str]:
    lines = [
        f"## {title}",
        "",
        "| schedule | speed to the same score | seconds a step | tokens/s | trainer idle | engine idle | "
        "weights | score after | less sync | staleness of groups (bound) | load |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    for name, schedule in CELLS.items():
        compared = pairs(name, found)
        if name != schedule + place or not compared:
            continue
        runs = [run for run, _ in compared]
        ratios = [_ratio(run, reference) for run, reference in compared]
        speed = " ".join("never" if ratio is None else f"{ratio:.2f}x" for ratio in ratios)
        seconds = statistics.mean(sum(run["seconds"]) / len(run["seconds"]) for run in runs)
        rate = statistics.mean(sum(run["tokens"]) / sum(run["seconds"]) for run in runs)
        weights = statistics.mean(sum(run["weights"]) / sum(run["seconds"]) for run in runs)
        score = statistics.mean(run["held_out"] for run in runs)
        less = statistics.mean(run["held_out"] - reference["held_out"] for run, reference in compared)
        lines.append(
            f"| `{schedule}` | {speed} | {seconds:.2f} | {rate:.0f} | {_mean_share(runs, 'trainer_idle')} | "
            f"{_mean_share(runs, 'rollout_idle')} | {weights:.0%} | {score:.3f} | {less:+.3f} | "
            f"{_staleness(runs)} ({BOUNDS[schedule]}) | {', '.join(str(run['load']) for run in runs)} |"
        )
    return lines


def _mean_share(runs: Sequence[Found], name: str) -> str:
    return f"{statistics.mean(share(run, name) for run in runs):.0%}"


def _staleness(runs: Sequence[Found]) -> str:
    counts = Counter[int]()
    for run in runs:
        counts.update({int(age): number for age, number in run["staleness"].items()})
    whole = sum(counts.values())
    return ", ".join(f"{age}: {number / whole:.0%}" for age, number in sorted(counts.items()))


def draw(path: Path, found: Sequence[Found]) -> None:
    """Draw the score by seconds, smoothed, a line for each run."""
    figure, axes = plt.subplots(1, 2, figsize=(8.0, 3.0), sharey=True, layout="constrained")
    titles: dict[str, Callable[[str], bool]] = {
        "a process that trains, one that generates": lambda name: name.endswith("/apart"),
        "one process": lambda name: not name.endswith("/apart"),
    }
    for axis, (title, belongs) in zip(axes, titles.items()):
        drawn: set[str] = set()
        for run in found:
            schedule = CELLS[run["name"]]
            if belongs(run["name"]):
                label = None if schedule in drawn else schedule
                drawn.add(schedule)
                seconds = list(accumulate(run["seconds"]))
                score = smoothed(run["score"])
                axis.plot(seconds, score, color=COLOURS[schedule], linewidth=1.0, label=label)
        axis.set_title(title, fontsize=8)
        axis.set_xlabel("seconds, without validation")
        axis.grid(color="#dddddd", linewidth=0.4)
        if drawn:
            axis.legend(fontsize=7)
    axes[0].set_ylabel("score")
    save(figure, path)


READING = """## How to read it

*Speed to the same score* is the time of `sync` of the same seed in the same place over that of the schedule,
a figure for each seed: the time until the mean score of the last {smoothed} steps has come {part:.0%} of the
way that it comes with `sync`. *Tokens/s* are sampled ones. *Trainer idle* is the share of a step in which
the trainer waits for rollouts, and *engine idle* that in which the engine answers no request
(`fully_async/…/idle_ratio` in the [metrics](../../docs/metrics.md); with `sync` by the timings of its
step). In one process each is idle while the other works. *Weights* is the share in which new weights are
passed on. *Score after* is of 256 questions that no reward has slept for, after the last step, sampled at
temperature 1.

Two cores show what waits for what: a reward that sleeps, the longest answer of a batch, training beside
generation where each has a core. They do not show what a cluster gains. There, generation has most of the
devices, answers are a thousand times longer, and weights have a network to cross. What is faster here comes
from sleeping rewards and from the second core; on a busy machine that core is shared with others, so
training beside generation gains less than it could.
"""
