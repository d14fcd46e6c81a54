"""Kept prefixes: what is found is the longest there is, what is kept stays within its bounds."""

from __future__ import annotations

import random
from time import process_time

import pytest
import torch

from hybridflow.models.kv_cache import SlotCopy
from hybridflow.rollout.native.prefixes import LEAST, Prefix, PrefixStore, common_length

NOTHING = SlotCopy({}, {})
STATE = torch.zeros(1, 4)


def store_of(*rows: tuple[int, ...], **options: int) -> PrefixStore:
    store = PrefixStore(reuse=True, **options)
    for row in rows:
        store.keep(row, NOTHING)
    return store


def kept_of(store: PrefixStore) -> set[tuple[int, ...]]:
    return set(store._kept)


def check(store: PrefixStore) -> None:
    """The lists by blocks hold what is kept, and nothing else."""
    assert store.num_tokens == sum(map(len, store._kept))
    assert {kept.tokens for listed in store._by_blocks.values() for kept in listed} == {
        row for row in store._kept if len(row) >= LEAST
    }
    assert min(store._ends.values(), default=0) >= 0
    assert store._ends.total() == len(store._kept)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_found_is_the_longest_of_all(seed: int) -> None:
    draw = random.Random(seed)
    trunk = tuple(draw.randrange(3) for _ in range(200))

    def branch() -> tuple[int, ...]:
        return trunk[: draw.randrange(150)] + tuple(
            draw.randrange(3, 9) for _ in range(draw.randrange(1, 40))
        )

    store, rows = PrefixStore(reuse=True), [branch() for _ in range(60)]
    for row in rows:
        store.keep(row, NOTHING)
        check(store)
        prompt = branch()
        longest = max(min(common_length(prompt, other), len(prompt) - 1) for other in kept_of(store))
        found = store.find(prompt, {})
        if found is None:
            assert longest < LEAST
        else:
            assert found.length == longest and found.kept is not None
            assert found.kept.tokens[:longest] == prompt[:longest]
    store.shrink(500)
    check(store)
    assert store.num_tokens <= 500
    store.clear()
    check(store)


def test_a_beginning_of_what_is_kept_goes_unless_it_is_waited_for() -> None:
    row = tuple(range(100))
    store = store_of(row[:5], row[:15], row[:16], row[:17], row[:40])
    assert kept_of(store) == {row[:40]}
    store.keep(row[:48], NOTHING, STATE, pinned=True)
    store.keep(row, NOTHING)
    assert kept_of(store) == {row[:48], row}
    store.release(row[:48])
    store.keep((*row, 7), NOTHING)
    assert kept_of(store) == {(*row, 7)}
    check(store)


def test_the_number_of_prefixes_is_bounded_and_the_least_recently_used_goes() -> None:
    rows = [(number, *range(30)) for number in range(5)]
    store = store_of(*rows[:3], most=3)
    assert isinstance(store.find((*rows[0], 1), {}), Prefix)
    store.keep(rows[3], NOTHING)
    assert kept_of(store) == {rows[0], rows[2], rows[3]}
    for row in (rows[0], rows[2], rows[3]):
        store.keep(row, NOTHING, STATE, pinned=True)
    store.keep(rows[4], NOTHING)  # those that are waited for stay
    assert kept_of(store) == {rows[0], rows[2], rows[3]}
    check(store)


def test_a_look_up_does_not_take_longer_for_more_prefixes() -> None:
    def seconds(number: int) -> float:
        store = store_of(*[(1,) * 64 + (2, place, 3) * 22 for place in range(number)], most=number)
        prompt, best = (1,) * 64 + (2, number // 2, 3) * 30, 1.0
        for _ in range(20):
            started = process_time()
            for _ in range(10):
                found = store.find(prompt, {})
            best = min(best, process_time() - started)
        assert found is not None and found.length == 64 + 66
        return best

    assert seconds(4000) < 10 * seconds(40)
