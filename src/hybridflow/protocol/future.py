"""DataProtoFuture: rows that are still being made. Cutting and joining them waits for nothing; `get` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Protocol

from hybridflow.protocol.columns import BatchError
from hybridflow.protocol.data_proto import DataProto


class PendingRows(Protocol):
    """Anything whose `get()` waits for rows, such as one rank's answer to a call that does not block."""

    def get(self) -> DataProto: ...


class DataProtoFuture:
    """The rows that `futures` will give, joined by `collect` once somebody asks; the result is kept."""

    def __init__(
        self,
        futures: Sequence[PendingRows],
        collect: Callable[[Sequence[DataProto]], DataProto] = DataProto.concat,
    ) -> None:
        self._futures = list(futures)
        self._collect = collect
        self._result: DataProto | None = None
        self._lock = Lock()

    def get(self) -> DataProto:
        """Wait for all rows. An error in a part is raised here, and again at the next call."""
        with self._lock:
            if self._result is None:
                self._result = self._collect([future.get() for future in self._futures])
                self._futures = []  # the parts need not live on beside the whole
            return self._result

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """`chunks` futures for the pieces that `DataProto.chunk` will cut, without waiting."""
        if chunks < 1:
            raise BatchError(f"cannot cut a future into {chunks} pieces: at least 1 is needed")
        return [DataProtoFuture([self], partial(_piece, index, chunks)) for index in range(chunks)]

    @classmethod
    def concat(cls, parts: Sequence[PendingRows]) -> DataProtoFuture:
        """One future for the rows of all parts, in order, without waiting."""
        if not parts:
            raise BatchError("cannot concatenate: no futures were given")
        return cls(parts)


def _piece(index: int, chunks: int, parts: Sequence[DataProto]) -> DataProto:
    return parts[0].chunk(chunks)[index]
