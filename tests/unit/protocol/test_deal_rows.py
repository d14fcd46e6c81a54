"""Dealing rows to ranks by what they cost, and the balance that caps of micro-batches leave."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.errors import ConfigError
from hybridflow.protocol import Workload, deal_rows, split_micro_batches
from hybridflow.protocol.balancing import LARGEST_DIFFERENCING, deal_in_order
from hybridflow.protocol.randomness import generator

CAP = 16_384


def log_normal(n: int, longest: int = 8_192) -> list[int]:
    """Lengths as they are in life: median 1,000 tokens, a long tail, cut at `longest`."""
    drawn = torch.randn(n, generator=generator(0, "lengths")).mul(0.8).add(6.9).exp()
    return drawn.clamp(8, longest).to(torch.int64).tolist()


def over_mean(parts: list[list[int]], lengths: list[int], workload: Workload) -> float:
    """Load of the heaviest part over the mean load."""
    loads = [sum(workload.cost(lengths[row]) for row in part) for part in parts]
    return max(loads) * len(loads) / sum(loads)


@pytest.mark.parametrize("workload", [Workload(), Workload(1.0, 1e-4)], ids=["tokens", "with attention"])
def test_4096_rows_over_8_ranks(workload: Workload) -> None:
    lengths = log_normal(4_096)
    began = time.thread_time()
    parts = deal_rows(lengths, 8, workload)
    seconds = time.thread_time() - began
    assert sorted(itertools.chain(*parts)) == list(range(4_096))
    assert over_mean(parts, lengths, workload) < 1.02
    assert seconds < 1.0  # CPU time, usually 0.06 s
    assert over_mean(deal_in_order(4_096, 8), lengths, workload) > 1.02, (
        "rows of these lengths are not balanced by themselves"
    )
    for part in parts:
        held = [lengths[row] for row in part]
        micro_batches = split_micro_batches(held, max_tokens=CAP)
        assert sorted(itertools.chain(*micro_batches)) == list(range(len(held)))
        assert all(sum(held[row] for row in rows) <= CAP for rows in micro_batches)


def test_groups_of_responses_over_8_ranks() -> None:
    lengths, groups = log_normal(4_096), [row // 8 for row in range(4_096)]
    workload = Workload(1.0, 1e-4)
    parts = deal_rows(lengths, 8, workload, groups)
    assert over_mean(parts, lengths, workload) < 1.02
    held = [{groups[row] for row in part} for part in parts]
    assert sum(map(len, held)) == len(set.union(*held)) == 512


def test_many_rows_over_many_ranks_take_seconds_at_most() -> None:
    lengths = log_normal(65_536)
    assert len(lengths) * 1_024 > LARGEST_DIFFERENCING
    began = time.thread_time()
    parts = deal_rows(lengths, 1_024, Workload(1.0, 1e-4))
    assert time.thread_time() - began < 10.0  # CPU time, usually 0.3 s
    assert len(parts) == 1_024 and over_mean(parts, lengths, Workload(1.0, 1e-4)) < 1.02


def test_the_quadratic_term_counts() -> None:
    assert deal_rows([4, 2, 2, 2, 2], 2, Workload(0.0, 1.0)) == [[0], [1, 2, 3, 4]]
    assert Workload(2.0, 3.0).cost(10) == 320.0


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 5)), max_size=25), st.integers(1, 6))
def test_every_row_once_and_groups_whole(rows: list[tuple[int, int]], parts: int) -> None:
    lengths, groups = [length for length, _ in rows], [group for _, group in rows]
    for sharded in (deal_rows(lengths, parts, Workload(), groups), deal_in_order(len(rows), parts, groups)):
        assert len(sharded) == parts and sorted(itertools.chain(*sharded)) == list(range(len(rows)))
        assert all(part == sorted(part) for part in sharded)
        held = [{groups[row] for row in part} for part in sharded]
        assert sum(map(len, held)) == len(set(groups))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 30), st.integers(1, 8))
def test_in_order_sizes_differ_by_at_most_one(num_rows: int, parts: int) -> None:
    sharded = deal_in_order(num_rows, parts)
    assert list(itertools.chain(*sharded)) == list(range(num_rows))
    sizes = [len(part) for part in sharded]
    assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1


def test_in_order_groups_go_where_their_middle_falls() -> None:
    assert deal_in_order(6, 2, [0, 0, 0, 0, 1, 1]) == [[0, 1, 2, 3], [4, 5]]
    assert deal_in_order(6, 3, [0, 1, 1, 1, 1, 2]) == [[0], [1, 2, 3, 4], [5]]
    with pytest.raises(ConfigError, match="into 0 parts"):
        deal_in_order(3, 0)
