"""Extra rows so that the number of rows divides, and their removal.

Extra rows have an empty `loss_mask`, so nothing is learned from them.
"""

from __future__ import annotations

from hybridflow.protocol.columns import BatchError
from hybridflow.protocol.data_proto import DataProto


def pad_to_divisor(data: DataProto, n: int) -> tuple[DataProto, int]:
    """Repeat the first rows at the end until the number of rows divides by n; returns the batch and how many
    were added.

    Where there is a `loss_mask` or `response_mask`, the added rows have a `loss_mask` of zeros. An empty
    batch stays empty.
    """
    if n < 1:
        raise BatchError(f"cannot pad {len(data)} rows to a multiple of {n}")
    pad_size = -len(data) % n
    if pad_size == 0:
        return data, 0
    return data.with_extra_rows([row % len(data) for row in range(pad_size)]), pad_size


def unpad(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last `pad_size` rows."""
    if not 0 <= pad_size <= len(data):
        raise BatchError(f"cannot drop {pad_size} of {len(data)} rows")
    return data.slice(0, len(data) - pad_size) if pad_size else data
