"""The file of a ledger: torn and damaged lines, kills, rewinds, and the fold against a slow one."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_run import SimulatedRun, World
from slow_fold import as_folded, slow_fold, surviving

from hybridflow.errors import CheckpointError
from hybridflow.trainer.schedules import ledger as ledger_module
from hybridflow.trainer.schedules.ledger import (
    KINDS,
    Ledger,
    Rewound,
    decode,
    encode,
    surviving_transitions,
)
from hybridflow.trainer.schedules.ledger_state import (
    Admitted,
    Failed,
    Filtered,
    Finished,
    GroupPhase,
    ImpossibleTransition,
    LedgerState,
    Published,
    Replaced,
    Replayed,
    Restarted,
    Scored,
    Taken,
    Transition,
    ranges,
)
from hybridflow.trainer.schedules.schedule import Schedule

EACH_KIND: list[Transition] = [
    Admitted(0, 2, version=0, prompts=(7, 8)),
    Restarted(0, version=0),
    Finished(0, 2, tokens=12),
    Scored(0, 2),
    Taken(0, step=0, tokens=5),
    Published(1),
    Filtered(1),
    Admitted(2, version=1),
    Replaced(1, by=2),
    Failed(2, cause='it said "no"\n', tokens=3),
    Replayed(0, step=1, draws=2),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def write(path: Path, transitions: list[Transition]) -> None:
    with Ledger(path) as ledger:
        for transition in transitions:
            ledger.append(transition)


def reopened(path: Path) -> dict[str, Any]:
    with Ledger(path) as ledger:
        return as_folded(ledger.state)


def test_each_kind_of_transition_is_read_as_it_was_written(path: Path) -> None:
    assert {type(each) for each in EACH_KIND} == set(KINDS.values()) - {Rewound}
    for transition in (*EACH_KIND, Rewound(3)):
        assert decode(encode(transition)) == transition
    write(path, EACH_KIND)
    assert [each for _, each in surviving_transitions(path)] == EACH_KIND
    assert reopened(path) == slow_fold(surviving(path))


def test_a_line_says_what_differs_from_a_single_group(path: Path) -> None:
    write(path, [Admitted(0, 2, version=0), Finished(1, tokens=9)])
    assert path.read_text() == (
        '{"kind": "admitted", "first": 0, "count": 2, "version": 0}\n'
        '{"kind": "finished", "first": 1, "tokens": 9}\n'
    )


def test_a_line_is_in_the_file_when_append_returns(path: Path) -> None:
    with Ledger(path) as ledger:
        for number, transition in enumerate(EACH_KIND, 1):
            ledger.append(transition)
            assert path.read_bytes().count(b"\n") == number == ledger.position == ledger.sync()


def test_what_cannot_follow_is_not_written_nor_what_is_behind_it(path: Path) -> None:
    with Ledger(path) as ledger:
        with pytest.raises(ImpossibleTransition, match="the next index is 1"):
            ledger.append(Admitted(0, version=0), Admitted(5, version=0), Admitted(1, version=0))
        assert ledger.position == 1 and path.read_bytes().count(b"\n") == 1
        ledger.append(Finished(0))
    assert reopened(path)["phases"] == {0: GroupPhase.FINISHED}


@pytest.mark.parametrize("last", [EACH_KIND[-1:], EACH_KIND[-3:]])
def test_a_write_that_is_torn_at_any_byte_leaves_the_lines_before_it(
    path: Path, last: list[Transition]
) -> None:
    before = EACH_KIND[: -len(last)]
    write(path, before)
    start = path.stat().st_size
    with Ledger(path) as ledger:
        ledger.append(*last)
        whole_state = as_folded(ledger.state)
    whole = path.read_bytes()
    for size in range(start, len(whole)):
        path.write_bytes(whole[:size])
        with Ledger(path) as ledger:
            kept = whole[:size].count(b"\n")
            assert ledger.position == kept and path.read_bytes() == b"".join(whole.splitlines(True)[:kept])
            assert as_folded(ledger.state) == slow_fold(surviving(path))
            ledger.append(*EACH_KIND[kept:])
            assert as_folded(ledger.state) == whole_state
        assert path.read_bytes() == whole


DAMAGE = [
    (b"{", "JSONDecodeError"),
    (b"\x00\x00\x00", "JSONDecodeError"),
    (b"\xff\xfe", "UnicodeDecodeError"),
    (b"", "JSONDecodeError"),
    (b"3", "AttributeError"),
    (b'{"first": 1}', "KeyError"),
    (b'{"kind": "lost", "first": 1}', "KeyError"),
    (b'{"kind": "finished"}', "TypeError"),
    (b'{"kind": "finished", "first": true}', "first is True"),
    (b'{"kind": "finished", "first": 0.5}', "first is 0.5"),
    (b'{"kind": "finished", "first": 0, "colour": 1}', "TypeError"),
    (b'{"kind": "failed", "first": 0, "cause": 1}', "cause is 1"),
    (b'{"kind": "published", "version": 7}', "version 0 is published, so 1 fits"),
    (b'{"kind": "rewound", "position": 9}', "goes back to a line that is not before it"),
]


@pytest.mark.parametrize("damage, reason", DAMAGE)
@pytest.mark.parametrize("number", [2, len(EACH_KIND)])
def test_a_damaged_line_is_refused_by_its_number(path: Path, damage: bytes, reason: str, number: int) -> None:
    write(path, EACH_KIND)
    lines = path.read_bytes().splitlines()
    if number == len(EACH_KIND):
        reason = reason.replace("version 0 is published, so 1", "version 1 is published, so 2")
        damage = damage.replace(b'"position": 9', b'"position": 90')
    lines[number - 1] = damage
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(CheckpointError) as found:
        Ledger(path)
    text = str(found.value)
    assert text.startswith(f"{path}, line {number}: ") and reason in text
    assert f"keep its first {number - 1} lines (head -n {number - 1})" in text
    path.write_bytes(b"".join(line + b"\n" for line in lines[: number - 1]))
    assert reopened(path) == slow_fold(surviving(path)), "the way out that the message names"


def test_an_index_that_is_trained_twice_is_found_when_the_file_is_read(path: Path) -> None:
    write(path, [Admitted(0, 2, version=0), Finished(0, 2), Scored(0, 2), Taken(0, 2, step=0), Published(1)])
    with path.open("ab") as file:
        file.write(encode(Taken(1, step=1)))
    with pytest.raises(CheckpointError, match=r"line 6: .* group 1 is trained, and not scored"):
        Ledger(path)


def test_a_rewind_undoes_what_came_after(path: Path) -> None:
    batch = [Finished(0, 4), Scored(0, 4), Taken(0, 4, step=0)]
    with Ledger(path) as ledger:
        ledger.append(Admitted(0, 4, version=0), *batch)
        ledger.append(Published(1))
        position = ledger.sync()
        first = as_folded(ledger.state)
        ledger.append(Admitted(4, 2, version=1), Failed(4, cause="lost"))
        ledger.rewind(position)
        assert as_folded(ledger.state) == first and ledger.position == position + 3
        ledger.append(Admitted(4, version=1))
        assert ledger.state.active == {4: 1} and not ledger.state.causes
        second = ledger.position
        ledger.append(Failed(4, cause="again"))
        ledger.rewind(second)
        assert ledger.state.active == {4: 1}, "a rewind to a line behind the rewind of before"
        ledger.rewind(position + 2)
        assert ledger.state.causes == {"lost": 1}, "a rewind to a line that was undone"
        ledger.rewind(0)
        assert as_folded(ledger.state) == as_folded(LedgerState())
        assert reopened(path) == as_folded(LedgerState())


@pytest.mark.parametrize("position", [-1, 3])
def test_a_position_that_the_file_has_not_is_refused(path: Path, position: int) -> None:
    write(path, [Admitted(0, version=0), Finished(0)])
    with (
        Ledger(path) as ledger,
        pytest.raises(
            CheckpointError, match=rf"after line {position} of .*, which has 2 lines: .* or put the"
        ),
    ):
        ledger.rewind(position)
    assert path.read_bytes().count(b"\n") == 2


def random_transition(state: LedgerState, chance: random.Random) -> Transition | None:
    """Draw a transition that may follow, over one group or more; None where its kind fits no group."""

    def some(*phases: GroupPhase) -> tuple[int, int]:
        fitting = [i for i in range(state.num_admitted) if state.phase(i) in phases]
        run = chance.choice(list(ranges(fitting)))
        first = chance.choice(run)
        return first, chance.randint(1, run.stop - first)

    open_phases = (GroupPhase.GENERATING, GroupPhase.FINISHED, GroupPhase.SCORED)
    tokens = chance.choice((0, 17))
    try:
        match chance.choice(list(KINDS)):
            case "admitted":
                return Admitted(state.num_admitted, chance.randint(1, 5), version=state.version)
            case "restarted":
                return Restarted(*some(*open_phases), version=state.version)
            case "finished":
                return Finished(*some(GroupPhase.GENERATING), tokens=tokens)
            case "scored":
                return Scored(*some(GroupPhase.FINISHED))
            case "taken":
                return Taken(
                    *some(GroupPhase.SCORED), step=state.version + chance.randint(0, 1), tokens=tokens
                )
            case "published":
                return Published(state.version + 1)
            case "failed":
                return Failed(*some(*open_phases), cause=chance.choice("ab"), tokens=tokens)
            case "filtered":
                return Filtered(*some(GroupPhase.SCORED))
            case "replaced":
                return replace(
                    Replaced(*some(GroupPhase.FAILED, GroupPhase.FILTERED), by=some(*open_phases)[0]), count=1
                )
            case "replayed":
                return Replayed(*some(GroupPhase.TAKEN, GroupPhase.TRAINED), step=state.version)
    except IndexError:
        pass
    return None


@settings(max_examples=150)
@given(seed=st.integers(0, 2**31), num_lines=st.integers(1, 120))
def test_random_ledgers_with_rewinds_and_kills_are_folded_as_the_slow_way_does(
    tmp_path_factory: pytest.TempPathFactory, seed: int, num_lines: int
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    chance = random.Random(seed)
    ledger = Ledger(path)
    for _ in range(num_lines):
        transition = random_transition(ledger.state, chance)
        if transition is not None:
            ledger.append(transition)
        if chance.random() < 0.05:
            ledger.rewind(chance.randint(0, ledger.position))
        if chance.random() < 0.05:
            with path.open("ab") as file:
                file.write(b'{"kind": "adm'[: chance.randint(0, 13)])
            ledger.close()
            ledger = Ledger(path)
        if chance.random() < 0.2:
            assert as_folded(ledger.state) == slow_fold(surviving(path))
    ledger.close()
    assert reopened(path) == slow_fold(surviving(path))


class RunWithLedger(SimulatedRun):
    """A simulated run that keeps its transitions in a file, and resumes from it."""

    def __init__(self, schedule: Schedule, world: World, path: Path) -> None:
        super().__init__(schedule, world)
        self.ledger = Ledger(path)
        self.state = self.ledger.state

    def note(self, transition: Transition) -> None:
        self.ledger.append(transition)

    def position(self) -> int:
        return self.ledger.sync()

    def rewind(self, position: int) -> None:
        self.ledger.close()
        self.ledger = Ledger(self.ledger.path)
        self.ledger.rewind(position)
        self.state = self.ledger.state


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), kills=st.integers(0, 4))
def test_each_index_is_trained_once_in_the_history_that_survives_kills(
    tmp_path_factory: pytest.TempPathFactory, seed: int, kills: int
) -> None:
    path = tmp_path_factory.mktemp("run") / "ledger.jsonl"
    world = World(seed, failing=0.1, filtering=0.1, kills=kills)
    run = RunWithLedger(Schedule(3, 1.5, 3, 5), world, path)
    run.run()
    run.ledger.close()
    lines = surviving(path)
    trained = [index for line in lines if line["kind"] == "taken" for index in [line["first"]]]
    assert len(trained) == len(set(trained)) == 15
    assert set(trained) == run.accounts.trained()
    assert reopened(path) == slow_fold(lines)


KILLED = """
import sys
from pathlib import Path
from hybridflow.trainer.schedules.ledger import Ledger
from hybridflow.trainer.schedules.ledger_state import Admitted, Published

