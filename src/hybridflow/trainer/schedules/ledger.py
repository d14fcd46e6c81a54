"""The ledger of a run: `ledger.jsonl`, one line for each transition of its groups, and the resulting state.

    append(Taken(first=12, step=3)) ──► one more line, written before `append` returns ──► `state` follows
    open ──► a torn last line is cut off, what `rewind` has undone is left out ──► `state`

A line is written to the file before the act that it allows, so a process that is killed loses nothing that
`append` has returned for. The line need not be on the disk by then: if the machine itself stops, the lines
since the last `sync` may be lost. A checkpoint calls `sync` and keeps the position, and a resume rewinds to
that position, so it undoes the lines that may be lost anyway.

A *position* is a number of lines. `rewind(position)` appends a line that says: what follows goes on from
where the ledger was after that many lines. So the history is a tree, and each position can be rewound to for
ever, also one that an earlier rewind has undone.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from hybridflow.checkpoint.durable import sync
from hybridflow.errors import CheckpointError
from hybridflow.trainer.schedules.ledger_state import (
    Admitted,
    Failed,
    Filtered,
    Finished,
    ImpossibleTransition,
    LedgerState,
    Published,
    Replaced,
    Replayed,
    Restarted,
    Scored,
    Taken,
    Transition,
)

LEDGER_FILE = "ledger.jsonl"


@dataclass(frozen=True)
class Rewound(Transition):
    """The history continues from where the ledger was after `position` lines."""

    position: int


KINDS: dict[str, type[Transition]] = {
    kind.__name__.lower(): kind
    for kind in (
        Admitted,
        Restarted,
        Finished,
        Scored,
        Taken,
        Published,
        Failed,
        Filtered,
        Replaced,
        Replayed,
        Rewound,
    )
}
FIELDS = {kind: fields(kind) for kind in KINDS.values()}


class Ledger:
    """An open `ledger.jsonl`, for one process that writes; a context manager that closes it.

    `append` may be called from any thread. `state` is to be read in the thread that appends.
    """

    def __init__(self, path: Path) -> None:
        """Open a ledger, or begin one in a folder that exists; its last line is cut off where it is torn.

        Raises CheckpointError, which names the line, where another line is damaged or cannot follow.
        """
        if not path.exists():
            path.touch()
            sync(path.parent)
        self.path = path
        self.state = _fold(path)
        """The state after all transitions that no rewind has undone; each `append` changes it."""
        lines = _whole_lines(path)
        self.position = len(lines)
        """Lines of the file: what a checkpoint keeps, and `rewind` takes."""
        self._num_bytes = sum(map(len, lines)) + len(lines)
        self._file = path.open("r+b", buffering=0)
        self._file.truncate(self._num_bytes)
        self._file.seek(self._num_bytes)
        self._lock = Lock()

    def append(self, *transitions: Transition) -> None:
        """Apply the transitions and write their lines in one piece; they are written when this returns.

        Raises ImpossibleTransition where one cannot follow: it and those behind it are then not written.
        """
        lines = []
        with self._lock:
            try:
                for transition in transitions:
                    self.state.apply(transition)
                    lines.append(encode(transition))
            finally:
                self._write(lines)

    def rewind(self, position: int) -> None:
        """Undo what happened after the position of a checkpoint, or everything: 0. No line is erased.

        `state` is another object afterwards. Raises CheckpointError where the file has fewer lines.
        """
        with self._lock:
            if not 0 <= position <= self.position:
                raise CheckpointError(
                    f"the checkpoint goes on after line {position} of {self.path}, which has {self.position} "
                    "lines: it belongs to another run, or the end of the file is lost. Resume from an "
                    "earlier checkpoint, or put the whole file there."
                )
            self._write([encode(Rewound(position))])
            self.state = _fold(self.path)

    def kept(self, position: int) -> Tensor:
        """Return what a checkpoint keeps: the first `position` lines, compressed, [number of bytes] uint8."""
        with self._lock, self.path.open("rb") as file:
            lines = b"".join(islice(file, position))
        return torch.frombuffer(bytearray(zlib.compress(lines)), dtype=torch.uint8)

    def go_on_from(self, kept: Tensor) -> None:
        """Go on after the lines that a checkpoint has kept, as `rewind` does.

        A file that does not begin with them, of another run or of none, is put aside as `*.before`.
        """
        lines = zlib.decompress(kept.numpy().tobytes())
        with self._lock:
            self._file.seek(0)
            if self._file.read(len(lines)) != lines:
                if self._num_bytes:
                    shutil.copyfile(self.path, self.path.with_name(f"{self.path.name}.before"))
                self._file.seek(0)
                self._file.truncate(0)
                self._file.write(lines)
                self._num_bytes = len(lines)
                self.position = lines.count(b"\n")
            self._file.seek(self._num_bytes)
        self.rewind(lines.count(b"\n"))

    def sync(self) -> int:
        """Wait until all lines are on the disk; gives the position, for a checkpoint."""
        with self._lock:
            sync(self.path)
            return self.position

    def close(self) -> None:
        """Close the file; nothing can be appended any more."""
        self._file.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, lines: list[bytes]) -> None:
        rest = memoryview(b"".join(lines))
        size = len(rest)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:  # such as a full disk: `state` is ahead of the file now, so this ledger has ended
            self._file.truncate(self._num_bytes)
            self._file.close()
            raise
        self._num_bytes += size
        self.position += len(lines)


def surviving_transitions(path: Path) -> Iterator[tuple[int, Transition]]:
    """Yield the transitions of a file that no rewind has undone, each with the number of its line, from 0.

    Raises CheckpointError where any line is damaged.
    """
    lines = _whole_lines(path)
    goes_back: dict[int, int] = {}
    for number, line in enumerate(lines):
        transition = _decoded(path, number, line)
        if isinstance(transition, Rewound):
            if not 0 <= transition.position <= number:
                raise _damaged(path, number, line, "it goes back to a line that is not before it")
            goes_back[number] = transition.position
    survivors = []
    end = len(lines)
    while end:
        end -= 1
        if end in goes_back:
            end = goes_back[end]
        else:
            survivors.append(end)
    for number in reversed(survivors):
        yield number, decode(lines[number])


def encode(transition: Transition) -> bytes:
    """Return the line of a transition: its kind, and the fields that differ from their defaults."""
    kind = type(transition)
    line: dict[str, Any] = {"kind": kind.__name__.lower()}
    for field in FIELDS[kind]:
        value = getattr(transition, field.name)
        if value != field.default:
            line[field.name] = value
    return (json.dumps(line) + "\n").encode()


def decode(line: bytes) -> Transition:
    """Return the transition of a line; raises ValueError, KeyError or TypeError where it is none."""
    values = json.loads(line.decode())
    kind = KINDS[values.pop("kind")]
    for name, value in values.items():
        if name == "prompts":
            values[name] = tuple(value)
        elif type(value) is not (str if name == "cause" else int):
            raise ValueError(f"{name} is {value!r}")
    return kind(**values)


def _fold(path: Path) -> LedgerState:
    state = LedgerState()
    for number, transition in surviving_transitions(path):
        try:
            state.apply(transition)
        except ImpossibleTransition as error:
            raise _damaged(path, number, encode(transition), str(error)) from error
    return state


def _whole_lines(path: Path) -> list[bytes]:
    """The lines of a file, without a last one that is torn."""
    return path.read_bytes().split(b"\n")[:-1]


def _decoded(path: Path, number: int, line: bytes) -> Transition:
    try:
        return decode(line)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, number, line, f"{type(error).__name__}: {error}") from error


def _damaged(path: Path, number: int, line: bytes, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path}, line {number + 1}: {line[:200].decode(errors='replace').rstrip()!r} cannot be a line of "
        f"this ledger ({reason}). Lines are only appended, so something else has changed the file: put a "
        f"copy of it there, or keep its first {number} lines (head -n {number}) and resume from a checkpoint "
        f"whose position is not after line {number}."
    )
