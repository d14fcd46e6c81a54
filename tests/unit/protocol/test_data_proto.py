"""DataProto: rows stay together through every transform, and what does not fit is refused by name."""

from __future__ import annotations

import logging
from itertools import chain

import numpy as np
import pytest
import torch

from hybridflow import protocol
from hybridflow.protocol import BatchError, DataProto, DataProtoFuture, pad_to_divisor, unpad


def rows(n: int = 5, **meta: object) -> DataProto:
    """Row i has 10·i in `x`, [i] in `tags`, uid of its pair."""
    return DataProto.from_dict(
        {"x": torch.arange(n) * 10, "m": torch.ones(n, 3, dtype=torch.bool), "row_id": torch.arange(n)},
        {"uid": [f"g{i // 2}" for i in range(n)], "tags": [[i] for i in range(n)]},
        meta,
    )


def ids(data: DataProto) -> list[int]:
    """The rows in `data`, after checking that their fields still belong together."""
    found = data.batch["row_id"].tolist()
    assert data.batch["x"].tolist() == [10 * i for i in found]
    assert data.non_tensor_batch["uid"].tolist() == [f"g{i // 2}" for i in found]
    assert data.non_tensor_batch["tags"].tolist() == [[i] for i in found]
    assert len(data) == len(found)
    return found


def test_from_dict_keeps_equal_lists_as_a_column_of_lists() -> None:
    column = rows().non_tensor_batch["tags"]
    assert column.shape == (5,) and column.dtype == object and column[3] == [3]


def test_from_single_dict_splits_by_type() -> None:
    data = DataProto.from_single_dict({"a": torch.zeros(2), "b": ["p", "q"], "c": np.array([1.5, 2.5])})
    assert list(data.batch.keys()) == ["a"] and set(data.non_tensor_batch) == {"b", "c"} and len(data) == 2


def test_rows_that_do_not_match_are_refused_by_name() -> None:
    with pytest.raises(BatchError, match="'b' has 3 rows"):
        DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(BatchError, match="'u' has 1 rows"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"u": ["only"]})
    with pytest.raises(BatchError, match="'u' must be a sequence"):
        DataProto.from_dict({}, {"u": "text"})


def test_a_batch_of_only_objects_has_a_length() -> None:
    data = DataProto.from_dict(None, {"uid": ["a", "b", "c"]})
    assert len(data) == 3 and [len(part) for part in data.chunk(2)] == [2, 1]


@pytest.mark.parametrize(
    ("chunks", "sizes"), [(1, [5]), (2, [3, 2]), (3, [2, 2, 1]), (5, [1] * 5), (7, [1, 1, 1, 1, 1, 0, 0])]
)
def test_chunk_is_even_to_one_row_and_concat_undoes_it(chunks: int, sizes: list[int]) -> None:
    parts = rows().chunk(chunks)
    assert [len(part) for part in parts] == sizes
    assert all(part.batch["m"].shape == (len(part), 3) for part in parts)
    assert ids(DataProto.concat(parts)) == [0, 1, 2, 3, 4]


def test_split_leaves_the_rest_in_the_last_piece() -> None:
    assert [ids(part) for part in rows().split(2)] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (slice(1, 4, 2), [1, 3]),
        (slice(None, None, -1), [4, 3, 2, 1, 0]),
        ([4, -5, 4], [4, 0, 4]),
        (np.array([2, 1]), [2, 1]),
        (torch.tensor([True, False, False, False, True]), [0, 4]),
        ([False] * 5, []),
        ([], []),
    ],
)
def test_indexing_rows(item: object, expected: list[int]) -> None:
    assert ids(rows()[item]) == expected  # type: ignore[index]


def test_an_integer_gives_one_row() -> None:
    item = rows(kind="train")[-1]
    assert item["x"] == 40
    assert item["uid"] == "g2"
    assert item.meta_info == {"kind": "train"}
    assert "nope" not in item


@pytest.mark.parametrize("item", [5, [0, 5], [True, False], [[0, 1]], [0.5]])
def test_rows_that_do_not_exist_are_refused(item: object) -> None:
    with pytest.raises(BatchError):
        rows()[item]  # type: ignore[index]


