"""Shares of waiting, by a clock that only the test moves."""

from __future__ import annotations

import pytest

from hybridflow.rollout.engine_replica import ReplicaUse
from hybridflow.trainer.schedules.ahead import IdleShares


class Clock:
    """A clock that stands until `pass_by` is called."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def test_an_engine_is_busy_only_where_it_is_stepped_for_requests_of_the_same_replica() -> None:
    clock = Clock()
    use = ReplicaUse(clock)
    clock.pass_by(1)  # empty
    use.note(0, stepped=True)
    clock.pass_by(2)  # stepped without a request: empty
    use.note(0, asked=True)
    clock.pass_by(4)  # busy
    use.note(0, stepped=False)
    clock.pass_by(8)  # standing
    use.note(1, asked=True)
    clock.pass_by(16)  # a request of another replica, which is not stepped either: standing
    use.note(1, stepped=True)
    clock.pass_by(32)  # busy with that one
    use.note(1, asked=False)
    clock.pass_by(64)  # the first replica's requests stand
    use.note(0, asked=False)
    clock.pass_by(128)
    assert use.seconds() == {"empty": 131, "busy": 36, "standing": 88}


def test_shares_are_of_the_time_since_the_last_call_and_count_from_the_first_wait() -> None:
    clock = Clock()
    use = ReplicaUse(clock)
    shares = IdleShares(lambda state: use.seconds().get(state, 0.0), clock)
    use.note(0, asked=True)
    use.note(0, stepped=True)
    clock.pass_by(50)  # before the first wait: the run starts
    assert shares.taken() == {}
    with shares.waiting():
        clock.pass_by(3)
        with shares.waiting():  # a wait in a wait counts once
            clock.pass_by(1)
        use.note(0, asked=False)
        clock.pass_by(1)
    clock.pass_by(2)
    use.note(0, stepped=False)
    use.note(0, asked=True)
    clock.pass_by(3)
    assert shares.taken() == {
        "fully_async/trainer/idle_ratio": pytest.approx(0.5),
        "fully_async/rollouter/idle_ratio": pytest.approx(0.6),
        "fully_async/rollouter/standing_ratio": pytest.approx(0.3),
    }
    assert shares.taken() == {}
    use.note(0, stepped=True)
    clock.pass_by(4)
    assert shares.taken() == {
        "fully_async/trainer/idle_ratio": 0.0,
        "fully_async/rollouter/idle_ratio": 0.0,
        "fully_async/rollouter/standing_ratio": 0.0,
    }


def test_a_wait_that_raises_has_ended() -> None:
    clock = Clock()
    shares = IdleShares(lambda state: 0.0, clock)
    with pytest.raises(KeyError), shares.waiting():
        clock.pass_by(1)
        raise KeyError
    clock.pass_by(3)
    assert shares.taken()["fully_async/trainer/idle_ratio"] == 0.25
