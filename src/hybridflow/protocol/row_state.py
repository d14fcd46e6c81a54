"""Rows as tensors and plain lists and dicts, which a checkpoint can keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.protocol.data_proto import DataProto


def state_of_rows(rows: DataProto) -> dict[str, Any]:
    """Return all fields of the rows; the tensors are shared."""
    columns = {name: list(column) for name, column in rows.non_tensor_batch.items()}
    return {"tensors": dict(rows.batch.items()), "columns": columns, "meta": dict(rows.meta_info)}


def rows_of_state(state: Mapping[str, Any]) -> DataProto:
    """Return the rows of which `state_of_rows` was taken."""
    return DataProto.from_dict(state["tensors"], state["columns"], state["meta"])
