"""The report on the rows while a dataset is built: progress, and unusable rows, counted and shown."""

from __future__ import annotations

import logging
import time

from hybridflow.errors import DataError

logger = logging.getLogger(__name__)

SHOWN = 3
PROGRESS_SECONDS = 10.0


class RowReport:
    """A counter of rows that fail while `total` rows of `source` are read.

    It logs the failures at the end, and the progress every ten seconds.
    """

    def __init__(self, source: str, total: int) -> None:
        self.source = source
        self.total = total
        self.num_failed = 0
        self.reasons: list[str] = []
        self._next_line = time.monotonic() + PROGRESS_SECONDS

    def failed(self, index: int, reason: BaseException | str) -> None:
        """Count the row at `index`; the first few are kept to be shown."""
        self.num_failed += 1
        if len(self.reasons) < SHOWN:
            if isinstance(reason, BaseException):
                reason = f"{type(reason).__name__}: {reason}"
            self.reasons.append(f"row {index}: {reason}")

    def seen(self, count: int) -> None:
        """Log at most every ten seconds that `count` rows are done."""
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + PROGRESS_SECONDS
            logger.info("reading %s: %d of %d rows", self.source, count, self.total)

    def close(self) -> None:
        """Log the failures; raise DataError if every row failed."""
        if not self.num_failed:
            return
        text = (
            f"{self.num_failed} of {self.total} rows of {self.source} cannot be used; the first: "
            + " | ".join(self.reasons)
        )
        if self.num_failed == self.total:
            raise DataError(text)
        logger.warning("%s", text)
