"""How far it is from the command to a sampled token, to a reward and to the loss, and how much of our own
code a training step enters: ceilings that only fall. ARCHITECTURE.md lists the way to the loss, and a run
goes that way.

`traced_run.py` measures all of it in one run of the tiny GRPO recipe on one process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import NamedTuple

import pytest
from sources import PACKAGE, ROOT
from traced_run import COMMAND, TARGETS

pytestmark = pytest.mark.xdist_group("hops")  # one run serves all tests

MAX_HOPS = 10
MAX_FILES = 7
MAX_LINES = 450


class Size(NamedTuple):
    """Calls, or functions, and the files that they are in."""

    calls: int
    files: int


CEILINGS = {
    "generation": Size(22, 13),  # goal: 14 calls in 9 files
    "reward": Size(9, 8),  # goal: 10 in 8
    "loss": Size(15, 10),
}
"""Most calls of our own from the command to the function of each measure, and most files, over all its calls
in a run. Comprehensions are no calls. Whoever shortens a way lowers its ceiling.
"""
STEP_CEILING = Size(1122, 129)  # found: 1,112 to 1,115 in 128, a few by the machine's load; goal: 750 in 130
"""Most functions of our own that one training step enters, comprehensions and lambdas included, and files: a
few more than were found, because another kind of CPU may choose another way for equal bits.
"""
WHOLE = re.compile(r"The whole stack has (\d+) calls of our own in (\d+) files")
ROW = re.compile(r"^\| \d+ \| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)


class Call(NamedTuple):
    """One call of our own on a way."""

    file: str
    name: str
    lines: int
    """Lines of the definition."""


class Trace(NamedTuple):
    """What a run has entered."""

    ways: dict[str, list[list[Call]]]
    """The different ways to each measure's function, from the command on, in the order of the run."""
    step: list[tuple[str, str]]
    """File and name of each function that the second step entered."""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The one run, in a process of its own: what other tests have cached would be left out."""
    found = tmp_path_factory.mktemp("trace") / "trace.json"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1"}
    script = ROOT / "tests" / "architecture" / "traced_run.py"
    done = subprocess.run(
        [sys.executable, str(script), str(found)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(found.read_text())
    ways = {
        name: [from_the_command([Call(*call) for call in way]) for way in those]
        for name, those in content["ways"].items()
    }
    return Trace(ways, [(file, name) for file, name, _ in content["step"]])


def from_the_command(way: list[Call]) -> list[Call]:
    names = [(call.file, call.name) for call in way]
    return way[names.index(COMMAND) :]


def size_of(way: list[Call]) -> Size:
    return Size(len(way) - 1, len({call.file for call in way}))


def listing() -> list[tuple[str, str]]:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.partition("## From the command to the loss")[2].partition("\n## ")[0]
    return ROW.findall(section)


@pytest.mark.parametrize("measure", CEILINGS)
def test_no_way_gets_longer(trace: Trace, measure: str) -> None:
    assert trace.ways[measure], f"{TARGETS[measure]} was not called: name the function that took its place"
    sizes = [size_of(way) for way in trace.ways[measure]]
    longest = Size(max(size.calls for size in sizes), max(size.files for size in sizes))
    most = CEILINGS[measure]
    way = max(trace.ways[measure], key=len)
    assert longest.calls <= most.calls and longest.files <= most.files, (
        f"{measure} is {longest} from the command, and {most} is the most: "
        + " > ".join(f"{call.file}:{call.name}" for call in way)
    )


def test_a_step_enters_no_more_of_our_code(trace: Trace) -> None:
    found = Size(len(trace.step), len({file for file, _ in trace.step}))
    assert found.calls > 100, "the step was not seen: name what the loop calls for each step"
    assert found.calls <= STEP_CEILING.calls and found.files <= STEP_CEILING.files, (
        f"one GRPO step enters {found.calls} functions in {found.files} files; the most are {STEP_CEILING}"
    )


def test_the_way_from_the_command_to_the_loss(trace: Trace) -> None:
    calls = trace.ways["loss"][0]
    way = [(call.file, call.name) for call in calls]
    listed = listing()
    assert listed[0] == COMMAND and listed[-1] == TARGETS["loss"]
    rest = iter(way)
    missing = [hop for hop in listed if hop not in rest]
    assert not missing, f"not on the way, or not in this order: {missing}; the way is {way}"
    whole = WHOLE.search((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    assert whole is not None, "the text says how many calls and files the whole stack has"
    assert size_of(calls) == (int(whole[1]), int(whole[2])), way
    between = {file for file, name in way if (file, name) not in listed}
    passed = (
        "trainer/ppo/step.py",
        "engines/fsdp/engine.py",
    )
    assert all(file.startswith("controller/") or file in passed for file in between), between
    assert len(listed) - 1 <= MAX_HOPS and len({file for file, _ in listed}) <= MAX_FILES
    assert sum(call.lines for call in calls[:-1] if (call.file, call.name) in listed) <= MAX_LINES
