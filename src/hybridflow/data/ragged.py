"""Lists of token ids in four bytes a token, in which datasets keep the rows that they tokenised."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class RaggedInts:
    """An append-only list of lists of int32, stored flat with offsets."""

    def __init__(self) -> None:
        self._values = array("i")
        self._offsets = array("q", [0])

    def append(self, values: Sequence[int]) -> None:
        """Add one list."""
        self._values.extend(values)
        self._offsets.append(len(self._values))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> list[int]:
        if not 0 <= index < len(self):
            raise IndexError(f"list {index} of {len(self)}")
        return self._values[self._offsets[index] : self._offsets[index + 1]].tolist()

    def content(self) -> bytes:
        """Return bytes that are equal for equal lists, for a digest."""
        return self._offsets.tobytes() + self._values.tobytes()
