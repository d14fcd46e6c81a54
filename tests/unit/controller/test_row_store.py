"""What a row store owes its readers, in memory and on Ray's object store.

`ray/test_ray_backend.py` runs these tests too: `store` is the only thing that they know.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator

import pytest
import torch

from hybridflow.controller.future import Part
from hybridflow.controller.row_store import RowStore, in_memory
from hybridflow.controller.stored_rows import StoredRows
from hybridflow.errors import WorkerLost
from hybridflow.protocol import BatchError, DataProto


@pytest.fixture
def store() -> Iterator[RowStore]:
    yield RowStore(in_memory)


def columns(first: int, count: int, width: int = 3) -> DataProto:
    """values [count, width] and uid of the rows from `first` on; each entry says its row."""
    values = torch.arange(first, first + count)[:, None] + torch.arange(width) / 10
    return DataProto.from_dict({"values": values}, {"uid": [f"u{first + row}" for row in range(count)]})


def test_rows_come_in_the_order_asked_for_from_any_shards(store: RowStore) -> None:
    store.put([10, 11, 12], columns(10, 3))
    store.put([20, 21], columns(20, 2))
    got = store.get([21, 10, 12, 20, 10], ["uid", "values"])
    assert got.batch["values"][:, 0].tolist() == [21.0, 10.0, 12.0, 20.0, 10.0]
    assert list(got.non_tensor_batch["uid"]) == ["u21", "u10", "u12", "u20", "u10"]
    assert store.get([11], ["values"]).names() == ["values"]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float32])
def test_values_are_the_same_to_the_bit(store: RowStore, dtype: torch.dtype) -> None:
    whole = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    store.put(range(7), DataProto.from_dict({"values": whole}))
    order = [6, 0, 3, 3, 1]
    assert torch.equal(store.get(order, ["values"]).batch["values"], whole[order])
    assert torch.equal(store.get(range(7), ["values"]).batch["values"], whole)


def test_columns_of_a_row_add_up_and_a_second_put_replaces(store: RowStore) -> None:
    store.put([1, 2], columns(1, 2))
    store.put([2, 3], DataProto.from_dict({"returns": torch.tensor([2.0, 3.0])}))
    assert dict(store.list()) == {1: {"uid", "values"}, 2: {"uid", "values", "returns"}, 3: {"returns"}}
    store.put([2], columns(7, 1))
    assert store.get([1, 2], ["values"]).batch["values"][:, 0].tolist() == [1.0, 7.0]


def test_what_is_cleared_is_gone(store: RowStore) -> None:
    store.put([1, 2], columns(1, 2))
    store.clear([1])
    assert set(store.list()) == {2} and store.get([2], ["uid"]).non_tensor_batch["uid"][0] == "u2"
    store.clear()
    assert not store.list()


def test_rows_may_outlive_what_is_cleared(store: RowStore) -> None:
    store.put([1, 2, 3], columns(1, 3))
    store.put([3, 4], DataProto.from_dict({"returns": torch.tensor([3.0, 4.0])}))
    store.keep_only([2, 3, 9], ["values"])
    assert dict(store.list()) == {2: {"values"}, 3: {"values"}}
    store.put([5], columns(5, 1))
    assert store.get([5, 2, 3], ["values"]).batch["values"][:, 0].tolist() == [5.0, 2.0, 3.0]
    store.keep_only([], ["values"])
    assert not store.list()


def test_a_row_or_a_column_that_is_not_there_is_named(store: RowStore) -> None:
    store.put([1, 2], columns(1, 2))
    with pytest.raises(BatchError, match="row 5 has no column 'uid'"):
        store.get([1, 5], ["uid"])
    with pytest.raises(BatchError, match="row 1 has no column 'returns'"):
        store.get([1], ["uid", "returns"])


def test_each_row_has_one_id(store: RowStore) -> None:
    with pytest.raises(BatchError, match="2 rows cannot be stored under 1 different ids"):
        store.put([1], columns(1, 2))
    with pytest.raises(BatchError, match="2 rows cannot be stored under 1 different ids"):
        store.put([1, 1], columns(1, 2))


def test_rows_that_are_not_finished_or_lost_are_not_listed(store: RowStore) -> None:
    running: Part = concurrent.futures.Future()
    lost: Part = concurrent.futures.Future()
    store.put([1], columns(1, 1))
    store.keep([2], columns(2, 1).names(), running)
    store.keep([3], columns(3, 1).names(), lost)
    assert set(store.list()) == {1}
    running.set_result(columns(2, 1))
    lost.set_exception(WorkerLost("the process died", role="critic", rank=0, method="values"))
    assert set(store.list()) == {1, 2}
    with pytest.raises(WorkerLost):
        store.get([1, 3], ["values"])
    with pytest.raises(BatchError, match="row 3 has no column"):
        store.get([3], ["values"])
    assert store.get([2], ["values"]).batch["values"][0, 0] == 2.0


def test_a_batch_goes_by_reference_as_far_as_it_is_stored(store: RowStore) -> None:
    batch = columns(1, 3) | DataProto.from_dict({"row_id": torch.tensor([1, 2, 3])}, {"word": [*"abc"]})
    assert store.by_reference(batch) is batch
    store.put([1, 2, 3], columns(1, 3))
    store.put([1, 2], DataProto.from_dict({}, {"word": ["a", "b"]}))
    sent = store.by_reference(batch.select_idxs([2, 0]))
    assert isinstance(sent, StoredRows)
    assert sent.values.names() == ["row_id", "word"], "a column that is stored for some rows only is sent"
    arrived = StoredRows(sent.values, sent.places, tuple(part.result() for part in sent.shards)).gather()
    assert arrived.batch["values"][:, 0].tolist() == [3.0, 1.0]
    assert list(arrived.non_tensor_batch["uid"]) == ["u3", "u1"]
    batch.batch["row_id"] += 10
    assert store.by_reference(batch) is batch, "rows of other ids are not in the store"
    empty = batch.select_idxs([])
    assert store.by_reference(empty) is empty


def test_a_stored_column_does_not_change(store: RowStore) -> None:
    values = columns(1, 2)
    store.put([1, 2], values)
    values.batch["values"][0, 0] = 9.0
    with pytest.raises(AssertionError, match="values was written in place, and the row store has it"):
        store.by_reference(values | DataProto.from_dict({"row_id": torch.tensor([1, 2])}))


def test_the_rows_of_a_whole_shard_are_its_own_tensors() -> None:
    store = RowStore(in_memory)
    batch = columns(0, 4)
    store.put(range(4), batch)
    assert store.get(range(4), ["values"]).batch["values"] is batch.batch["values"]


def test_a_column_may_have_a_second_name(store: RowStore) -> None:
    """It costs nothing, and ends with its rows; a column that is stored under the name later replaces it."""
    store.put([1, 2, 3], columns(1, 3))
    batch = DataProto.from_dict({"row_id": torch.tensor([3, 1])})
    store.alias(batch, "returns", "values")
    store.alias(batch, "advantages", "nowhere")
    assert store.names(batch) == {"values", "uid", "returns"}
    got = store.get([1, 3], ["returns", "values"])
    assert torch.equal(got.batch["returns"], got.batch["values"]) and got.batch["values"][1, 0] == 3.0
    sent = store.by_reference(batch, ["returns"])
    assert isinstance(sent, StoredRows) and sent.values.names() == ["row_id"]
    store.put([3], DataProto.from_dict({"returns": torch.full((1, 3), 9.0)}))
    assert store.get([3, 1], ["returns"]).batch["returns"][:, 0].tolist() == [9.0, 1.0]
    store.clear([1])
    with pytest.raises(BatchError, match="row 1 has no column 'returns'"):
        store.get([1], ["returns"])


def test_rows_that_are_cleared_are_no_longer_watched(store: RowStore) -> None:
    first, second = columns(1, 2), columns(3, 2)
    store.put([1, 2], first)
    store.put([3, 4], second)
    store.clear([1, 2])
    first.batch["values"] += 1.0
    batch = DataProto.from_dict({"row_id": torch.tensor([3, 4])})
    store.by_reference(batch)
    second.batch["values"] += 1.0
    with pytest.raises(AssertionError, match="values was written in place"):
        store.by_reference(batch)
