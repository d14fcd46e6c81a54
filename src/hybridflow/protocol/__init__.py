"""The data that flows between the controller and the workers, and how it is cut, packed and keyed."""

from __future__ import annotations

from hybridflow.protocol.balancing import Workload, deal_rows, karmarkar_karp, split_micro_batches
from hybridflow.protocol.columns import BatchError
from hybridflow.protocol.data_proto import DataProto, DataProtoItem
from hybridflow.protocol.fields import FIELDS, Field, field
from hybridflow.protocol.future import DataProtoFuture
from hybridflow.protocol.packing import PackedBatch, make_rows, pack
from hybridflow.protocol.padding import pad_to_divisor, unpad
from hybridflow.protocol.randomness import derive_seed, generator
from hybridflow.protocol.row_index import RowIndex

__all__ = [
    "FIELDS",
    "BatchError",
    "DataProto",
    "DataProtoFuture",
    "DataProtoItem",
    "Field",
    "PackedBatch",
    "RowIndex",
    "Workload",
    "deal_rows",
    "derive_seed",
    "field",
    "generator",
    "karmarkar_karp",
    "make_rows",
    "pack",
    "pad_to_divisor",
    "split_micro_batches",
    "unpad",
]
