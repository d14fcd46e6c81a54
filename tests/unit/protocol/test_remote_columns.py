"""Columns that are elsewhere go with their rows, and come back to the bit."""

from __future__ import annotations

import concurrent.futures
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.protocol import BatchError, DataProto
from hybridflow.protocol.joining import join_rows
from hybridflow.protocol.remote import RemoteColumn


def shard(columns: DataProto) -> concurrent.futures.Future[DataProto]:
    part: concurrent.futures.Future[DataProto] = concurrent.futures.Future()
    part.set_result(columns)
    return part


def remote(columns: DataProto, *names: str) -> DataProto:
    """The same rows, with these columns elsewhere."""
    part = shard(columns)
    kept = DataProto(remote={name: RemoteColumn.in_shard(part, name, range(len(columns))) for name in names})
    rest = columns.select()
    tensors = [name for name in names if name in rest.batch]
    rest.pop(tensors, [name for name in names if name not in tensors])
    return rest | kept


def columns(first: int, count: int) -> DataProto:
    """values [count, 3], number and uid of the rows from `first` on; each entry says its row."""
    values = torch.arange(first, first + count)[:, None] + torch.arange(3) / 10
    tensors = {"values": values, "number": torch.arange(first, first + count)}
    return DataProto.from_dict(tensors, {"uid": [f"u{first + row}" for row in range(count)]})


def same(got: DataProto, wanted: DataProto) -> None:
    assert sorted(got.names()) == sorted(wanted.names()) and not got.remote
    assert got.select() | wanted.select() is not None  # the union refuses columns that differ


def test_rows_of_any_shards_are_chosen_joined_and_ordered() -> None:
    here = DataProto.concat([columns(10, 3), columns(20, 2)])
    away = DataProto.concat(
        [remote(columns(10, 3), "values", "uid"), remote(columns(20, 2), "values", "uid")]
    )
    assert away.names() == ["number"] and away.has("values") and away.has("uid") and not away.has("returns")
    same(away.materialized(), here)
    for rows in ([4, 0, 2, 4, 0], [3], [], [True, False, False, True, False]):
        same(away.select_idxs(rows).materialized(), here.select_idxs(rows))
    same(away.slice(1, 4).materialized(), here.slice(1, 4))
    same(away.chunk(2)[1].repeat(2).materialized(), here.chunk(2)[1].repeat(2))
    same(away.select().reorder([4, 3, 2, 1, 0]).materialized(), here.select().reorder([4, 3, 2, 1, 0]))
    one = away.select_idxs([4, 3]).remote["values"]
    assert len(one.shards) == 1, "a shard without rows is let go"


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float32])
def test_values_are_the_same_to_the_bit(dtype: torch.dtype) -> None:
    whole = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    away = remote(DataProto.from_dict({"values": whole}), "values")
    assert away.materialized().batch["values"] is whole, "all rows of a shard are its own tensor"
    assert torch.equal(away.select_idxs([6, 0, 3]).materialized().batch["values"], whole[[6, 0, 3]])
    none = away.select_idxs([]).materialized().batch["values"]
    assert none.shape == (0, 5) and none.dtype == dtype


def test_columns_are_added_selected_renamed_and_taken_out() -> None:
    away = remote(columns(1, 2), "values")
    both = away | columns(1, 2).select(["values"], [])
    assert both.by_reference().names() == ["number", "uid"] and both.by_reference().has("values")
    second = away.select(["values"], []).rename("values", "returns")
    assert not second.has("values")
    away |= second
    found = away.materialized()
    assert torch.equal(found.batch["returns"], found.batch["values"])
    away.pop(["values"])
    assert not away.has("values") and away.has("returns")
    with pytest.raises(BatchError, match="no tensor field 'values'"):
        away.select(["values"])


def test_rows_of_which_some_are_nowhere_travel_by_value() -> None:
    some = DataProto.concat([remote(columns(1, 2), "values") | columns(1, 2), columns(3, 1)])
    assert not some.remote["values"].is_complete and not some.by_reference().remote
    assert some.select_idxs([1, 0]).by_reference().names() == ["number", "uid"]


def test_a_column_is_read_with_the_widths_of_its_batch() -> None:
    def group(prompt: int, response: int) -> DataProto:
        width = prompt + response
        ids = torch.arange(2 * width).reshape(2, width)
        mask = torch.ones(2, width, dtype=torch.bool)
        return DataProto.from_dict(
            {"input_ids": ids, "attention_mask": mask, "response_mask": mask[:, prompt:]}
        )

    def collected(prompt: int, response: int) -> DataProto:
        rows = group(prompt, response)
        part = shard(join_rows([rows, group(5, 5)], 9))  # of wider rows, too
        column = replace(RemoteColumn.in_shard(part, "input_ids", [0, 1]), fit=(prompt, response, 9))
        return rows.select(["attention_mask", "response_mask"]) | DataProto(remote={"input_ids": column})

    same(collected(2, 3).materialized(), group(2, 3))
    away = join_rows([collected(2, 3), collected(4, 1)], 9)
    here = join_rows([group(2, 3), group(4, 1)], 9)
    same(away.materialized(), here)
    same(away.select_idxs([3, 0]).materialized(), here.select_idxs([3, 0]))


def test_a_copy_that_was_written_in_place_is_not_sent() -> None:
    rows = columns(1, 2)
    part: Any = shard(rows)
    column = RemoteColumn.of_shards([part], "values", [[0, 1]], rows.batch["values"])
    assert column.moved({id(part): rows}).shards == (rows,)
    rows.batch["values"][0, 0] = 9.0
    with pytest.raises(AssertionError, match="values was written in place"):
        column[[1]].moved({id(part): rows})


def test_a_batch_is_saved_with_all_columns(tmp_path: Path) -> None:
    remote(columns(1, 3), "values", "uid").save_to_disk(tmp_path)
    same(DataProto.load_from_disk(tmp_path), columns(1, 3))
