"""Do episodes survive? Runs of agents with tools that have effects, killed with SIGKILL at random moments.

    python benchmarks/agent_kills.py [--kills 300] [--out DIR]        (half an hour of two cores)

A course is one run of a tiny model (six steps, eight episodes each, of up to eight turns) that is killed and
started again until it ends. Every third course also loses processes of its tools and its environment. Their
effects are lines of a file, one for each call. When a course has ended, its calls have to be those of the
run that was never killed, each once, and its rewards, metrics and last checkpoint equal to the bit. Courses
are forked from this process, which has imported everything. DIR keeps what is done: the same command goes
on. Writes `benchmarks/results/agent_kills.md`. Wanted: each call once, 95 % of the episodes continued.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))

import counting_world
from episode_kills import Trial
from kill_resume import STEPS, start, wait
from tiny_run import write_inputs

from hybridflow.trainer.ppo import build  # before a child is forked, so that no child has to import it

RESULTS = Path(__file__).parent / "results" / "agent_kills.md"
KILLS_OF_A_COURSE = 40
"""Kills after which a course is left alone."""
CALLS_BEFORE_A_KILL = 50
"""Most calls that are made before the next kill; a step has twice as many."""
PAUSES = (0.0, 0.02, 0.02, 0.5)
"""Most seconds from there to the kill, which is within a call, a turn, or the training of the step."""
assert build
WORKERS = "actor_rollout_ref.rollout.agent.num_workers"


class Course:
    """One run, until it has ended."""

    def __init__(self, trial: Trial, number: int) -> None:
        self.trial = trial
        self.out = trial.folder / f"course{number}"
        self.draw = random.Random(number)
        self.has_processes = number % 3 == 2
        self.kills = Counter[str]()
        for left in trial.folder.glob(f"{self.out.name}*"):  # of a course that was not ended
            shutil.rmtree(left) if left.is_dir() else left.unlink()

    def ended(self) -> dict[str, Any]:
        """Kill the run until it ends by itself; return what came of it."""
        log = self.trial.prepare(self.out)
        arguments = self.trial.arguments(self.out, f"{WORKERS}={2 * self.has_processes}")
        status = -signal.SIGKILL
        while status == -signal.SIGKILL:
            child = start(arguments, log, counting_world.speak)
            if self.kills.total() < KILLS_OF_A_COURSE:
                self.disturb(child)
            status = wait(child)
        wrong = [f"ended with {status}: {log.read_text()[-500:]}"]
        if status == 0:
            wrong = self.trial.compared(self.out)
        calls = self.trial.made(self.out)
        found = {**self.trial.survived(self.out), "calls": len(calls), "wrong": wrong}
        shutil.rmtree(self.out)
        return {"kills": dict(self.kills), **found}

    def disturb(self, child: int) -> None:
        """Kill the run, or processes of its tools and then the run, at random moments of its episodes."""
        for target in ["process"] * self.draw.randint(0, 2) * self.has_processes + ["run"]:
            calls = self.num_calls() + self.draw.randint(1, CALLS_BEFORE_A_KILL)
            while self.num_calls() < calls:
                if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    return
                time.sleep(0.01)
            time.sleep(self.draw.uniform(0, self.draw.choice(PAUSES)))
            victims = hosts_of(child) if target == "process" else [child]
            if victims:
                os.kill(self.draw.choice(victims), signal.SIGKILL)
                self.kills[target] += 1

    def num_calls(self) -> int:
        """Return how many calls the run has carried out."""
        effects = self.out.with_suffix(".effects")
        return effects.read_bytes().count(b"\n") if effects.exists() else 0


def hosts_of(parent: int) -> list[int]:
    """Return the processes below one that run code of tools and environments."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "stat").read_text().rpartition(")")[2].split()
            if b"hybridflow.processes.host" in (folder / "cmdline").read_bytes():
                parents[int(folder.name)] = int(words[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = []
    for process in parents:
        above = parents[process]
        while above in parents:
            above = parents[above]
        # a keeper that waits for the process has the same command, and goes with it
        if above == parent and process not in parents.values():
            found.append(process)
    return found


def page(done: list[dict[str, Any]], calls: int) -> str:
    """Return the page of the results."""
    kills = Counter[str]()
    for course in done:
        kills.update(course["kills"])
    total = {name: sum(course.get(name, 0) for course in done) for name in NUMBERS}
    went_on = total["continued"] + total["begun_anew"]
    wrong = [line for course in done for line in course["wrong"]]
    rows = [
        ("kills (SIGKILL)", kills.total(), "300"),
        ("of the run", kills["run"], ""),
        ("of a process of its tools and environment", kills["process"], ""),
        ("runs that were started again until they ended", len(done), ""),
        ("calls with an effect, in all of them", total["calls"], f"{len(done)} · {calls}"),
        ("runs with a call that was missing, made twice, or another one", count(wrong, "calls, wanted"), "0"),
        ("runs with a metric or a file of the last checkpoint that differs", count(wrong, ":"), "0"),
        ("episodes that went on by their journal", total["continued"], ""),
        ("episodes that began anew", total["begun_anew"], ""),
        ("part that went on", f"{total['continued'] / max(1, went_on):.1%}", "≥ 95 %"),
        ("calls of which nobody knows", total["calls_unknown"], "0"),
    ]
    lines = [
        "# Runs of agents, killed at random moments",
        "",
        f"`benchmarks/agent_kills.py`: a tiny model of random weights, {STEPS} steps of eight episodes with",
        "an environment, a tool of it and a tool of the run, all of which write a line for each call. The",
        f"run that was never killed makes {calls} calls. Episodes are counted in steps that were logged: one",
        "that was kept in the journal counts where its step was made again, whether it had ended or not.",
        "",
        "| | found | wanted |",
        "|---|---:|---:|",
        *(f"| {name} | {value} | {wanted} |" for name, value, wanted in rows),
        "",
        *(f"- {line}" for line in wrong[:20]),
    ]
    return "\n".join(lines).rstrip() + "\n"


NUMBERS = ("continued", "begun_anew", "calls_unknown", "calls")


def count(wrong: list[str], words: str) -> int:
    """Return how many lines have these words."""
    return sum(words in line for line in wrong)


def main() -> None:
    """Kill, print a line for each course, and write the page."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--kills", type=int, default=300)
    words.add_argument("--seed", type=int, default=0, help="of the first run")
    words.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "agent_kills")
    options = words.parse_args()
    folder = options.out
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "courses.jsonl"
    done = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    inputs = write_inputs(folder / "inputs")
    shutil.rmtree(folder / "runs", ignore_errors=True)
    trial = Trial(inputs, folder / "runs")
    while (kills := sum(sum(course["kills"].values()) for course in done)) < options.kills:
        print(f"{kills} of {options.kills} kills, {len(done)} runs have ended", flush=True)
        found = Course(trial, options.seed + len(done)).ended()
        done.append(found)
        with record.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(json.dumps(found), flush=True)
    RESULTS.write_text(page(done, len(trial.calls)), encoding="utf-8")
    print(RESULTS.read_text())


if __name__ == "__main__":
    main()
