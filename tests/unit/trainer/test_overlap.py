"""Calls of roles on different processes run side by side; those that share processes take turns."""

from __future__ import annotations

import threading

import pytest

from hybridflow.observability.timing import Timer
from hybridflow.trainer.ppo.step import Overlap, RoleCall

POOLS = {"actor": 0, "reference": 0, "critic": 1, "teacher": 2}


def split(first: str, second: str) -> bool:
    return POOLS[first] == POOLS[second]


def test_colocated_roles_take_turns_in_the_callers_thread() -> None:
    timer, seen = Timer(), list[tuple[str, str]]()

    def job(role: str) -> RoleCall[str]:
        return RoleCall(
            role, f"of_{role}", lambda: seen.append((role, threading.current_thread().name)) or role.upper()
        )

    assert Overlap(lambda first, second: True, timer)([job("critic"), job("actor")]) == ["CRITIC", "ACTOR"]
    main = threading.current_thread().name
    assert seen == [("critic", main), ("actor", main)]
    assert set(timer.as_metrics()) == {"timing_s/of_critic", "timing_s/of_actor"}


def test_split_roles_run_at_the_same_time_and_results_keep_their_order() -> None:
    both = threading.Barrier(2, timeout=600)  # passed only where actor and critic are inside at once

    def meet(name: str) -> str:
        both.wait()
        return name

    jobs = [
        RoleCall("actor", "a", lambda: meet("a")),
        RoleCall("critic", "c", lambda: meet("c")),
        RoleCall("reference", "r", lambda: "r"),
    ]
    assert Overlap(split, Timer())(jobs) == ["a", "c", "r"]


def test_the_first_error_comes_through_after_the_others_have_ended() -> None:
    ended = threading.Event()

    def fails() -> str:
        raise ValueError("the critic's own")

    def slow() -> str:
        assert not ended.wait(0.2)
        ended.set()
        return "t"

    with pytest.raises(ValueError, match="critic's own"):
        Overlap(split, Timer())([RoleCall("critic", "c", fails), RoleCall("teacher", "t", slow)])
    assert ended.is_set()


def test_nothing_to_do_is_nothing() -> None:
    assert Overlap(split, Timer())([]) == []
