"""The fold of transitions: which may follow which, what they amount to, and what a message lists."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest

from hybridflow.trainer.schedules.ledger_state import (
    Admitted,
    Failed,
    Filtered,
    Finished,
    GroupPhase,
    Groups,
    ImpossibleTransition,
    LedgerState,
    Published,
    Replaced,
    Replayed,
    Restarted,
    Scored,
    Taken,
    Transition,
    ranges,
    ranges_text,
)


def state_of(*transitions: Transition) -> LedgerState:
    state = LedgerState()
    for transition in transitions:
        state.apply(transition)
    return state


def scored(first: int, count: int, version: int = 0) -> tuple[Transition, ...]:
    return Admitted(first, count, version=version), Finished(first, count), Scored(first, count)


def test_a_batch_that_moves_as_a_whole() -> None:
    state = state_of(*scored(0, 4), Taken(0, 4, step=0, tokens=40))
    assert state.num_taken == 4 and state.batches == {0: [0, 1, 2, 3]} and not state.active
    assert state.phase(2) == GroupPhase.TAKEN
    state.apply(Published(1))
    assert state.version == 1 and state.trained_per_step == [4] and state.batches == {}
    assert state.phase(2) == GroupPhase.TRAINED and state.tokens["taken"] == 40
    state.apply(Published(2))
    assert state.trained_per_step == [4, 0], "a step without groups publishes too"


def test_groups_are_ready_in_the_order_in_which_they_were_scored() -> None:
    state = state_of(Admitted(0, 3, version=0), Finished(0, 3), Scored(2), Scored(0), Scored(1))
    assert list(state.ready) == [2, 0, 1]
    state.apply(Filtered(0))
    assert list(state.ready) == [2, 1] and state.active == {1: 0, 2: 0}


def test_a_group_that_starts_anew_has_the_version_of_now() -> None:
    state = state_of(*scored(0, 2), Published(1), Restarted(0, version=1))
    assert state.active == {0: 1, 1: 0} and list(state.ready) == [1]
    assert state.phase(0) == GroupPhase.GENERATING and state.num_admitted == 2
    for transition in (Finished(0), Scored(0), Taken(0, 2, step=1)):
        state.apply(transition)
    assert state.staleness == {0: 1, 1: 1}


def test_failures_are_counted_by_cause_with_what_they_had_sampled() -> None:
    state = state_of(
        Admitted(0, 3, version=0),
        Failed(0, 2, cause="deadline", tokens=500),
        Failed(2, cause="environment"),
        Admitted(3, 2, version=0),
        Replaced(0, 2, by=3),
    )
    assert state.causes == {"deadline": 2, "environment": 1}
    assert state.tokens["failed"] == 500 and state.groups["replaced"] == 2
    assert state.active == {3: 0, 4: 0}


def test_rows_of_a_batch_of_before_may_be_trained_again() -> None:
    state = state_of(
        *scored(0, 2), Taken(0, 2, step=0), Published(1), Replayed(0, step=1), Replayed(0, step=2, draws=3)
    )
    assert state.groups["replayed"] == 2 and state.num_taken == 2


def test_the_prompts_that_a_sampler_chose_are_known_while_a_group_is_active() -> None:
    state = state_of(
        Admitted(0, 2, version=0, prompts=(70, 71)), Admitted(2, version=0), Failed(0, cause="x")
    )
    assert state.prompts == {1: 71}


READY = scored(0, 3)
IMPOSSIBLE: list[tuple[tuple[Transition, ...], Transition, str]] = [
    ((), Admitted(1, version=0), "the next index is 0"),
    ((), Admitted(0, 0, version=0), "the next index is 0"),
    ((), Admitted(0, version=1), "version 0 is the newest"),
    ((), Admitted(0, 2, version=0, prompts=(1,)), "2 groups need as many prompts"),
    ((), Published(2), "version 0 is published, so 1 fits"),
    ((), Finished(0), r"the groups 0 to -1 were admitted"),
    (READY, Finished(0), "group 0 is scored, and not being generated"),
    (READY, Taken(1, 3, step=0), "the groups 0 to 2 were admitted"),
    (READY, Taken(0, -1, step=0), "the groups 0 to 2 were admitted"),
    ((*READY, Taken(1, step=0)), Taken(0, 3, step=0), "group 1 is in a batch, and not scored"),
    ((*READY, Taken(1, step=0), Published(1)), Taken(1, step=1), "group 1 is trained, and not scored"),
    ((*READY, Published(1)), Taken(0, step=0), "step 0 has been published"),
    (
        (*READY, Taken(1, step=0)),
        Failed(1, cause="late"),
        "is in a batch, and not being generated or finished",
    ),
    ((Admitted(0, version=0), Finished(0)), Taken(0, step=0), "group 0 is finished, and not scored"),
    ((*READY, Filtered(0)), Taken(0, step=0), "group 0 is filtered, and not scored"),
    ((*READY, Taken(0, step=0)), Restarted(0, version=0), "group 0 is in a batch"),
    (READY, Restarted(0, version=1), "version 0 is the newest"),
    (READY, Replaced(0, by=1), "group 0 is scored, and not failed or filtered"),
    ((*READY, Filtered(0, 2)), Replaced(0, by=1), "group 1 is filtered, and not being generated"),
    (READY, Replayed(0, step=0), "group 0 is scored, and not in a batch or trained"),
    (READY, Transition(), "not into its fold"),
    (READY, Groups(0), "not into its fold"),
]


@pytest.mark.parametrize("before, transition, reason", IMPOSSIBLE)
def test_what_cannot_follow_changes_nothing(
    before: tuple[Transition, ...], transition: Transition, reason: str
) -> None:
    state = state_of(*before)
    with pytest.raises(ImpossibleTransition, match=reason):
        state.apply(transition)
    assert vars(state) == vars(state_of(*before))


def test_open_items_name_groups_by_phase_and_version() -> None:
    state = state_of(*scored(0, 6), Taken(1, 2, step=0), Taken(5, step=0), Published(1))
    state.apply(Admitted(6, 4, version=1))
    state.apply(Finished(7))
    state.apply(Taken(3, step=1))
    assert state.open_items() == (
        "version 1, 10 groups admitted; being generated: 6, 8-9 (version 1); finished: 7 (version 1); "
        "scored: 0, 4 (version 0); in the batch of step 1: 3"
    )
    assert LedgerState().open_items() == "version 0, 0 groups admitted; no group is open"


def test_open_items_stay_short() -> None:
    state = state_of(*scored(0, 2000))
    for index in range(0, 2000, 2):
        state.apply(Filtered(index))
    assert len(state.open_items()) < 300 and "and 980 more (version 0)" in state.open_items()


def test_ranges() -> None:
    assert list(ranges([])) == []
    assert list(ranges([3, 4, 5, 9])) == [range(3, 6), range(9, 10)]
    assert ranges_text([3, 4, 5, 9, 11], 2) == "3-5, 9, and 1 more"


def lines_run(state: LedgerState, transition: Transition) -> int:
    """Lines of Python that taking in a transition runs."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # what it calls back would be counted
    sys.settrace(trace)
    try:
        state.apply(transition)
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def test_a_line_costs_the_same_however_long_the_ledger_is() -> None:
    def costs(groups: int) -> list[int]:
        state = state_of(*scored(0, groups))
        following = (
            Admitted(groups, version=0),
            Finished(groups),
            Scored(groups),
            Taken(groups, step=0),
            Published(1),
            Failed(5, cause="x"),
        )
        return [lines_run(state, transition) for transition in following]

    assert costs(10) == costs(10_000)
