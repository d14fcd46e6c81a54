"""Who enters when."""

from __future__ import annotations

from rollout_models import requests_for

from hybridflow.rollout.native.scheduler import Scheduler


def entered(scheduler: Scheduler, free: int) -> list[tuple[list[int], bool, bool]]:
    return [([r.request_id for r in a.requests], a.from_kept, a.keep) for a in scheduler.next_batch(free)]


def test_a_group_enters_whole_where_it_fits_and_keeps_its_prompt_where_not() -> None:
    scheduler = Scheduler(requests_for([(5, 6), (7,), (8, 9)], n=3), max_rows=5, max_batched_tokens=100)
    assert entered(scheduler, 5) == [([0, 1, 2], False, False), ([3, 4], False, True)]
    assert scheduler.num_waiting == 4
    assert entered(scheduler, 0) == []
    assert entered(scheduler, 3) == [([5], True, False), ([6, 7], False, True)]
    assert entered(scheduler, 5) == [([8], True, False)]
    assert scheduler.num_waiting == 0 and not scheduler.may_enter(0)


def test_equal_prompts_are_one_group_wherever_they_stand() -> None:
    scheduler = Scheduler(requests_for([(5, 6), (7,), (5, 6)]), max_rows=8, max_batched_tokens=100)
    assert entered(scheduler, 8) == [([0, 2], False, False), ([1], False, False)]


def test_a_prefill_pass_stays_under_the_token_budget_unless_one_prompt_is_longer() -> None:
    scheduler = Scheduler(requests_for([(4,) * 6, (5,) * 5, (6,) * 20, (7,) * 4]), max_rows=8, max_batched_tokens=10)
    assert [[r for r, _, _ in entered(scheduler, 8)] for _ in range(4)] == [[[0]], [[1]], [[2]], [[3]]]
    scheduler = Scheduler(requests_for([(4,) * 6, (5,) * 4, (6,) * 5]), max_rows=8, max_batched_tokens=10)
    assert [r for r, _, _ in entered(scheduler, 8)] == [[0], [1]]


def test_rows_enter_in_batches_while_others_run() -> None:
    scheduler = Scheduler(requests_for([(4, 5)], n=100), max_rows=64, max_batched_tokens=10)
    assert scheduler.may_enter(0)
    scheduler.next_batch(64)
    assert not scheduler.may_enter(64) and not scheduler.may_enter(61) and scheduler.may_enter(60) and scheduler.may_enter(0)


def test_removed_requests_do_not_enter() -> None:
    scheduler = Scheduler(requests_for([(4,), (5,)], n=2), max_rows=8, max_batched_tokens=10)
    assert [request.request_id for request in scheduler.remove({0, 1, 3})] == [0, 1, 3]
    assert entered(scheduler, 8) == [([2], False, False)]