def test_repeat_interleaved_and_not() -> None:
    assert ids(rows(2).repeat(3)) == [0, 0, 0, 1, 1, 1]
    assert ids(rows(2).repeat(2, interleave=False)) == [0, 1, 0, 1]


def test_reorder_changes_this_object_and_wants_a_permutation() -> None:
    data = rows()
    assert data.reorder([3, 1, 0, 2, 4]) is data and ids(data) == [3, 1, 0, 2, 4]
    with pytest.raises(BatchError, match="each of the 5 rows once"):
        data.reorder([0, 0, 1, 2, 3])


def test_select_pop_and_rename() -> None:
    data = rows(a=1, b=2)
    chosen = data.select(["x"], [], ["a"])
    assert set(chosen.batch.keys()) == {"x"} and not chosen.non_tensor_batch and chosen.meta_info == {"a": 1}
    popped = data.pop(["m"], ["tags"], ["b"])
    assert "m" in popped
    assert "tags" in popped
    assert "m" not in data
    assert "tags" not in data
    assert data.meta_info == {"a": 1}
    data.rename(["x", "uid"], ["y", "group"])
    assert data.batch["y"].tolist() == [0, 10, 20, 30, 40] and "group" in data and "x" not in data
    with pytest.raises(BatchError, match="already there"):
        data.rename("y", "row_id")
    with pytest.raises(BatchError, match=r"no tensor field 'nope'.*row_id"):
        data.select(["nope"])


def test_union_adds_fields_and_accepts_equal_ones_nan_included() -> None:
    data = DataProto.from_dict({"v": torch.tensor([1.0, float("nan")])}, {"s": [float("nan"), {"k": [1]}]})
    other = DataProto.from_dict(
        {"v": torch.tensor([1.0, float("nan")]), "w": torch.zeros(2)},
        {"s": [float("nan"), {"k": [1]}]},
        {"f": 1},
    )
    data |= other
    assert "w" in data and data.meta_info == {"f": 1}


def test_union_names_the_field_and_the_first_row_that_differ() -> None:
    data = rows()
    other = DataProto.from_dict({"x": torch.tensor([0, 10, 21, 30, 41])})
    with pytest.raises(BatchError, match=r"'x' .*row 2"):
        data |= other
    with pytest.raises(BatchError, match=r"'uid' .*row 1"):
        data.union(DataProto.from_dict({}, {"uid": ["g0", "?", "g1", "g1", "g2"]}))
    with pytest.raises(BatchError, match=r"meta_info\['k'\]"):
        rows(k=1).union(rows(k=2))
    with pytest.raises(BatchError, match="5 rows with one of 2"):
        data.union(rows(2))


def test_a_refused_union_leaves_the_batch_as_it_was() -> None:
    data = rows()
    with pytest.raises(BatchError):
        data.union(DataProto.from_dict({"new": torch.zeros(5), "x": torch.ones(5, dtype=torch.int64)}))
    assert "new" not in data


def test_or_leaves_both_sides_alone() -> None:
    left, right = rows(), DataProto.from_dict({"new": torch.zeros(5)})
    assert "new" in (left | right) and "new" not in left and "x" not in right


def test_union_into_an_empty_batch() -> None:
    assert ids(DataProto().union(rows())) == [0, 1, 2, 3, 4]


def test_meta_info_is_never_shared() -> None:
    data = rows(facts={"seen": [1]})
    results = [
        data[:2],
        data.select(),
        data[[0]],
        *data.chunk(2),
        data.to("cpu"),
        data.repeat(2),
        DataProto().union(data),
    ]
    results += [DataProto.concat([data]), DataProto.from_dict({}, {}, data.meta_info)]
    for result in results:
        result.meta_info["facts"]["seen"].append(2)
    assert data[0].meta_info["facts"]["seen"] == data.meta_info["facts"]["seen"] == [1]


def test_concat_refuses_what_differs_and_collects_metrics() -> None:
    joined = DataProto.concat([rows(2, metrics={"a": 1}, k=1), rows(2, metrics={"a": 2}, k=1)])
    assert joined.meta_info == {"metrics": [{"a": 1}, {"a": 2}], "k": 1}
    with pytest.raises(BatchError, match=r"meta_info\['k'\]"):
        DataProto.concat([rows(2, k=1), rows(2, k=2)])
    with pytest.raises(BatchError, match=r"parts 0 and 1 .*\['m'\]"):
        DataProto.concat([rows(2), rows(2).select(["x", "row_id"])])
    with pytest.raises(BatchError, match=r"field 'w'.*pad them"):
        DataProto.concat(
            [DataProto.from_dict({"w": torch.zeros(1, 2)}), DataProto.from_dict({"w": torch.zeros(1, 3)})]
        )
    with pytest.raises(BatchError, match="no parts"):
        DataProto.concat([])


