"""The rows of a batch without their columns: what the driver looks at when it deals them to ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.protocol.data_proto import DataProto


@dataclass(frozen=True)
class RowIndex:
    """The rows of a call. Each list has one entry a row, or is None where no batch of the call says it."""

    num_rows: int
    row_id: list[int] | None
    """The number of the row itself, which stays with it."""
    group: list[int] | None
    """The number of the row's group, where rows of a group stay on one rank."""
    num_tokens: list[int] | None
    """Tokens of prompt and response together."""

    @classmethod
    def of(cls, batches: Sequence[DataProto]) -> RowIndex:
        """Return the index of batches whose rows are the same; each fact is from the first batch that has it.

        Raises AssertionError for batches of different lengths.
        """
        sizes = sorted({len(batch) for batch in batches})
        assert len(sizes) == 1, (
            f"the DataProto arguments of one call are dealt together, but they have {sizes} rows"
        )
        lists: dict[str, list[int]] = {}
        for batch in reversed(batches):
            for name in ("row_id", "group_ids"):
                if name in batch:
                    lists[name] = batch.batch[name].tolist()
            if "attention_mask" in batch:
                lists["num_tokens"] = batch.batch["attention_mask"].sum(-1).tolist()
        return cls(sizes[0], lists.get("row_id"), lists.get("group_ids"), lists.get("num_tokens"))
