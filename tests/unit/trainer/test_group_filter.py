"""Which groups dynamic sampling keeps, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridflow.episodes.filters import groups_to_keep, metric_values, rows_of, uids_of
from hybridflow.errors import ConfigError
from hybridflow.protocol import DataProto

NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"a": [1, 1], "b": [0, 1], "c": [0, 0]}, ["b"]),
        ({"b": [0.5, 0.5, 0.25], "a": [-1, 1]}, ["b", "a"]),  # in order of appearance
        ({"a": [1]}, []),  # alone in its group
        ({"a": [1, None, 0], "b": [1, NAN], "c": [None, NAN]}, ["a"]),  # rows without a value take no part
        ({}, []),
    ],
)
def test_groups_that_vary(values: dict[str, list[Any]], kept: list[str]) -> None:
    uids = [uid for uid, members in values.items() for _ in members]
    assert groups_to_keep(uids, [value for members in values.values() for value in members]) == kept


def test_rows_of_a_group_need_not_be_neighbours() -> None:
    assert groups_to_keep(["a", "b", "a", "b"], [1, 0, 1, 1]) == ["b"]


@pytest.mark.parametrize(
    ("low", "high", "kept"),
    [(None, None, "abc"), (0.2, 0.8, "ab"), (0.3, None, "bc"), (None, 0.2, "a"), (0.2, 0.2, "a")],
)
def test_means_have_to_lie_within_the_bounds(low: float | None, high: float | None, kept: str) -> None:
    values = [1, 0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0.9]  # means 0.2, 0.8, 0.98
    assert groups_to_keep(list("aaaaabbbbbccccc"), values, min_mean=low, max_mean=high) == list(kept)


def rows(**columns: Any) -> DataProto:
    scores = torch.tensor([[0.0, 1.5], [2.0, 0.0], [0.0, 0.0]])
    return DataProto.from_dict({"token_level_scores": scores}, {"uid": ["a", "a", "b"], **columns})


@pytest.mark.parametrize("name", ["score", "seq_reward", "seq_final_reward"])
def test_the_score_by_each_of_its_names(name: str) -> None:
    assert metric_values(rows(), name) == [1.5, 2.0, 0.0]


def test_a_key_of_the_reward_and_what_it_may_be() -> None:
    batch = rows(acc=[1.0, True, NAN], pred=["7", "8", "9"], share=[0.5, 0.5, 0.5])
    assert metric_values(batch, "acc")[:2] == [1.0, 1.0]
    for metric in ("pred", "accuracy"):
        with pytest.raises(
            ConfigError, match=rf"filter_groups\.metric={metric}: .*set it to score, or one of share"
        ):
            metric_values(batch, metric)


def test_answers_of_the_data_are_not_looked_at() -> None:
    batch = rows(acc=[0.0, 0.0, 1.0]) | DataProto.from_dict(
        {"is_demonstration": torch.tensor([False, False, True])}
    )
    assert metric_values(batch, "acc") == [0.0, 0.0, None] and metric_values(batch, "score") == [
        1.5,
        2.0,
        None,
    ]


def test_the_rows_of_groups() -> None:
    batch = rows(place=[0, 1, 2])
    assert uids_of(batch) == ["a", "b"]
    assert list(rows_of(batch, ["b"]).non_tensor_batch["place"]) == [2] and len(rows_of(batch, [])) == 0
