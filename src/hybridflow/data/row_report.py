"""The report on the rows while a dataset is built: progress, and unusable rows, counted and shown."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from hybridflow.errors import DataError

logger = logging.getLogger(__name__)

SHOWN = 3
PROGRESS_SECONDS = 10.0

Raw = TypeVar("Raw")
Encoded = TypeVar("Encoded")


class RowReport:
    """A counter of rows that fail while `total` rows of `source` are read.

    It logs the failures at the end, and the progress every ten seconds.
    """

    def __init__(self, source: str, total: int) -> None:
        self.source = source
        self.total = total
        self.num_failed = 0
        self.reasons: list[str] = []
        self.overlong: list[int] = []
        self.longest = 0
        self._next_line = time.monotonic() + PROGRESS_SECONDS

    def encoded(
        self, rows: Iterable[Raw], encode: Callable[[int, Raw], Encoded]
    ) -> Iterator[tuple[int, Encoded]]:
        """Give (index, what `encode` makes of it) of each row; a row at which it raises is counted."""
        for index, row in enumerate(rows):
            self.seen(index)
            try:
                result = encode(index, row)
            except Exception as error:  # templates are the tokenizer's own code, and rows are the user's
                self.failed(index, error)
                continue
            yield index, result

    def is_overlong(self, index: int, length: int, limit: int) -> bool:
        """Note the length of a row, in tokens; return whether it is more than `limit`."""
        self.longest = max(self.longest, length)
        if length > limit:
            self.overlong.append(index)
        return length > limit

    def overlong_rows(self, what: str, key: str, limit: int) -> str:
        """Return in words how many rows are overlong, and which; `key` sets the limit."""
        first = ", ".join(str(index) for index in self.overlong[:SHOWN])
        return (
            f"{len(self.overlong)} of {self.total} {what} of {self.source} are longer than {key}={limit} "
            f"tokens (the longest has {self.longest}; first rows: {first})"
        )

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
