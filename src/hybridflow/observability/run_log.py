"""The log of a run, in its folder beside its metrics.

log lines ──RunLog──► kept in memory until the run has a folder to write into ──begin──► log.txt

A run that is refused before it writes anything leaves no folder, and so no log either.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

LOG_FILE = "log.txt"
MAX_LINES = 2000
"""Lines that are kept before there is a file; later ones are left out until then."""


class RunLog(logging.Handler):
    """Writes what is logged in this process into a file, from `begin` on."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
        )
        self._waiting: list[str] = []
        self._file: TextIO | None = None

    @classmethod
    @contextmanager
    def attached(cls) -> Iterator[RunLog]:
        """Take the log lines of this process until the context ends."""
        log = cls()
        root = logging.getLogger()
        root.addHandler(log)
        try:
            yield log
        finally:
            root.removeHandler(log)
            log.close()

    def begin(self, folder: Path, *, goes_on: bool) -> None:
        """Write the lines so far into the folder, and each later one at once; a run that `goes_on` adds them
        to those of its earlier starts.
        """
        self._end()
        with self._given_up():
            self._file = (folder / LOG_FILE).open("a" if goes_on else "w", encoding="utf-8", errors="replace")
        waiting = self._waiting
        self._waiting = []
        for line in waiting:
            self._write(line)

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line."""
        try:
            line = self.format(record)
        except Exception:  # whatever a line's arguments raise; logging itself goes on too
            self.handleError(record)
            return
        if self._file is not None:
            self._write(line)
        elif len(self._waiting) < MAX_LINES:
            self._waiting.append(line)

    def close(self) -> None:
        """Close the file."""
        self._end()
        super().close()

    def _write(self, line: str) -> None:
        with self._given_up():
            if self._file is not None:
                self._file.write(f"{line}\n")
                self._file.flush()

    @contextmanager
    def _given_up(self) -> Iterator[None]:
        """Stop writing the file where it cannot be written: a full disk must not end a run by its log."""
        try:
            yield
        except OSError:
            self._end()

    def _end(self) -> None:
        file = self._file
        self._file = None
        if file is not None:
            try:
                file.close()
            except OSError:  # what was not written yet is lost
                return
