"""The data that flows between the controller and the workers, and how it is cut, packed and keyed."""

from __future__ import annotations

from typing import Any

from hybridflow.protocol.balancing import Workload, deal_rows, karmarkar_karp, split_micro_batches
from hybridflow.protocol.columns import BatchError
from hybridflow.protocol.data_proto import (
    ONE_BATCH_DIM,
    DataProto,
    DataProtoFuture,
    DataProtoItem,
    pad_to_divisor,
    unpad,
)
from hybridflow.protocol.fields import FIELDS, Field, field
from hybridflow.protocol.packing import PackedBatch, make_rows, pack
from hybridflow.protocol.randomness import derive_seed, generator

pad_dataproto_to_divisor = pad_to_divisor
unpad_dataproto = unpad
"""verl's names of the two."""
NOT_HERE = {
    "fold_batch_dim": ONE_BATCH_DIM,
    "unfold_batch_dim": ONE_BATCH_DIM,
    "DataProtoConfig": "no rows have to be added: chunk cuts any number of them",
    "union_tensor_dict": "use DataProto.union, or |=",
    "union_numpy_dict": "use DataProto.union, or |=",
    "collate_fn": "use DataProto.select_idxs or DataProto.concat",
    "list_of_dict_to_dict_of_list": "use DataProto.from_single_dict",
    "all_gather_data_proto": "a worker returns its rows, and its group joins them (`hybridflow.controller`)",
}
"""Names of verl's protocol that have no counterpart, with what to use."""


def __getattr__(name: str) -> Any:
    """Raise ImportError for a name of verl's that is not here, with what to use in its place."""
    if name in NOT_HERE:
        raise ImportError(f"hybridflow.protocol has no {name}: {NOT_HERE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "FIELDS",
    "BatchError",
    "DataProto",
    "DataProtoFuture",
    "DataProtoItem",
    "Field",
    "PackedBatch",
    "Workload",
    "deal_rows",
    "derive_seed",
    "field",
    "generator",
    "karmarkar_karp",
    "make_rows",
    "pack",
    "pad_dataproto_to_divisor",
    "pad_to_divisor",
    "split_micro_batches",
    "unpad",
    "unpad_dataproto",
]
