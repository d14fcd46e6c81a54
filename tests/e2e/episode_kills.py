"""Kill runs of agents with SIGKILL at chosen moments of their episodes, start them again, and compare.

    python tests/e2e/episode_kills.py [--schedule NAME ...] [--moment NAME ...]

Each call has to be carried out once, and be the one that a run without a kill has made; rewards, metrics and
the last checkpoint have to be equal to the bit. Of a schedule whose bits depend on timing the ledger is
looked at instead. At the moments named "of its process" the call runs in a process of its own, which is
killed, and the run goes on.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import counting_world
import kill_resume
from kill_resume import STORE, Moment, differences, start, wait
from ledger_kills import BOUND, accounts
from tiny_run import Inputs, metrics_of, small_run, write_inputs

from hybridflow.agent import journal
from hybridflow.agent.journal import GroupFile

OF_AGENTS = ("max_concurrent", "journal/", "processes/", "num_retried/")
IGNORED = ("rollout/", *(f"agent/{name}" for name in OF_AGENTS))
"""Metrics that say how the work was done."""
LINE = 40
"""Number of the line of a kind at which a run is killed."""
LINES = {
    "before the call": ("begun", "after"),
    "after the call": ("done", "before"),
    "while its end is written": ("done", "torn"),
    "between turns": ("done", "after"),
}
FUSES = {
    "in the call, before its effect": ("before its effect", 0),
    "in the call, after its effect": ("after its effect", 0),
    "before its effect, of its process": ("before its effect", 2),
    "after its effect, of its process": ("after its effect", 2),
}
"""What the fuse says, and the number of processes of tools and environments."""
MOMENTS = {
    "while saving": Moment(f"{STORE}:write_manifest"),
    "saved, and the journal not cleaned": Moment("hybridflow.agent.journal:Journal.committed"),
}
ALL = (*LINES, *FUSES, *MOMENTS)
EXACT = "actor_rollout_ref.rollout.exact=true"
SCHEDULES = {
    "sync": (EXACT,),
    "exact_async": (
        EXACT,
        "algorithm.rollout_correction.rollout_is=token",
        "trainer.schedule=exact_async",
        "trainer.async.run_ahead=1",
    ),
    "colocated_async": (
        "algorithm.rollout_correction.rollout_is=token",
        "trainer.schedule=colocated_async",
        "trainer.async.run_ahead=1",
        f"trainer.async.max_staleness={BOUND}",
    ),
}


def killing(kind: str, when: str) -> Callable[[], None]:
    """Return what makes a process kill itself at line number LINE of a kind."""
    seen = Counter[str]()
    counting = threading.Lock()

    def install() -> None:
        counting_world.speak()
        real = GroupFile.append

        def append(self: GroupFile, line: dict[str, object]) -> None:
            with counting:
                seen["lines"] += kind in line
                due = kind in line and seen["lines"] == LINE
            if due and when == "torn":
                with self._path.open("ab") as file:
                    file.write(b'{"sample": 0, "do')
            if due and when != "after":
                os.kill(os.getpid(), signal.SIGKILL)
            real(self, line)
            if due:
                os.kill(os.getpid(), signal.SIGKILL)

        GroupFile.append = append  # type: ignore[assignment,method-assign]

    return install


def at(moment: Moment) -> None:
    """Make this process kill itself at a moment of the run."""
    counting_world.speak()
    kill_resume.install(moment)


class Trial:
    """The runs of one schedule in a folder, and the one that is never killed."""

    def __init__(self, inputs: Inputs, folder: Path, schedule: str = "sync") -> None:
        self.inputs = inputs
        self.folder = folder
        self.keys = SCHEDULES[schedule]
        folder.mkdir(parents=True)
        self.reference = folder / "undisturbed"
        log = self.prepare(self.reference)
        status = wait(start(self.arguments(self.reference), log, counting_world.speak))
        assert status == 0, log.read_text()
        self.calls = self.made(self.reference)

    def arguments(self, out: Path, *keys: str) -> list[str]:
        """Return the command of a run."""
        keys = ("trainer.save_freq=2", *counting_world.KEYS, *self.keys, *keys)
        return small_run(self.inputs, out, *keys, steps=kill_resume.STEPS)

    def prepare(self, out: Path) -> Path:
        """Set where the processes of a run note their effects; return the file of its log."""
        os.environ[counting_world.EFFECTS] = str(out.with_suffix(".effects"))
        os.environ[counting_world.FUSE] = str(out.with_suffix(".fuse"))
        return out.with_suffix(".log")

    def made(self, out: Path) -> dict[str, str]:
        """Return what the calls of a run were made with, by their ids without that of the run."""
        self.prepare(out)
        return {call_id.partition(".")[2]: text for call_id, text in counting_world.noted().items()}

    def kill_at(self, name: str) -> list[str]:
        """Kill a run at a moment, let it go on, and return what is wrong."""
        out = self.folder / name.replace(" ", "_").replace(",", "")
        log = self.prepare(out)
        fuse, workers = FUSES.get(name, ("", 0))
        arguments = self.arguments(out, f"actor_rollout_ref.rollout.agent.num_workers={workers}")
        install = counting_world.speak
        if fuse:
            out.with_suffix(".fuse").write_text(f"{fuse} {LINE // 4}")
        elif name in LINES:
            install = killing(*LINES[name])
        else:
            install = partial(at, MOMENTS[name])
        wanted = 0 if workers else -signal.SIGKILL
        killed = wait(start(arguments, log, install))
        if killed != wanted or out.with_suffix(".fuse").exists():
            return [f"ended with {killed}, wanted {wanted}: {log.read_text()[-800:]}"]
        status = wait(start(arguments, log, counting_world.speak))
        if status:
            return [f"the resumed run ended with {status}: {log.read_text()[-800:]}"]
        return self.compared(out)

    def compared(self, out: Path) -> list[str]:
        """Return how a finished run differs from the undisturbed one."""
        if EXACT in self.keys:
            found = differences(out, self.reference, IGNORED, last_files_without=("data/",))
        else:
            found = accounts(out)
        return [*found, *self.wrong_calls(out)]

    def wrong_calls(self, out: Path) -> list[str]:
        """Return what is wrong with the calls of a finished run, and with its journal."""
        calls = self.made(out)
        found = []
        if EXACT in self.keys and calls != self.calls:
            more = sorted(set(calls.items()) ^ set(self.calls.items()))
            found.append(f"{len(calls)} calls, wanted {len(self.calls)}; those that differ: {more[:4]}")
        twice = len(counting_world.effects()) - len(calls)
        if twice:
            found.append(f"{twice} calls, wanted none, were carried out twice")
        if self.survived(out)["begun_anew"]:
            found.append("an episode was begun anew")
        left = list((out / journal.FOLDER).glob("*-*.jsonl"))
        if left:
            found.append(f"{len(left)} files of the journal are left")
        return found

    def survived(self, out: Path) -> Counter[str]:
        """Return how many episodes went on or began anew, and how many calls are unknown."""
        counts = Counter[str]()
        for step in metrics_of(out).values():
            for name in ("continued", "begun_anew", "calls_unknown"):
                counts[name] += int(step.get(f"agent/journal/{name}", 0))
        return counts


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each kill; 1 where any run differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", choices=list(SCHEDULES), nargs="*", default=list(SCHEDULES))
    parser.add_argument("--moment", choices=ALL, nargs="*", default=ALL)
    options = parser.parse_args(arguments)
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        inputs = write_inputs(Path(temporary) / "inputs")
        for schedule in options.schedule:
            trial = Trial(inputs, Path(temporary) / schedule, schedule)
            for name in options.moment:
                found = trial.kill_at(name)
                failed += bool(found)
                verdict = f"WRONG: {'; '.join(found[:4])}" if found else "right"
                print(f"{schedule:15} killed {name:36} {len(trial.calls)} calls, {verdict}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