def test_concat_passes_over_parts_without_rows() -> None:
    assert ids(DataProto.concat([DataProto(), rows(3), rows(3)[:0]])) == [0, 1, 2]


def test_make_iterator_covers_every_row_once_an_epoch_and_repeats_by_seed() -> None:
    first, again = ([ids(part) for part in rows().make_iterator(2, epochs=2, seed=7)] for _ in range(2))
    assert first == again and [len(part) for part in first] == [2, 2, 1] * 2
    epochs = [list(chain(*first[:3])), list(chain(*first[3:]))]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs) and epochs[0] != epochs[1]
    assert [ids(part) for part in rows().make_iterator(3)] == [[0, 1, 2], [3, 4]]


def test_fresh_row_ids_keep_the_first_of_each() -> None:
    data = rows(3)[[2, 0, 2, 2]]
    assert data.fresh_row_ids().batch["row_id"].tolist() == [2, 0, 3, 4]
    assert DataProto.from_dict({}, {"uid": ["a", "b"]}).fresh_row_ids().batch["row_id"].tolist() == [0, 1]


def test_narrow_loss_mask_only_narrows() -> None:
    response = torch.tensor([[True, True, False]])
    data = DataProto.from_dict({"response_mask": response})
    data.narrow_loss_mask(torch.tensor([[False, True, True]])).narrow_loss_mask(
        torch.tensor([[True, True, True]])
    )
    assert data.batch["loss_mask"].tolist() == [[False, True, False]]
    assert data.batch["response_mask"] is not data.batch["loss_mask"]
    assert response.tolist() == [[True, True, False]]
    with pytest.raises(BatchError, match="keep must be bool"):
        data.narrow_loss_mask(torch.ones(1, 3))


def test_padding_repeats_rows_that_teach_nothing_and_comes_off_again() -> None:
    data = rows(3)
    data.batch["response_mask"] = torch.ones(3, 2, dtype=torch.bool)
    padded, extra = pad_to_divisor(data, 8)
    assert extra == 5 and ids(padded) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert padded.batch["loss_mask"].any(dim=1).tolist() == [True] * 3 + [False] * 5
    assert ids(unpad(padded, extra)) == [0, 1, 2]
    assert pad_to_divisor(data, 3) == (data, 0) and pad_to_divisor(data[:0], 4)[1] == 0
    with pytest.raises(BatchError):
        unpad(data, 4)


class Pending:
    """A result that counts how often it is waited for."""

    def __init__(self, data: DataProto) -> None:
        self.data, self.waits = data, 0

    def get(self) -> DataProto:
        self.waits += 1
        return self.data


def test_futures_are_cut_and_joined_without_waiting() -> None:
    pending = [Pending(rows()[:2]), Pending(rows()[2:])]
    whole = DataProtoFuture.concat([DataProtoFuture([pending[0]]), DataProtoFuture([pending[1]])])
    parts = whole.chunk(2)
    assert [p.waits for p in pending] == [0, 0]
    assert [ids(part.get()) for part in parts] == [[0, 1, 2], [3, 4]] and ids(whole.get()) == [0, 1, 2, 3, 4]
    assert [p.waits for p in pending] == [1, 1]


def small() -> DataProto:
    tensors = {"x": torch.arange(12).reshape(3, 4), "response_mask": torch.ones(3, 4, dtype=torch.bool)}
    return DataProto.from_dict(tensors, {"uid": ["a", "b", {"c": 1}]}, {"step": 3, "list": [1, 2]})


def test_a_row_as_often_as_is_said_of_it() -> None:
    for times in ([2, 0, 1], (2, 0, 1), torch.tensor([2, 0, 1]), np.array([2, 0, 1])):
        found = small().sample_level_repeat(times)
        assert found.non_tensor_batch["uid"].tolist() == ["a", "a", {"c": 1}]
        assert found.batch["x"][:, 0].tolist() == [0, 0, 8] and found.meta_info["step"] == 3
    for wrong in ([1, 2], [1, -1, 1]):
        with pytest.raises(BatchError, match="wanted one number of 0 or more for each of the 3 rows"):
            small().sample_level_repeat(wrong)


