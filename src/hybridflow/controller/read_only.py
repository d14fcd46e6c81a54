"""Isolation of driver and workers in one process, as between two processes, without copies of tensors.

`isolate` gives the other side containers of its own around the same tensors, so that adding, removing or
replacing a field has no effect elsewhere. `TensorVersions` detects tensors that were written in place, by
PyTorch's version counter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from hybridflow.protocol import DataProto


def isolate(value: Any) -> Any:
    """Return the same value in new containers (DataProto, dict, list, tuple, object columns) that share the
    tensors.
    """
    if isinstance(value, DataProto):
        columns = {name: isolate(column) for name, column in value.non_tensor_batch.items()}
        return DataProto(value.batch.clone(recurse=False), columns, value.meta_info, value.remote)
    if type(value) is dict:
        return {key: isolate(entry) for key, entry in value.items()}
    if type(value) is list:
        return [isolate(entry) for entry in value]
    if type(value) is tuple:
        return tuple(isolate(entry) for entry in value)
    if isinstance(value, np.ndarray):
        copy = value.copy()
        if copy.dtype == object:
            copy[...] = np.frompyfunc(isolate, 1, 1)(value)
        return copy
    return value


class TensorVersions:
    """The version counters of all tensors inside a value, to find out later which were written."""

    def __init__(self, value: Any) -> None:
        self._seen = [
            (name, tensor, tensor._version)
            for name, tensor in _tensors(value, "")
            if not tensor.is_inference()
        ]

    def changed(self) -> list[str]:
        """Return the names of the tensors that were written since."""
        return [name for name, tensor, version in self._seen if tensor._version != version]


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, DataProto):
        for key, tensor in value.batch.items():
            if isinstance(tensor, Tensor):
                yield str(key), tensor
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _tensors(entry, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from _tensors(entry, f"{name}[{index}]")
