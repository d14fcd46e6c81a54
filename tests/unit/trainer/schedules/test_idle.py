"""Shares of waiting, by a clock that only the test moves."""

from __future__ import annotations

import pytest

from hybridflow.trainer.schedules.ahead import IdleShares
from hybridflow.workers.rollout_use import ReplicaUse, mean_seconds


class Clock:
    """A clock that stands until `pass_by` is called."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def test_a_replica_is_busy_only_where_it_is_stepped_for_requests_of_the_same_channel() -> None:
    clock = Clock()
    use = ReplicaUse(clock)
    clock.pass_by(1)  # empty
    use.be_stepped(0, True)
    clock.pass_by(2)  # stepped without a request: empty
    use.be_asked(0, True)
    clock.pass_by(4)  # busy
    use.be_stepped(0, False)
    clock.pass_by(8)  # standing
    use.be_asked(1, True)
    clock.pass_by(16)  # a request of another channel, which is not stepped either: standing
    use.be_stepped(1, True)
    clock.pass_by(32)  # busy with that one
    use.be_asked(1, False)
    clock.pass_by(64)  # the first channel's requests stand
    use.be_asked(0, False)
    clock.pass_by(128)
    assert use.seconds() == {"empty": 131, "busy": 36, "standing": 88}


def test_seconds_of_replicas_are_a_mean() -> None:
    clock = Clock()
    uses = [ReplicaUse(clock), ReplicaUse(clock)]
    uses[0].be_asked(0, True)
    uses[0].be_stepped(0, True)
    clock.pass_by(3)
    assert mean_seconds(uses, "busy") == 1.5 and mean_seconds(uses, "standing") == 0


def test_shares_are_of_the_time_since_the_last_call_and_count_from_the_first_wait() -> None:
    clock = Clock()
    use = ReplicaUse(clock)
    shares = IdleShares(lambda state: mean_seconds([use], state), clock)
    use.be_asked(0, True)
    use.be_stepped(0, True)
    clock.pass_by(50)  # before the first wait: the run starts
    assert shares.taken() == {}
    with shares.waiting():
        clock.pass_by(3)
        with shares.waiting():  # a wait in a wait counts once
            clock.pass_by(1)
        use.be_asked(0, False)
        clock.pass_by(1)
    clock.pass_by(2)
    use.be_stepped(0, False)
    use.be_asked(0, True)
    clock.pass_by(3)
    assert shares.taken() == {
        "fully_async/trainer/idle_ratio": pytest.approx(0.5),
        "fully_async/rollouter/idle_ratio": pytest.approx(0.6),
        "fully_async/rollouter/standing_ratio": pytest.approx(0.3),
    }
    assert shares.taken() == {}
    use.be_stepped(0, True)
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
