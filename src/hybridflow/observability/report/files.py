"""The files of a run folder, re-read when they change; the run may write, replace or remove them.

    metrics.jsonl ──Lines──► the object of each step        samples/{step}.jsonl ──Folder──► rows of each step

Each poll has a number, and what it finds is marked with it, so that a reader can ask for what came later.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hybridflow.observability.report.rows import brief, is_shown, number

_HEAD = 128  # bytes at the beginning of a file by which a rewritten one is recognised
_MAX_DEPTH = 100  # lists and objects within each other; Python's own functions end far beyond it
_MANY_LISTS = 2_000  # in a YAML text
_MAX_STEP = 2**53  # what the page's numbers hold exactly

Fingerprint = tuple[int, int, int]


def fingerprint(path: Path) -> Fingerprint | None:
    """Return what changes when a file does, or None where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


class Lines:
    """The objects of a JSONL file by their `step`; those of one step are joined.

    Only the last line that was read, which may be rewritten, and what follows it are read again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_step: dict[int, dict[str, Any]] = {}
        self.changed: dict[int, int] = {}
        """Number of the poll that saw a step's line change last."""
        self.newest = 0
        """Number of the poll that saw a change last."""
        self._seen: Fingerprint | None = None
        self._offset = 0
        self._head = b""
        self._last: int | None = None  # step of the line at the offset
        self._bad: set[int] = set()  # where lines begin that could not be read

    @property
    def bad(self) -> int:
        """Number of whole lines that could not be read."""
        return len(self._bad)

    def poll(self, number: int) -> bool:
        """Read what is new; return whether something that was there before has gone."""
        seen = fingerprint(self.path)
        if seen == self._seen:
            return False
        gone = False
        if seen is None or self._seen is None or seen[0] != self._seen[0] or seen[1] < self._offset:
            gone = self._forget()
        self._seen = seen
        if seen is None:
            return gone
        try:
            head, data = self._read()
        except OSError:  # removed in this moment
            self._seen = None
            return self._forget() or gone
        first = _object(data.partition(b"\n")[0])
        if not head.startswith(self._head) or (first and self._last not in (None, first["step"])):
            gone = self._forget()  # it was rewritten in place
            self._seen = None
            return self.poll(number) or gone
        *whole, torn = data.split(b"\n")
        place = self._offset
        for line in whole:
            if not self._take(line, number) and line.strip():
                self._bad.add(place)
            place += len(line) + 1
        self._take(torn, number)
        if whole:
            self._offset += len(data) - len(torn) - len(whole[-1]) - 1
            self._head = head[: self._offset]
            self._last = (_object(whole[-1]) or {}).get("step")
        return gone

    def _read(self) -> tuple[bytes, bytes]:
        """Return the beginning of the file, and all from the last line on that was read."""
        with self.path.open("rb") as file:
            head = file.read(_HEAD)
            file.seek(self._offset)
            return head, file.read()

    def _forget(self) -> bool:
        had = bool(self.by_step)
        self.by_step = {}
        self.changed = {}
        self._offset = 0
        self._head = b""
        self._last = None
        self._bad = set()
        return had

    def _take(self, text: bytes, number: int) -> bool:
        """Take a line in; return whether it could be read."""
        line = _object(text)
        if line is None:
            return False
        step = line.pop("step")
        before = self.by_step.get(step)
        if before is not None and all(before.get(name) == value for name, value in line.items()):
            return True
        self.by_step[step] = {**(before or {}), **line}
        self.changed[step] = number
        self.newest = number
        return True


def _object(text: bytes) -> dict[str, Any] | None:
    """Return the object of a line, with a whole `step`; None where it has none or is torn."""
    line = read_json(text)
    if not isinstance(line, dict):
        return None
    try:
        line["step"] = int(line["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    if abs(line["step"]) >= _MAX_STEP:
        return None
    # a whole number of hundreds of digits has no place among floats
    huge = {name for name, value in line.items() if isinstance(value, int) and abs(value) >= _MAX_STEP}
    return {name: number(value) if name in huge else value for name, value in line.items()}


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, by libyaml where PyYAML has it: that is ten times as fast.

    Raises OSError, and ValueError for a text that is no YAML, is nested too deeply or holds something else.
    libyaml ends the process where lists stand within each other in thousands; PyYAML's own reader raises.
    """
    text = path.read_text(encoding="utf-8")
    loader: Any = yaml.SafeLoader
    if sum(map(text.count, ("[", "{", "- ", "? "))) < _MANY_LISTS:
        loader = getattr(yaml, "CSafeLoader", loader)
    try:
        content = yaml.load(text, loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(content or {}, dict):
        raise ValueError("it holds no mapping")
    if _is_deeper(content, _MAX_DEPTH):
        raise ValueError("its values are nested too deeply")
    return content or {}


def read_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, or None for one that is none or whose values are nested too deeply."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    openings = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, openings)) > _MAX_DEPTH and _is_deeper(value, _MAX_DEPTH):  # type: ignore[arg-type]
        return None
    return value


def _is_deeper(value: Any, most: int) -> bool:
    """Return whether more than `most` lists and objects stand within each other."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(most):
        inside: list[Any] = []
        for each in level:
            inside += each.values() if isinstance(each, dict) else each
        level = [each for each in inside if isinstance(each, (dict, list))]
        if not level:
            return False
    return True


@dataclass(frozen=True)
class StepFile:
    """The rows of one step."""

    seen: Fingerprint
    changed: int
    """Number of the poll that read it."""
    total: int
    """Rows in the file."""
    bad: int
    """Lines that could not be read."""
    columns: dict[str, list[Any]]
    """The rows as the table has them."""


class Folder:
    """The files {step}.jsonl of a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[int, StepFile] = {}
        self.newest = 0
        """Number of the poll that read a file last."""

    def poll(self, number: int) -> bool:
        """Read the files that are new or have changed; return whether one has gone."""
        found = {}
        for path in self.path.glob("*.jsonl"):
            seen = fingerprint(path)
            if path.stem.isdecimal() and seen is not None:
                found[int(path.stem)] = seen
        gone = [step for step in self.files if step not in found]
        for step in gone:
            del self.files[step]
        for step, seen in found.items():
            if step not in self.files or self.files[step].seen != seen:
                rows = list(self.rows(step))
                good = [row for row in rows if row is not None]
                self.newest = number
                self.files[step] = StepFile(seen, number, len(rows), len(rows) - len(good), brief(good))
        return bool(gone)

    def rows(self, step: int) -> Iterator[dict[str, Any] | None]:
        """Yield the rows of a step, None for a line that is none; nothing where the file has gone."""
        try:
            text = (self.path / f"{step}.jsonl").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
        for line in text.split("\n"):
            if line.strip():
                row = read_json(line)
                yield row if is_shown(row) else None
