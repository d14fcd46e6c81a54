"""Kill a run with SIGKILL at transitions of its ledger, start it again, and look at what the ledger says.

    python tests/e2e/ledger_kills.py [--schedule NAME ...] [--calls N ...]

The child is killed before or after line number N of one kind of transition is written. A resumed run must
have trained each group once; with an exact schedule all metrics and the last checkpoint must be those of a
run that was never killed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from kill_resume import STEPS, differences, start, wait
from tiny_run import Inputs, small_run, write_inputs

from hybridflow.trainer.schedules.ledger import LEDGER_FILE, Ledger
from hybridflow.trainer.schedules.ledger_state import GroupPhase

GROUPS = 4  # of a step
BOUND = 3
KINDS = ("Admitted", "Finished", "Scored", "Taken", "Published", "Rewound")
SCHEDULES = {
    "one_step_off": ("trainer.schedule=one_step_off",),
    "exact_async": ("trainer.schedule=exact_async", "trainer.async.run_ahead=2"),
    "colocated_async": (
        "trainer.schedule=colocated_async",
        "trainer.async.run_ahead=1",
        f"trainer.async.max_staleness={BOUND}",
    ),
}
KEYS = (
    "algorithm.adv_estimator=grpo",
    "algorithm.rollout_correction.rollout_is=token",
    "trainer.test_freq=2",
    "trainer.save_freq=2",
)


def killing(kind: str, call: int, *, after: bool) -> Callable[[], None]:
    """Return what makes a process kill itself at line number `call` of a kind, before or after it."""
    seen = Counter[str]()

    def install() -> None:
        real = Ledger._write

        def write(self: Ledger, lines: list[bytes]) -> None:
            seen[kind] += sum(f'"kind": "{kind.lower()}"'.encode() in line for line in lines)
            due = seen[kind] >= call
            if due and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            real(self, lines)
            if due:
                os.kill(os.getpid(), signal.SIGKILL)

        Ledger._write = write  # type: ignore[method-assign]

    return install


def accounts(run: Path) -> list[str]:
    """Return what is wrong with a finished run by its ledger."""
    with Ledger(run / LEDGER_FILE) as ledger:
        state = ledger.state
    found = []
    if state.trained_per_step != [GROUPS] * STEPS:
        found.append(f"groups trained in each step: {state.trained_per_step}")
    phases = Counter(state.phase(index).name for index in range(state.num_admitted))
    if phases != {GroupPhase.TRAINED.name: GROUPS * STEPS}:
        found.append(f"groups by what became of them: {dict(phases)}")
    if max(state.staleness) > BOUND:
        found.append(f"staleness {dict(state.staleness)}")
    return found


def trial(name: str, inputs: Inputs, folder: Path, calls: list[int]) -> Iterator[tuple[str, list[str]]]:
    """Kill runs of a schedule at each kind of transition; give what went wrong in each."""
    folder.mkdir(parents=True)

    def arguments(out: Path) -> list[str]:
        keys = (f"data.val_files={inputs.val}", *KEYS, *SCHEDULES[name])
        return small_run(inputs, out, *keys, steps=STEPS)

    reference = folder / "uninterrupted"
    log = folder / "uninterrupted.log"
    assert wait(start(arguments(reference), log)) == 0, log.read_text()
    for kind in KINDS:
        for call in [1] if kind == "Rewound" else calls:
            for after in (False, True):
                moment = f"{'after' if after else 'before'} {kind} {call}"
                out = folder / moment.replace(" ", "_")
                log = out.with_suffix(".log")
                if kind == "Rewound":  # the first resume is killed
                    assert wait(start(arguments(out), log, killing("Published", 4, after=True))) < 0
                killed = wait(start(arguments(out), log, killing(kind, call, after=after)))
                found = [] if killed == -signal.SIGKILL else [f"not killed but ended with {killed}"]
                status = wait(start(arguments(out), log))
                if status:
                    found.append(f"the resumed run ended with {status}: {log.read_text()[-500:]}")
                else:
                    found += accounts(out)
                    if name != "colocated_async":
                        found += differences(out, reference, last_files_without=("data/",))
                yield moment, found


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each kill; 1 where any resumed run is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", choices=list(SCHEDULES), nargs="*", default=list(SCHEDULES))
    parser.add_argument(
        "--calls", type=int, nargs="*", default=[1, 5, 9], help="lines of each kind to kill at"
    )
    options = parser.parse_args(arguments)
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        inputs = write_inputs(Path(temporary) / "inputs")
        for name in options.schedule:
            for moment, found in trial(name, inputs, Path(temporary) / name, options.calls):
                failed += bool(found)
                print(
                    f"{name:15} killed {moment:20} {'WRONG: ' + '; '.join(found[:4]) if found else 'right'}"
                )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
