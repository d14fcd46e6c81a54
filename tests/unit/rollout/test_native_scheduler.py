"""Who enters when."""

from __future__ import annotations

from rollout_models import requests_for

from hybridflow.models.kv_cache import SlotCopy
from hybridflow.rollout.base import GenerationRequest
from hybridflow.rollout.native.prefixes import Kept, Prefix
from hybridflow.rollout.native.scheduler import Scheduler


class Line(Scheduler):
    """A scheduler beside prompts that were kept whole."""

    def __init__(self, requests: list[GenerationRequest], *, max_rows: int, max_batched_tokens: int) -> None:
        self.kept: set[tuple[int, ...]] = set()
        super().__init__(max_rows=max_rows, max_batched_tokens=max_batched_tokens)
        self.add(requests)

    def at_hand(self, prompt: tuple[int, ...]) -> Prefix | None:
        return (
            Prefix(len(prompt), kept=Kept(prompt, SlotCopy({}, {}), None, pinned=True))
            if prompt in self.kept
            else None
        )

    def batch(self, free: int) -> list[tuple[list[int], bool, bool]]:
        """(ids, nothing to compute, keep) of what enters next with `free` rows."""
        batch = self.next_batch(self.max_rows - free, find=self.at_hand)
        self.kept |= {admission.prompt for admission in batch if admission.keep}
        return [([r.request_id for r in a.entering], a.start == a.stop, a.keep) for a in batch]


def test_a_group_enters_whole_where_it_fits_and_keeps_its_prompt_where_not() -> None:
    scheduler = Line(requests_for([(5, 6), (7,), (8, 9)], n=3), max_rows=5, max_batched_tokens=100)
    assert scheduler.batch(5) == [([0, 1, 2], False, False), ([3, 4], False, True)]
    assert scheduler.num_waiting == 4
    assert scheduler.batch(0) == []
    assert scheduler.batch(3) == [([5], True, False), ([6, 7], False, True)]
    assert scheduler.batch(5) == [([8], True, False)]
    assert scheduler.num_waiting == 0 and not scheduler.may_enter(0)


def test_equal_prompts_are_one_group_wherever_they_stand() -> None:
    scheduler = Line(requests_for([(5, 6), (7,), (5, 6)]), max_rows=8, max_batched_tokens=100)
    assert scheduler.batch(8) == [([0, 2], False, False), ([1], False, False)]


def test_a_prefill_pass_stays_under_the_token_budget() -> None:
    scheduler = Line(
        requests_for([(4,) * 6, (5,) * 5, (6,) * 10, (7,) * 4]), max_rows=8, max_batched_tokens=10
    )
    assert [[r for r, _, _ in scheduler.batch(8)] for _ in range(4)] == [[[0]], [[1]], [[2]], [[3]]]
    scheduler = Line(requests_for([(4,) * 6, (5,) * 4, (6,) * 5]), max_rows=8, max_batched_tokens=10)
    assert [r for r, _, _ in scheduler.batch(8)] == [[0], [1]]


def test_rows_enter_in_batches_while_others_run() -> None:
    scheduler = Line(requests_for([(4, 5)], n=100), max_rows=64, max_batched_tokens=10)
    assert scheduler.may_enter(0)
    scheduler.next_batch(0)
    assert (
        not scheduler.may_enter(64)
        and not scheduler.may_enter(61)
        and scheduler.may_enter(60)
        and scheduler.may_enter(0)
    )


def test_removed_requests_do_not_enter() -> None:
    scheduler = Line(requests_for([(4,), (5,)], n=2), max_rows=8, max_batched_tokens=10)
    assert [one.request_id for one in scheduler.remove({0, 1, 3})] == [0, 1, 3]
    assert scheduler.batch(8) == [([2], False, False)]


def test_a_long_prompt_is_prefilled_in_pieces_beside_others() -> None:
    scheduler = Line(
        requests_for([(4,) * 6, tuple(range(3, 28)), (7,) * 4]), max_rows=8, max_batched_tokens=10
    )
    first = scheduler.next_batch(0)
    assert [(a.start, a.stop, len(a.entering)) for a in first] == [
        (0, 6, 1),
        (0, 4, 0),
    ] and scheduler.in_pieces
    second = scheduler.next_batch(1)
    assert [(a.start, a.stop, a.continues) for a in second] == [(4, 14, True)] and scheduler.num_waiting == 2
    third, fourth = scheduler.next_batch(1), scheduler.next_batch(1)
    assert [(a.start, a.stop, len(a.entering)) for a in third] == [(14, 24, 0)]
    assert [(a.start, a.stop, len(a.entering)) for a in fourth] == [
        (24, 25, 1),
        (0, 4, 1),
    ] and not scheduler.in_pieces


def test_a_slot_is_kept_for_the_prompt_in_pieces() -> None:
    scheduler = Line(requests_for([tuple(range(3, 18))], n=3), max_rows=3, max_batched_tokens=10)
    scheduler.next_batch(0)
    assert [len(a.entering) for a in scheduler.next_batch(0)] == [2]
    scheduler = Line(requests_for([tuple(range(3, 18))], n=3), max_rows=3, max_batched_tokens=10)
    scheduler.next_batch(2)
    assert [len(a.entering) for a in scheduler.next_batch(2)] == [1]


def test_others_leave_the_last_slot_to_the_prompt_in_pieces_until_its_pass_is_over() -> None:
    prompts = [tuple(range(3, 18)), (7, 8), tuple(range(20, 40))]
    scheduler = Line(requests_for(prompts[:2]), max_rows=3, max_batched_tokens=10)
    scheduler.next_batch(1)
    assert [a.prompt for a in scheduler.next_batch(1)] == prompts[:1]
    scheduler = Line(requests_for([prompts[0], prompts[2], prompts[1]]), max_rows=9, max_batched_tokens=10)
    scheduler.next_batch(1)
    assert [a.prompt for a in scheduler.next_batch(1)] == prompts[:1]
    assert [a.prompt for a in scheduler.next_batch(2)] == prompts[2:]


def test_a_prompt_that_shares_half_of_it_waits_for_the_pass_that_computes_it() -> None:
    shared = tuple(range(3, 23))
    scheduler = Line(
        requests_for([(*shared, 30), (*shared, 31), (*shared, *range(3, 40))]),
        max_rows=8,
        max_batched_tokens=99,
    )
    assert scheduler.batch(8) == [([0], False, False)]
    scheduler.kept.add((*shared, 31))  # at hand now
    assert scheduler.batch(7) == [([1], True, False), ([2], False, False)]


def test_memory_bounds_who_enters() -> None:
    scheduler = Line(requests_for([(4,) * 6, (5,) * 20], n=3), max_rows=8, max_batched_tokens=99)
    batch = scheduler.next_batch(0, lambda taken, batch, context, prefix: 100 // (len(context) + 1) - taken)
    assert [len(a.entering) for a in batch] == [3, 1]