def test_columns_unfold_into_rows() -> None:
    found = small().unfold_column_chunks(2, ["x"])
    assert found.batch["x"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert found.non_tensor_batch["uid"].tolist() == ["a", "a", "b", "b", {"c": 1}, {"c": 1}]
    assert found.batch["response_mask"].shape == (6, 4)
    for n_split, keys in ((3, ["x"]), (2, ["uid"]), (0, ["x"])):
        with pytest.raises(BatchError, match="cannot cut columns into"):
            small().unfold_column_chunks(n_split, keys)


@pytest.mark.parametrize("rows", [slice(None), slice(0, 0), slice(0, 1)])
def test_a_tensordict_and_back(rows: slice) -> None:
    data = small()[rows]
    dictionary = data.to_tensordict()
    assert dictionary.batch_size == torch.Size([len(data)])
    again = DataProto.from_tensordict(dictionary)
    assert len(again) == len(data) and again.meta_info == data.meta_info
    assert again.non_tensor_batch["uid"].tolist() == data.non_tensor_batch["uid"].tolist()
    assert torch.equal(again.batch["x"], data.batch["x"])
    with pytest.raises(BatchError, match=r"meta_info and the fields both have \['x'\]"):
        DataProto.from_dict({"x": torch.zeros(1)}, meta_info={"x": 1}).to_tensordict()


def test_added_rows_are_not_learned_from() -> None:
    data = small()
    assert not data.is_padding_enabled()
    data.padding(2)
    data.padding(1, "first")
    assert data.batch["x"][:, 0].tolist() == [0, 4, 8, 8, 8, 0]
    assert data.batch["loss_mask"].any(-1).tolist() == [True] * 3 + [False] * 3
    assert [len(piece) for piece in data.chunk(4)] == [2, 2, 1, 1], "no padding is needed to cut it"
    with pytest.raises(BatchError, match="cannot add 1 rows to 0"):
        small()[:0].padding(1)


def test_what_a_batch_holds_is_told(caplog: pytest.LogCaptureFixture) -> None:
    told = small().get_data_info().splitlines()
    assert "  x: (3, 4) (torch.int64) cpu" in told and "  uid: dict | str" in told and "  step: int" in told
    with caplog.at_level(logging.INFO, "hybridflow"):
        small().print_size("before")
    assert caplog.messages == ["before, 0.000000 GiB of tensors and 3 Python values"]


def test_arguments_of_verl_are_taken_or_refused_by_name() -> None:
    data = small()
    assert DataProto.from_dict({"x": torch.zeros(2, 1)}, auto_padding=True, num_batch_dims=1).names() == ["x"]
    with pytest.raises(BatchError, match="num_batch_dims=2: rows have one batch dim here"):
        DataProto.from_dict({"x": torch.zeros(2, 1)}, num_batch_dims=2)
    deep = data.select(deepcopy=True)
    deep.non_tensor_batch["uid"][2]["c"] = 9
    assert data.non_tensor_batch["uid"][2] == {"c": 1}
    in_order = [part.batch["x"][0, 0].item() for part in data.make_iterator(1, 1, 7, {"shuffle": False})]
    drawn = [part.batch["x"][0, 0].item() for part in data.make_iterator(1, 1, 7, {"shuffle": True})]
    assert in_order == [0, 4, 8]
    assert drawn == [part.batch["x"][0, 0].item() for part in data.make_iterator(1, 1, 7)]
    for asked in ({"shuffle": True}, {"num_workers": 2}):
        with pytest.raises(BatchError, match="there is shuffle alone"):
            list(data.make_iterator(1, dataloader_kwargs=asked))


@pytest.mark.parametrize("name", protocol.NOT_HERE)
def test_names_without_a_counterpart_say_what_to_use(name: str) -> None:
    with pytest.raises(ImportError, match=f"hybridflow.protocol has no {name}: "):
        exec(f"from hybridflow.protocol import {name}", {})
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = protocol.nothing
    assert protocol.pad_dataproto_to_divisor is protocol.pad_to_divisor
