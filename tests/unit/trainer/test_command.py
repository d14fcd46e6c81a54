"""How a command ends: its status and its one message."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.errors import DataError, WorkerError, WorkerLost, WorkerTraceback
from hybridflow.trainer.command import NOTE_LENGTH, ends_in_status


def ending(error: BaseException | None) -> int:
    @ends_in_status
    def main() -> int:
        if error is not None:
            raise error
        return 0

    return main()


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (None, 0, ""),
        (DataError("no rows"), 1, "DataError: no rows\n"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "the disk is full"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_a_users_mistake_is_one_message(
    error: BaseException | None, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ending(error) == status
    shown = capsys.readouterr().err
    assert shown.startswith(said) and shown.count("\n") == (1 if said else 0)


def test_what_is_known_of_a_lost_worker_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    error = WorkerLost("actor rank 1 is lost")
    error.add_note("then failed rank 0: RuntimeError: Connection closed")
    assert ending(error) == 1
    assert (
        capsys.readouterr().err
        == "WorkerLost: actor rank 1 is lost\nthen failed rank 0: RuntimeError: Connection closed\n"
    )


def test_of_a_users_mistake_in_a_rank_the_notes_of_others_are_short(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = DataError("no rows")
    error.__cause__ = WorkerTraceback("Traceback …")
    for note in (
        "in actor.update, rank 1",
        "then failed rank 0: RuntimeError: " + "x" * 1000,
        "stack:\n  line 1",
    ):
        error.add_note(note)
    assert ending(error) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["DataError: no rows", "in actor.update, rank 1"] and lines[3] == "stack:"
    assert len(lines) == 4 and lines[2].endswith("x …") and len(lines[2]) == NOTE_LENGTH + 2


def test_the_traceback_of_a_worker_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    error = WorkerError("Odd: cannot travel")
    error.__cause__ = WorkerTraceback("Traceback of rank 1")
    error.add_note("in actor.update, rank 1")
    assert ending(error) == 1
    assert capsys.readouterr().err.splitlines() == [
        "Traceback of rank 1",
        "WorkerError: Odd: cannot travel",
        "in actor.update, rank 1",
    ]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken disk"), ValueError("ours")])
def test_what_is_nobodys_mistake_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        ending(error)


def test_nothing_is_collected_after_the_last_word() -> None:
    """Python's end would go through all objects of torch and transformers, which took seconds."""
    program = """
import atexit, gc
atexit.register(lambda: print("frozen", gc.get_freeze_count() > 1000))
from hybridflow.trainer.command import ends_in_status
ends_in_status(lambda: print("last word") or 0)()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["last word", "frozen True"]


def test_a_reader_that_has_read_enough_ends_the_command_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prints() -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert ends_in_status(prints)() == 141
    assert not capsys.readouterr().err
