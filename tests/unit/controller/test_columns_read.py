"""Only the columns that a method declares travel to it, and only those it declares come back."""

from __future__ import annotations

import pytest
import torch

from hybridflow.controller import Dispatch, LocalBackend, Worker, WorkerGroup, register
from hybridflow.protocol import BatchError, DataProto


class Reader(Worker):
    """Methods that keep to what they declare, and others that do not."""

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=("responses", "uid"), writes=("values", "returns")
    )
    def names(self, batch: DataProto) -> DataProto:
        self.got = sorted([*map(str, batch.batch.keys()), *batch.non_tensor_batch])
        return DataProto.from_dict({"values": batch.batch["responses"].float()})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=("responses",))
    def reads_more(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"values": batch.batch["advantages"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=("responses",), writes=("values",))
    def writes_more(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"returns": batch.batch["responses"]})


def group(**settings: object) -> tuple[WorkerGroup[Reader], Reader]:
    worker = Reader()
    backend = LocalBackend(lambda host: {"reader": lambda info: worker})
    return WorkerGroup(backend, "reader", **settings), worker  # type: ignore[arg-type]


def rows() -> DataProto:
    tensors = {name: torch.ones(2, 3) for name in ("responses", "advantages", "ref_log_prob")}
    return DataProto.from_dict(tensors, {"uid": ["a", "b"], "extra_info": [{}, {}]})


def test_other_columns_stay_behind() -> None:
    readers, worker = group()
    batch = rows()
    result = readers.call(Reader.names, batch)
    assert worker.got == ["responses", "uid"]
    assert set(result.batch.keys()) == {"values"}, "a method may write some of its columns"
    readers.submit(Reader.names, batch).result()
    assert worker.got == ["responses", "uid"] and "extra_info" in batch


def test_a_run_reads_more_columns_where_the_batch_has_them() -> None:
    readers, worker = group(also_read={Reader.names: ["ref_log_prob", "positive"]})
    readers.call(Reader.names, rows())
    assert worker.got == ["ref_log_prob", "responses", "uid"]


def test_a_method_that_reads_a_column_it_did_not_declare_fails() -> None:
    with pytest.raises(KeyError, match="advantages"):
        group()[0].call(Reader.reads_more, rows())


def test_a_method_that_writes_a_column_it_did_not_declare_fails() -> None:
    with pytest.raises(AssertionError, match=r"'returns'.*registered to write: values"):
        group()[0].call(Reader.writes_more, rows())


def test_a_declared_column_that_the_batch_lacks_is_named() -> None:
    with pytest.raises(BatchError, match="no tensor field 'responses'"):
        group()[0].call(Reader.names, rows().select(["advantages"]))
