"""Whole runs under Ray that lose worker processes, or in which something hangs: an attempt ends with an error
that names the process and what is open by the ledger, and the next one trains each group once.
"""

from __future__ import annotations

import json
import os
import re
from itertools import product
from pathlib import Path

import pytest
from kill_resume import STEPS, differences
from ledger_kills import KEYS, accounts
from ledger_losses import HANGS
from ray_runs import OF_EACH_PROCESS, OWN_POOL, under_ray
from test_schedules import OF_ITS_OWN
from tiny_run import Inputs, small_run

from hybridflow.trainer.main_ppo import main
from ranks import Ended

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.xdist_group("ray")]

SCHEDULES = {
    "exact_async": ["trainer.schedule=exact_async", "trainer.async.run_ahead=2"],
    "fully_async": ["trainer.schedule=fully_async", "trainer.async.max_staleness=3"],
}
PLANS = {
    "exact_async": [
        ("admitted", 2, "generate"),
        ("scored", 3, "train"),
        ("taken", 2, "generate"),
        ("published", 3, "train"),
    ],
    "fully_async": [
        ("admitted", 6, "train"),
        ("finished", 3, "generate"),
        ("taken", 5, "generate"),
        ("published", 3, "train"),
    ],
}
HANGING = [
    "RolloutWorker.update_weights 3",
    "ActorWorker.export_buckets 3",
    "RolloutWorker.collect 4",
    "Session.step 20",
]
ALL = list(product(PLANS, HANGING))
# each takes more than a minute: every other one, and all with HYBRIDFLOW_ALL_HANGS=1
CASES = ALL if os.environ.get("HYBRIDFLOW_ALL_HANGS") else [*ALL[0:4:3], *ALL[5:7]]


@pytest.fixture(scope="module")
def undisturbed(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in one process that nothing disturbs: an exact schedule gives its numbers anywhere."""
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    assert main(arguments(inputs, out, "exact_async")) == 0
    return out


def arguments(inputs: Inputs, out: Path, schedule: str) -> list[str]:
    return small_run(inputs, out, f"data.val_files={inputs.val}", *KEYS, *SCHEDULES[schedule], steps=STEPS)


def run(
    inputs: Inputs,
    folder: Path,
    schedule: str,
    plan: list[tuple[str, int, str]],
    *keys: str,
    hangs: str | None = None,
) -> Ended:
    """Run by a schedule on a process that trains and one that generates, with this trouble on the way."""
    overrides = [
        *arguments(inputs, folder / "run", schedule),
        "trainer.controller=ray",
        *OWN_POOL,
        "actor_rollout_ref.model.external_lib=ledger_losses",
        *keys,
    ]
    variables = {} if hangs is None else {HANGS: f"{hangs} {folder / 'hung'}"}
    words = [json.dumps(plan), *overrides]
    return under_ray(folder / "log", words, module="ledger_losses", variables=variables).wait()


def end_of(output: str) -> str:
    """Return its last lines: a message of pytest may be cut at its end."""
    return "\n".join(output.splitlines()[-40:])


def check(run_folder: Path, schedule: str, undisturbed: Path) -> None:
    """Each group is trained once and, in an exact schedule, every number is as if nothing had been."""
    assert accounts(run_folder) == []
    if schedule == "exact_async":
        ignored = (*OF_EACH_PROCESS, "reward/", "rollout/")
        assert not differences(run_folder, undisturbed, ignored, last_files_without=OF_ITS_OWN)


@pytest.mark.parametrize("schedule", list(PLANS))
def test_processes_that_are_killed_at_transitions_of_the_ledger(
    inputs: Inputs, tmp_path: Path, undisturbed: Path, schedule: str
) -> None:
    plan = PLANS[schedule]
    done = run(inputs, tmp_path, schedule, plan, f"trainer.max_restarts={len(plan)}")
    assert done.returncode == 0, end_of(done.output)
    killed = re.findall(r"^killed (\w+) (\d+)$", done.output, re.MULTILINE)
    assert [pool for pool, _ in killed] == [pool for *_, pool in plan], done.output
    attempts = done.output.split("the workers are built anew")[:-1]
    assert len(attempts) == len(plan), done.output
    for (pool, pid), attempt in zip(killed, attempts):
        said = attempt[attempt.index(f"killed {pool} {pid}") :]
        assert re.search(rf"is lost .*pool {pool}, .*process {pid}\)", said), said
        assert re.search(r"^open: version \d+, \d+ groups admitted", said, re.MULTILINE), said
    check(tmp_path / "run", schedule, undisturbed)


@pytest.mark.parametrize(("schedule", "hangs"), CASES, ids=lambda part: part.partition(" ")[0])
def test_something_that_hangs_ends_the_attempt_within_its_deadline(
    inputs: Inputs, tmp_path: Path, undisturbed: Path, schedule: str, hangs: str
) -> None:
    keys = ("trainer.worker_timeout=30", "trainer.max_restarts=1")
    done = run(inputs, tmp_path, schedule, [], *keys, hangs=hangs)
    assert done.returncode == 0, end_of(done.output)
    assert Path(tmp_path, "hung").exists(), end_of(done.output)
    attempt, _, _ = done.output.partition("the workers are built anew")
    assert "trainer.worker_timeout" in attempt, end_of(attempt)
    assert re.search(r"^open: version \d+, \d+ groups admitted", attempt, re.MULTILINE), end_of(attempt)
    check(tmp_path / "run", schedule, undisturbed)
