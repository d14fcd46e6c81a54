"""Who enters when."""

from __future__ import annotations

from rollout_models import requests_for

from hybridflow.protocol.prompt import Units
from hybridflow.rollout.base import GenerationRequest
from hybridflow.rollout.native.prefixes import Prefix, PrefixCache
from hybridflow.rollout.native.scheduler import Admission, Scheduler


class Line(Scheduler):
    """A scheduler beside rows that have what was computed, and a memory for `room` rows."""

    def __init__(self, requests: list[GenerationRequest], *, max_rows: int, max_batched_tokens: int) -> None:
        super().__init__(max_rows=max_rows, max_batched_tokens=max_batched_tokens)
        self.prefixes = PrefixCache(share_parts=True)
        self.partial: Admission | None = None
        self.room = 1000
        self.add(requests)

    def fits(self, count: int, length: int, prefix: Prefix | None, shared: int) -> int:
        fitting = min(count, self.room)
        self.room -= fitting
        return fitting

    def batch(self, running: int) -> list[tuple[list[int], int, int]]:
        """(ids, first and last token computed) of the next pass, beside `running` rows."""
        batch = self.next_batch(running, self.prefixes.find, self.fits, self.partial)
        for one in batch:
            if one.whole:
                self.prefixes.add(one.context, rows=1)
        self.partial = batch[-1] if batch and not batch[-1].whole else None
        return [([r.request_id for r in a.requests], a.start, a.stop) for a in batch]


def test_a_group_enters_whole_where_it_fits_and_its_rest_computes_one_token() -> None:
    scheduler = Line(requests_for([(5, 6), (7,), (8, 9)], n=3), max_rows=5, max_batched_tokens=100)
    assert scheduler.batch(0) == [([0, 1, 2], 0, 2), ([3, 4], 0, 1)]
    assert scheduler.num_waiting == 4 and scheduler.awaits((7,)) and not scheduler.awaits((5, 6))
    assert scheduler.batch(5) == []
    assert scheduler.batch(2) == [([5], 0, 1), ([6, 7], 0, 2)]
    assert scheduler.batch(0) == [([8], 1, 2)]
    assert scheduler.num_waiting == 0 and not scheduler.may_enter(0)


def test_equal_prompts_are_one_group_wherever_they_stand() -> None:
    scheduler = Line(requests_for([(5, 6), (7,), (5, 6)]), max_rows=8, max_batched_tokens=100)
    assert scheduler.batch(0) == [([0, 2], 0, 2), ([1], 0, 1)]


def test_a_prefill_pass_stays_under_the_token_budget() -> None:
    prompts = [(4,) * 6, (5,) * 5, (6,) * 10, (7,) * 4]
    scheduler = Line(requests_for(prompts), max_rows=8, max_batched_tokens=10)
    assert [scheduler.batch(row) for row in range(4)] == [
        [([row], 0, len(prompt))] for row, prompt in enumerate(prompts)
    ]
    scheduler = Line(requests_for([(4,) * 6, (5,) * 4, (6,) * 5]), max_rows=8, max_batched_tokens=10)
    assert scheduler.batch(0) == [([0], 0, 6), ([1], 0, 4)]


def test_rows_enter_in_batches_while_others_run() -> None:
    scheduler = Line(requests_for([(4, 5)], n=100), max_rows=64, max_batched_tokens=10)
    assert scheduler.may_enter(0)
    scheduler.batch(0)
    assert [running for running in (64, 61, 60, 0) if scheduler.may_enter(running)] == [60, 0]


def test_removed_requests_do_not_enter() -> None:
    scheduler = Line(requests_for([(4,), (5,)], n=2), max_rows=8, max_batched_tokens=10)
    assert [one.request_id for one in scheduler.remove({0, 1, 3})] == [0, 1, 3]
    assert scheduler.batch(0) == [([2], 0, 1)]


def test_a_preempted_request_is_the_next_one() -> None:
    requests = requests_for([(4,), (5,), (6,)], n=2)
    scheduler = Line(requests[2:], max_rows=8, max_batched_tokens=10)
    scheduler.put_back(requests[1])
    scheduler.put_back(requests[0])
    assert [one.request_id for one in scheduler.waiting] == [0, 1, 2, 3, 4, 5]


def test_a_long_prompt_is_a_row_from_its_first_chunk_on() -> None:
    long: Units = tuple(range(3, 28))
    scheduler = Line(requests_for([(4,) * 6, long, (7,) * 4]), max_rows=8, max_batched_tokens=10)
    assert scheduler.batch(0) == [([0], 0, 6), ([1], 0, 4)]
    assert scheduler.batch(2) == [([1], 4, 14)] and scheduler.num_waiting == 1
    assert scheduler.batch(2) == [([1], 14, 24)]
    assert scheduler.batch(2) == [([1], 24, 25), ([2], 0, 4)]


def test_the_others_of_a_long_group_enter_when_its_prompt_is_computed() -> None:
    scheduler = Line(requests_for([tuple(range(3, 18))], n=3), max_rows=3, max_batched_tokens=10)
    assert scheduler.batch(0) == [([0], 0, 10)]
    assert scheduler.batch(1) == [([0], 10, 15)]
    assert scheduler.batch(1) == [([1, 2], 14, 15)]


def test_another_long_prompt_begins_where_one_ends() -> None:
    prompts = [tuple(range(3, 18)), tuple(range(20, 40)), (7, 8)]
    scheduler = Line(requests_for(prompts), max_rows=9, max_batched_tokens=10)
    assert [scheduler.batch(1) for _ in range(4)] == [
        [([0], 0, 10)],
        [([0], 10, 15), ([1], 0, 5)],
        [([1], 5, 15)],
        [([1], 15, 20), ([2], 0, 2)],
    ]


def test_a_prompt_that_shares_half_of_it_waits_for_the_pass_that_computes_it() -> None:
    shared = tuple(range(3, 23))
    requests = requests_for([(*shared, 30), (*shared, 31), (*shared, *range(3, 40))])
    scheduler = Line(requests, max_rows=8, max_batched_tokens=99)
    assert scheduler.batch(0) == [([0], 0, 21)]
    assert scheduler.batch(1) == [([1], 20, 21), ([2], 20, 57)]


def test_memory_bounds_who_enters() -> None:
    scheduler = Line(requests_for([(4,) * 6, (5,) * 20], n=3), max_rows=8, max_batched_tokens=99)
    scheduler.room = 4
    assert scheduler.batch(0) == [([0, 1, 2], 0, 6), ([3], 0, 20)]
    assert scheduler.batch(4) == []