with Ledger(Path(sys.argv[1])) as ledger:
    while True:
        index = ledger.state.num_admitted
        ledger.append(Admitted(index, 3, version=ledger.state.version), Published(ledger.state.version + 1))
        print(ledger.position, flush=True)
"""


def test_a_process_that_is_killed_loses_nothing_that_append_has_returned_for(path: Path) -> None:
    for _ in range(2):  # the second goes on after what the first has left
        with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(100):
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)
            told = [int(line) for line in process.stdout.read().splitlines(True) if line.endswith(b"\n")]
        with Ledger(path) as ledger:
            assert ledger.position >= max(told, default=200)
            assert ledger.state.num_admitted % 3 == 0 and ledger.state.version > 0


class FullDisk:
    """A file that takes a few bytes and then has no room."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.room = 10

    def write(self, data: memoryview) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        written = self.file.write(data[: self.room])
        self.room -= written
        return int(written)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_a_full_disk_ends_the_ledger_and_leaves_whole_lines(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, EACH_KIND[:3])
    whole = path.read_bytes()
    ledger = Ledger(path)
    monkeypatch.setattr(ledger, "_file", FullDisk(ledger._file))
    with pytest.raises(OSError, match="No space left"):
        ledger.append(EACH_KIND[3])
    assert path.read_bytes() == whole
    with pytest.raises(ValueError, match="closed file"):
        ledger.append(EACH_KIND[4])
    assert path.read_bytes() == whole


def test_several_threads_may_append(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.append(Admitted(0, 400, version=0))

        def finish(first: int) -> None:
            for index in range(first, first + 200):
                ledger.append(Finished(index), Scored(index))

        threads = [Thread(target=finish, args=(first,)) for first in (0, 200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(ledger.state.ready) == 400 and ledger.position == 801
    assert reopened(path) == slow_fold(surviving(path))


def test_opening_reads_each_line_twice_at_most_whatever_was_undone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ledger(path) as ledger:
        for number in range(40):
            ledger.append(Admitted(ledger.state.num_admitted, version=0), Finished(ledger.state.num_admitted))
            if number % 4 == 0:
                ledger.rewind(ledger.position - 1)
        num_lines = ledger.position
    calls = {"decode": 0, "apply": 0}

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return function(*arguments)

        return call

    monkeypatch.setattr(ledger_module, "decode", counted("decode", decode))
    monkeypatch.setattr(LedgerState, "apply", counted("apply", LedgerState.apply))
    with Ledger(path) as ledger:
        assert num_lines <= calls["decode"] <= 2 * num_lines and calls["apply"] <= num_lines
        calls["decode"] = calls["apply"] = 0
        ledger.append(Published(1))
        assert calls == {"decode": 0, "apply": 1}
