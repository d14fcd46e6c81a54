"""How a command ends: its status and its one message."""

from __future__ import annotations

import errno

import pytest

from hybridflow.errors import DataError, WorkerLost
from hybridflow.trainer.command import ends_in_status


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
def test_a_users_mistake_is_one_message(error: BaseException | None, status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(error) == status
    shown = capsys.readouterr().err
    assert shown.startswith(said) and shown.count("\n") == (1 if said else 0)


def test_what_is_known_of_a_lost_worker_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    error = WorkerLost("actor rank 1 is lost")
    error.add_note("then failed rank 0: RuntimeError: Connection closed")
    assert ending(error) == 1
    assert capsys.readouterr().err == "WorkerLost: actor rank 1 is lost\nthen failed rank 0: RuntimeError: Connection closed\n"


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken disk"), ValueError("ours")])
def test_what_is_nobodys_mistake_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        ending(error)
