"""Dealing rows under hard caps, and the keys of random draws."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.errors import ConfigError
from hybridflow.protocol import derive_seed, generator, karmarkar_karp, split_micro_batches
from hybridflow.protocol.balancing import Workload, deal_rows, even_in_groups


def test_the_token_cap_is_hard() -> None:
    assert split_micro_batches([60, 60, 60], max_tokens=100, max_rows=None) == [[0], [1], [2]]
    assert split_micro_batches([50, 60, 50, 40], max_tokens=100, max_rows=None) == [[0, 2], [1, 3]]


def test_the_row_cap_is_hard() -> None:
    assert [len(rows) for rows in split_micro_batches([1] * 5, max_tokens=100, max_rows=2)] == [2, 2, 1]
    # a bin in the middle is full by rows while an earlier one is not
    assert split_micro_batches([90, 30, 30, 30], max_tokens=100, max_rows=2) == [[0], [1, 3], [2]]


def test_bins_are_evened_out() -> None:
    bins = split_micro_batches([40, 10, 10, 40, 10, 10], max_tokens=100, max_rows=None)
    assert sorted(sum([40, 10, 10, 40, 10, 10][row] for row in rows) for rows in bins) == [60, 60]


def test_a_row_above_the_cap_names_both() -> None:
    with pytest.raises(ConfigError, match="row 1 has 101 tokens but a micro-batch may hold 100"):
        split_micro_batches([5, 101], max_tokens=100, max_rows=None)
    with pytest.raises(ConfigError):
        split_micro_batches([5], max_tokens=100, max_rows=0)


def test_nothing_to_split() -> None:
    assert split_micro_batches([], max_tokens=10, max_rows=None) == []


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 50), max_size=25), st.integers(50, 120), st.one_of(st.none(), st.integers(1, 6))
)
def test_every_row_once_and_never_above_a_cap(
    lengths: list[int], max_tokens: int, max_rows: int | None
) -> None:
    bins = split_micro_batches(lengths, max_tokens=max_tokens, max_rows=max_rows)
    assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
    assert all(rows == sorted(rows) and rows for rows in bins) and bins == sorted(bins)
    assert all(sum(lengths[row] for row in rows) <= max_tokens for rows in bins)
    assert all(max_rows is None or len(rows) <= max_rows for rows in bins)
    if max_rows is None:  # first fit leaves at most one bin half empty
        assert len(bins) <= 2 * sum(lengths) / max_tokens + 1


def test_karmarkar_karp_known_cases() -> None:
    assert karmarkar_karp([8, 7, 6, 5, 4], 2) == [[0, 2], [1, 3, 4]]
    assert karmarkar_karp([5], 3) == [[0], [], []]
    assert karmarkar_karp([], 2) == [[], []]
    with pytest.raises(ConfigError):
        karmarkar_karp([1], 0)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(1, 5))
def test_karmarkar_karp_deals_every_row_and_differs_by_at_most_the_largest(
    weights: list[int], k: int
) -> None:
    parts = karmarkar_karp(weights, k)
    assert len(parts) == k and sorted(itertools.chain(*parts)) == list(range(len(weights)))
    sums = [sum(weights[row] for row in part) for part in parts]
    assert max(sums) - min(sums) <= max(weights)
    assert karmarkar_karp(weights, k) == parts


def test_whole_groups_leave_ranks_about_even_where_it_says_so() -> None:
    for groups in range(1, 40):
        for parts in range(1, 9):
            sharded = deal_rows([10] * 3 * groups, parts, Workload(), [row // 3 for row in range(3 * groups)])
            heaviest = max(map(len, sharded)) / (3 * groups / parts)
            assert heaviest <= 1.25 if even_in_groups(groups, parts) else groups < 4 * parts
    assert not even_in_groups(9, 8) and even_in_groups(16, 8)


def test_seeds_are_fixed_for_ever_and_differ_by_every_part_of_the_key() -> None:
    assert derive_seed(1, "a", 2) == 235641625469331391  # a change of this number would change every run
    keys = [
        (1, "a", 2),
        (2, "a", 2),
        (1, "b", 2),
        (1, "a", 3),
        (1, "a"),
        (1, "a", 2, 0),
        (1, "a2"),
        (12, "a"),
    ]
    seeds = [derive_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys) and all(0 <= seed < 2**63 for seed in seeds)


def test_generators_with_one_key_agree() -> None:
    draws = [torch.rand(4, generator=generator(3, "x", 1)) for _ in range(2)]
    assert torch.equal(*draws) and not torch.equal(draws[0], torch.rand(4, generator=generator(3, "x", 2)))
