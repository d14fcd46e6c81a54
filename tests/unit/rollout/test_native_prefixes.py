"""The prefix cache: what is found is the longest there is, what is kept stays within its bounds."""

from __future__ import annotations

import random
from itertools import takewhile
from time import process_time

import pytest

from hybridflow.models.cache.kv_cache import SlotCopy
from hybridflow.protocol.prompt import Medium, Prompt
from hybridflow.rollout.native.prefixes import PREFIX_BLOCK, Prefix, PrefixCache

COPY = SlotCopy({}, {})


def cache_of(*rows: tuple[int, ...], **options: int) -> PrefixCache:
    cache = PrefixCache(share_parts=True, **options)
    for row in rows:
        cache.add(row, COPY)
    return cache


def kept_of(cache: PrefixCache) -> set[tuple[int, ...]]:
    return {prefix.units for prefix in cache._copies}  # type: ignore[misc]


def listed_in(cache: PrefixCache) -> set[Prefix]:
    return {prefix for listed in cache._by_hash.values() for prefix in listed}


def shared_by_counting(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


@pytest.mark.parametrize("seed", range(5))
def test_what_is_found_is_the_longest_of_all(seed: int) -> None:
    draw = random.Random(seed)
    trunk = tuple(draw.randrange(3) for _ in range(200))

    def branch() -> tuple[int, ...]:
        beginning = trunk[: draw.randrange(150)]
        return beginning + tuple(draw.randrange(3, 9) for _ in range(draw.randrange(1, 40)))

    cache = PrefixCache(share_parts=True)
    for _ in range(60):
        cache.add(branch(), COPY)
        prompt = branch()
        longest = max(min(shared_by_counting(prompt, other), len(prompt) - 1) for other in kept_of(cache))
        prefix, shared = cache.find(prompt)
        if prefix is None:
            assert longest < PREFIX_BLOCK and shared == 0
        else:
            assert shared == longest and prefix.units[:longest] == prompt[:longest]
    assert listed_in(cache) == set(cache._copies)
    assert cache.num_tokens == sum(len(prefix.units) for prefix in cache._copies) > 500
    while cache.num_tokens > 500 and cache.evict():
        pass
    assert listed_in(cache) == set(cache._copies)
    cache.clear()
    assert not cache._by_hash and not cache.evict() and cache.num_tokens == 0


def test_equal_prompts_meet_however_short_they_are_and_compute_their_last_token() -> None:
    for parts in (True, False):
        cache = PrefixCache(share_parts=parts)
        for length in (1, 2, 15, 16, 17, 40):
            prompt = tuple(range(length))
            own = cache.add(prompt, rows=2)
            prefix, shared = cache.find(prompt)
            assert (prefix, shared) == ((own, length - 1) if length > 1 else (None, 0))
            _, longer = cache.find((*prompt, 99, 98))
            assert longer == (length if parts and length >= PREFIX_BLOCK else 0)


def test_a_prefix_of_rows_lasts_as_long_as_the_last_of_them() -> None:
    cache = PrefixCache(share_parts=True)
    prefix = cache.add(tuple(range(20)), rows=2)
    assert cache.release(prefix) and cache.find(tuple(range(30)))[1] == 20
    assert cache.release(prefix) and cache.find(tuple(range(30))) == (None, 0)
    assert not cache.release(prefix) and not cache.release(None) and not cache._by_hash
    old = cache.add(tuple(range(20)), rows=1)
    cache.clear()  # the weights have changed
    new = cache.add(tuple(range(20)), rows=1)
    assert not cache.release(old) and cache.find(tuple(range(30))) == (new, 20)


def test_who_knows_a_prefix_that_is_gone_does_not_hold_its_memory() -> None:
    cache = PrefixCache(share_parts=True)
    evicted = cache.add(tuple(range(20)), COPY)
    dropped = cache.add(tuple(range(1, 20)), COPY)
    cache.evict()
    assert evicted.copy is None and dropped.copy is COPY
    cache.clear()
    assert dropped.copy is None


def test_places_of_other_media_are_other_units() -> None:
    tokens = tuple(range(30))
    cache = PrefixCache(share_parts=True)
    cache.add(Prompt(tokens, (Medium(18, 2, "a"),)).key, COPY)
    assert cache.find(Prompt(tokens, (Medium(18, 2, "a"),)).key)[1] == 29
    assert cache.find(Prompt(tokens, (Medium(18, 2, "b"),)).key)[1] == 18
    assert cache.find(tokens)[1] == 18
    assert cache.find(Prompt(tokens, (Medium(3, 2, "a"),)).key) == (None, 0)


def test_the_number_of_copies_is_bounded_and_the_least_recently_used_goes() -> None:
    rows = [(number, *range(30)) for number in range(5)]
    cache = cache_of(*rows[:3], most=3)
    assert cache.find((*rows[0], 1))[1] == 31
    cache.add(rows[3], COPY)
    assert kept_of(cache) == {rows[0], rows[2], rows[3]} and cache.num_tokens == 3 * 31
    running = cache.add(rows[4], rows=1)  # what rows have takes no memory of its own, and stays
    while cache.evict():
        pass
    assert listed_in(cache) == {running} and cache.num_tokens == 0


def test_a_look_up_does_not_take_longer_for_more_prefixes() -> None:
    def seconds(number: int) -> float:
        cache = cache_of(*[(1,) * 64 + (2, place, 3) * 22 for place in range(number)], most=number)
        prompt = (1,) * 64 + (2, number // 2, 3) * 30
        best = 1.0
        for _ in range(20):
            started = process_time()
            for _ in range(10):
                _, shared = cache.find(prompt)
            best = min(best, process_time() - started)
        assert shared == 64 + 66
        return best

    assert seconds(4000) < 10 * seconds(40)
