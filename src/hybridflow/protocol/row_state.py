"""Rows as tensors and plain lists and dicts, which a checkpoint can keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.protocol.data_proto import DataProto
from hybridflow.protocol.prompt import MEDIA
from hybridflow.protocol.storage import media_of, plain_media


def state_of_rows(rows: DataProto) -> dict[str, Any]:
    """Return all fields of the rows; the tensors are shared."""
    columns = {name: list(column) for name, column in rows.non_tensor_batch.items()}
    state = {"tensors": dict(rows.batch.items()), "columns": columns, "meta": dict(rows.meta_info)}
    if MEDIA in columns:
        columns[MEDIA], state[MEDIA] = plain_media(columns[MEDIA])
    return state


def rows_of_state(state: Mapping[str, Any]) -> DataProto:
    """Return the rows from a result of `state_of_rows`."""
    columns = dict(state["columns"])
    if MEDIA in columns:
        columns[MEDIA] = media_of(columns[MEDIA], dict(state[MEDIA]))
    return DataProto.from_dict(state["tensors"], columns, state["meta"])
