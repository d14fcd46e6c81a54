"""An engine that is stepped in turns: requests join, leave and are parked, and no token is lost or
changed.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from rollout_models import prompts, requests_for, run, tiny_engine
from scripted_engine import ScriptedEngine
from test_native_begun import exact_engine

from hybridflow.distributed.replica_ranks import ReplicaRanks
from hybridflow.errors import RolloutError
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, RolloutEngine, SamplingParams
from hybridflow.rollout.turns import STEPS_PER_NEWS, Inbox, News, Turns

LONG = 600.0


def request(number: int, max_tokens: int = 5) -> GenerationRequest:
    return GenerationRequest(number, Prompt((100 * number,)), SamplingParams(max_tokens), seed=number)


class OnEngine(Turns):
    """Turns of one engine."""

    def __init__(self, engine: RolloutEngine, ranks: ReplicaRanks) -> None:
        super().__init__(ranks)
        self.engine = engine


def taken(turns: OnEngine, *, closed: bool = True, seconds: float = LONG) -> dict[int, GenerationOutput]:
    return {
        output.request_id: output for output in turns.turn(turns.engine, 1, closed=closed, seconds=seconds)
    }


def test_an_inbox_keeps_what_came_until_it_is_taken() -> None:
    inbox = Inbox()
    assert inbox.take(0.0) == News()
    inbox.submit([request(1), request(2)])
    inbox.abort([7])
    inbox.park(1)
    inbox.put_back([request(3)])
    news = inbox.take(0.0)
    assert [each.request_id for each in news.joined] == [3, 1, 2] and news.aborted == (7,) and news.parks == 1
    assert inbox.take(0.0) == News()
    threading.Timer(0.05, inbox.park, [1]).start()
    assert inbox.take(LONG).parks == 1, "it wakes up as soon as something comes"


def test_an_abort_means_only_requests_that_came_before_it() -> None:
    turns = OnEngine(ScriptedEngine(), ReplicaRanks())
    turns.inbox.abort([1, 2])  # late: these have been answered, and their numbers come again
    turns.inbox.submit([request(1), request(2)])
    turns.inbox.abort([2])
    outputs = taken(turns)
    assert len(outputs[1].token_ids) == 5 and outputs[1].finish_reason != "abort"
    assert outputs[2].finish_reason == "abort"


def test_only_the_session_that_is_meant_is_parked() -> None:
    turns = OnEngine(ScriptedEngine(), ReplicaRanks())
    turns.inbox.submit([request(1)])
    turns.inbox.park(7)  # an older session, which has ended by itself meanwhile
    outputs = {each.request_id: each for each in turns.turn(turns.engine, 8, closed=True, seconds=LONG)}
    assert len(outputs[1].token_ids) == 5


def test_what_is_forgotten_does_not_join_and_a_park_stays() -> None:
    inbox = Inbox()
    inbox.submit([request(1)])
    inbox.abort([1])
    inbox.park(3)
    inbox.forget()
    assert inbox.take(0.0) == News(parks=3)


def test_a_closed_turn_answers_what_is_there_and_ends() -> None:
    engine = ScriptedEngine()
    turns = OnEngine(engine, ReplicaRanks())
    turns.inbox.submit([request(1), request(2, max_tokens=3)])
    outputs = taken(turns)
    assert outputs[1].token_ids == [101, 102, 103, 104, 105] and outputs[2].token_ids == [201, 202, 203]
    assert turns.finished and engine.joined == [[1, 2]], "all join before the first step"
    assert taken(turns) == {} and turns.finished, "also without a request"


def test_a_turn_that_is_over_goes_on_in_the_next_one() -> None:
    turns = OnEngine(ScriptedEngine(), ReplicaRanks())
    turns.inbox.submit([request(1, max_tokens=3 * STEPS_PER_NEWS)])
    assert taken(turns, seconds=0.0) == {} and not turns.finished
    found: dict[int, GenerationOutput] = {}
    turns_taken = 1
    while not turns.finished:
        found |= taken(turns, seconds=0.0)
        turns_taken += 1
    assert turns_taken == 3 * STEPS_PER_NEWS == len(found[1].token_ids), "one step each"


def test_requests_join_and_leave_an_open_session_which_waits_until_it_is_parked() -> None:
    engine = ScriptedEngine(seconds=0.01)
    turns = OnEngine(engine, ReplicaRanks())
    seen: dict[int, GenerationOutput] = {}
    turns.inbox.submit([request(1), request(2, max_tokens=100_000)])
    for output in turns.turn(turns.engine, 1, closed=False, seconds=LONG):
        seen[output.request_id] = output
        if output.request_id == 1:
            turns.inbox.submit([request(3)])
        elif output.request_id == 3:
            turns.inbox.abort([2, 77])
        else:
            threading.Timer(0.05, turns.inbox.park, [1]).start()  # nothing runs any longer: it waits
    assert turns.finished and list(seen) == [1, 3, 2]
    assert seen[2].finish_reason == "abort" and seen[2].token_ids[:5] == [201, 202, 203, 204, 205]


def test_what_is_parked_goes_on_first_under_the_weights_of_then() -> None:
    engine = ScriptedEngine()
    turns = OnEngine(engine, ReplicaRanks())
    turns.inbox.submit([request(1, max_tokens=6), request(2, max_tokens=2)])
    for output in turns.turn(turns.engine, 1, closed=False, seconds=LONG):
        assert output.request_id == 2
        turns.inbox.submit([request(3)])
        turns.inbox.park(1)
    assert turns.finished
    engine.set_version(4)
    outputs = taken(turns)
    # request 3 came with the same news as the parking, so it has joined and begun nothing
    assert engine.joined[-1] == [1, 3]
    assert outputs[1].token_ids == [101, 102, 103, 104, 105, 106]
    assert outputs[1].policy_versions == [0, 0, 4, 4, 4, 4]
    assert outputs[3].policy_versions == [4] * 5


@pytest.mark.parametrize("every", [1, 3])
def test_parking_changes_no_bit_in_exact_mode(every: int) -> None:
    requests = requests_for(prompts(6), n=2, max_tokens=12)
    wanted = run(exact_engine(prefixes=True), requests)
    engine = exact_engine(prefixes=True)
    turns = OnEngine(engine, ReplicaRanks())
    turns.inbox.submit(requests)
    found: dict[int, GenerationOutput] = {}
    parked = 0
    while len(found) < len(requests):
        for _ in range(every):
            found |= taken(turns, closed=False, seconds=0.0)  # one step
        turns.inbox.park(1)
        found |= taken(turns, closed=False)
        parked += 1
        assert turns.finished
        engine.sleep()
        engine.wake_up()
    assert parked >= 3
    assert {number: (o.token_ids, o.log_probs, o.finish_reason) for number, o in found.items()} == {
        number: (o.token_ids, o.log_probs, o.finish_reason) for number, o in wanted.items()
    }


def test_an_engine_that_fails_drops_all_requests_and_can_be_used_again() -> None:
    engine = ScriptedEngine(dies_at=3)
    turns = OnEngine(engine, ReplicaRanks())
    turns.inbox.submit([request(1), request(2)])
    with pytest.raises(RolloutError, match="failed with 2 requests left: RuntimeError: out of memory"):
        taken(turns)
    assert turns.finished
    engine.dies_at = None
    turns.inbox.submit([request(1)])
    assert list(taken(turns)) == [1], "the ids are free again, and nothing of before is left"


def test_whoever_leaves_a_turn_leaves_nothing_behind() -> None:
    engine = ScriptedEngine()
    turns = OnEngine(engine, ReplicaRanks())
    turns.inbox.submit([request(1), request(2, max_tokens=50)])
    reading = turns.turn(turns.engine, 1, closed=True, seconds=LONG)
    assert next(reading).request_id == 1
    reading.close()
    assert turns.finished and taken(turns) == {}


class Told(ReplicaRanks):
    """A later rank of a replica, which hears the news of a list."""

    def __init__(self, news: list[News]) -> None:
        super().__init__(size=2, rank=1)
        object.__setattr__(self, "news", iter(news))

    def from_first(self, value):  # type: ignore[no-untyped-def]
        assert value is None, "it has none of its own"
        return next(self.news)  # type: ignore[attr-defined]


def test_a_later_rank_does_what_the_first_is_told() -> None:
    engine = ScriptedEngine()
    heard = [News((request(1), request(2))), News(), News(aborted=(2,)), News(parks=1)]
    turns = OnEngine(engine, Told(heard))
    turns.inbox.submit([request(9)])  # nobody should; it is not looked at
    outputs = taken(turns, closed=False)
    assert engine.joined == [[1, 2]] and outputs[2].finish_reason == "abort" and turns.finished
    assert [each.request_id for each in turns.inbox.take(0.0).joined] == [9], "only the first rank puts back"


def test_a_request_that_cannot_be_served_comes_back_and_the_others_go_on() -> None:
    turns = OnEngine(tiny_engine(), ReplicaRanks())
    good, bad = requests_for(prompts(2), max_tokens=4)
    turns.inbox.submit([good, replace(bad, prompt=Prompt((1_000_000,)))])
    outputs = taken(turns)
    assert outputs[bad.request_id].refused and outputs[good.request_id].error is None
