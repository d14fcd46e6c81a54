"""The simulation of schedules: each rule is what its name says, and the page has all of them."""

from __future__ import annotations

import pytest
import schedules


def test_our_rule_and_its_rivals_on_a_moderate_tail() -> None:
    ours = schedules.simulate(schedules.Deadline(2, 6), 2.0, 0, 40)
    fifo = schedules.simulate(schedules.Fifo(2), 2.0, 0, 40)
    window = schedules.simulate(schedules.Window(4), 2.0, 0, 40)
    loose = schedules.simulate(schedules.ReadyFirst(2), 2.0, 0, 40)
    greedy = schedules.simulate(schedules.GreedyDrop(2), 2.0, 0, 40)
    assert fifo.largest == 2 and window.largest <= 6 and greedy.largest == 2
    assert ours.largest <= 6 < loose.largest and ours.dropped == loose.dropped == 0.0
    assert loose.idle < ours.idle < fifo.idle
    assert greedy.dropped > 0.5 and greedy.length < 0.8 < ours.length
    assert ours.mean < 0.6 * window.mean


def test_the_smallest_bound_makes_the_rule_first_in_first_out() -> None:
    ours = schedules.simulate(schedules.Deadline(1, 1), 1.2, 0, 40)
    fifo = schedules.simulate(schedules.Fifo(1), 1.2, 0, 40)
    assert ours.largest == fifo.largest == 1 and ours.idle == pytest.approx(fifo.idle, abs=0.03)


def test_a_rule_that_breaks_its_bound_is_found() -> None:
    class Claims(schedules.ReadyFirst):
        def __init__(self) -> None:
            super().__init__(1)
            self.bound = 1

    with pytest.raises(AssertionError, match="ready first, S=1"):
        schedules.simulate(Claims(), 1.2, 0, 40)


def test_the_page_has_a_row_for_each_rule_and_tail() -> None:
    page = schedules.page_of(seeds=1, steps=5)
    for rule in schedules.RULES:
        assert page.count(f"| {rule.name} | {rule.concurrency} |") == len(schedules.TAILS)
