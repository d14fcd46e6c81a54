"""The loop of a replica: requests join, leave and are preempted, weights change between two steps, and no
token is lost or changed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from rollout_models import prompts, requests_for, run, tiny_engine
from scripted_engine import ScriptedEngine
from test_native_begun import exact_engine

from hybridflow.distributed.process_group import ReplicaRanks
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams
from hybridflow.rollout.engine_replica import STEPS_PER_TALK, Commands, EngineReplica, ReplicaLost

LONG = 100_000


def request(number: int, max_tokens: int = 5) -> GenerationRequest:
    return GenerationRequest(number, Prompt((100 * number,)), SamplingParams(max_tokens), seed=number)


def paused(engine: Any, **options: Any) -> EngineReplica:
    return EngineReplica(engine, paused=True, **options)


def outputs_of(answers: list[Future[GenerationOutput]]) -> dict[int, GenerationOutput]:
    outputs = [answer.result(600) for answer in answers]
    return {output.request_id: output for output in outputs}


def test_a_closed_session_answers_what_is_there_and_ends() -> None:
    engine = ScriptedEngine()
    replica = paused(engine)
    answers = replica.submit_many([request(1), request(2, max_tokens=3)])
    replica.resume(closed=True)
    outputs = outputs_of(answers)
    assert outputs[1].token_ids == [101, 102, 103, 104, 105] and outputs[2].token_ids == [201, 202, 203]
    stats = replica.pause(keep_kv=False)
    assert engine.joined == [[1, 2]], "all join before the first step"
    assert stats is not engine.stats and engine.sleeps == 1 and replica.stands
    replica.resume(closed=True)  # without a request
    replica.pause(keep_kv=False)
    assert engine.joined == [[1, 2]] and engine.sleeps == 2 and replica.load == 0


def test_requests_join_and_leave_an_open_session() -> None:
    engine = ScriptedEngine(seconds=0.001)
    replica = EngineReplica(engine)
    long = replica.submit(request(2, LONG))
    assert replica.submit(request(1)).result(600).token_ids == [101, 102, 103, 104, 105]
    assert replica.submit(request(3)).result(600).finish_reason == "length" and not long.done()
    replica.abort([2, 77])
    assert long.result(600).finish_reason == "abort" and long.result().token_ids[:3] == [201, 202, 203]
    replica.close()


def test_an_abort_means_only_requests_that_came_before_it() -> None:
    replica = paused(ScriptedEngine())
    replica.abort([1, 2])  # late: these have been answered, and their numbers come again
    answers = replica.submit_many([request(1), request(2)])
    replica.abort([2])
    replica.resume(closed=True)
    outputs = outputs_of(answers)
    assert len(outputs[1].token_ids) == 5 and outputs[1].finish_reason != "abort"
    assert outputs[2].finish_reason == "abort"


class StepByStep(ScriptedEngine):
    """Takes a step only when one is allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)

    def _new_session(self, closed: bool) -> Any:
        session: Any = super()._new_session(closed)
        step = session.step

        def waits() -> Any:
            self.begun.release()
            self.allowed.acquire()
            return step()

        session.step = waits
        return session


@pytest.fixture
def stepped() -> Iterator[StepByStep]:
    engine = StepByStep()
    yield engine
    engine.allowed.release(1000)


def paused_after(engine: StepByStep, replica: EngineReplica, steps: int, **how: bool) -> None:
    """Pause while step number `steps` is under way."""
    for _ in range(steps):
        engine.begun.acquire()
        if _ < steps - 1:
            engine.allowed.release()
    pausing = threading.Thread(target=replica.pause, kwargs=how)
    pausing.start()
    while replica._pause is None:
        pass
    engine.allowed.release()
    pausing.join(600)


def test_what_is_preempted_goes_on_first_under_the_weights_of_then(stepped: StepByStep) -> None:
    replica = paused(stepped)
    answers = replica.submit_many([request(1, max_tokens=6), request(2, max_tokens=2)])
    replica.resume()
    paused_after(stepped, replica, 2, keep_kv=False)
    assert answers[1].done() and not answers[0].done() and stepped.sleeps == 1
    answers.append(replica.submit(request(3)))
    stepped.set_version(4)
    stepped.allowed.release(1000)
    replica.resume(closed=True)
    outputs = outputs_of(answers)
    assert stepped.joined == [[1, 2], [1, 3]]
    assert outputs[1].token_ids == [101, 102, 103, 104, 105, 106]
    assert outputs[1].policy_versions == [0, 0, 4, 4, 4, 4]
    assert outputs[3].policy_versions == [4] * 5


@pytest.mark.parametrize("preempts", [False, True])
def test_weights_change_between_two_steps_in_the_thread_that_takes_them(
    stepped: StepByStep, preempts: bool
) -> None:
    replica = paused(stepped)
    (answer,) = replica.submit_many([request(1, max_tokens=6)])
    threads: list[threading.Thread] = []

    def update() -> None:
        threads.append(threading.current_thread())
        assert (stepped._session is None) == preempts
        stepped.set_version(1)

    replica.resume()
    stepped.begun.acquire()
    changing = threading.Thread(target=replica.update_weights, args=[update], kwargs={"preempts": preempts})
    changing.start()
    while not replica._changes:
        pass
    stepped.allowed.release(1000)
    changing.join(600)
    output = answer.result(600)
    assert output.token_ids == [101, 102, 103, 104, 105, 106]
    if preempts:  # a session of the script asks for the version when requests join
        assert output.policy_versions == [0, 1, 1, 1, 1, 1]
    replica.pause(keep_kv=False)
    if preempts:
        replica.update_weights(update)
    assert threads[0].name == "rollout native-0"
    assert threads[1:] == ([threading.current_thread()] if preempts else [])
    with pytest.raises(KeyError, match="no such weight"):
        replica.update_weights(lambda: {}["no such weight"])


@pytest.mark.parametrize("every", [1, 3])
def test_preempting_changes_no_bit_in_exact_mode(every: int) -> None:
    requests = requests_for(prompts(6), n=2, max_tokens=12)
    wanted = run(exact_engine(prefixes=True), requests)
    engine = exact_engine(prefixes=True)
    steps = threading.Semaphore(0)
    opened = engine._new_session

    def new_session(closed: bool) -> Any:
        session: Any = opened(closed)
        step = session.step

        def counted() -> Any:
            steps.release()
            return step()

        session.step = counted
        return session

    engine._new_session = new_session  # type: ignore[method-assign]
    replica = paused(engine)
    answers = replica.submit_many(requests)
    pauses = 0
    while replica.load:
        replica.resume()
        for _ in range(every):
            steps.acquire(timeout=1.0)
        replica.pause(keep_kv=False)
        pauses += 1
    found = outputs_of(answers)
    assert pauses >= 3
    assert {number: (o.token_ids, o.log_probs, o.finish_reason) for number, o in found.items()} == {
        number: (o.token_ids, o.log_probs, o.finish_reason) for number, o in wanted.items()
    }


@pytest.mark.parametrize("how", ["closed", "paused", "changed"])
def test_nothing_holds_a_session_while_the_engine_gives_its_memory_back(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine()
    sessions: list[weakref.ref[Any]] = []
    held: list[int] = []
    begin, sleep = engine.open, engine.sleep

    def opened(**options: Any) -> Any:
        session = begin(**options)
        sessions.append(weakref.ref(session))
        return session

    def sleeps(level: int = 1) -> None:
        held.append(sum(session() is not None for session in sessions))
        sleep(level)

    monkeypatch.setattr(engine, "open", opened)
    monkeypatch.setattr(engine, "sleep", sleeps)
    replica = paused(engine)
    answers = replica.submit_many(requests_for(prompts(3), max_tokens=40))
    replica.resume(closed=how == "closed")
    if how == "paused":
        replica.pause(keep_kv=False)
        replica.resume(closed=True)
    elif how == "changed":
        replica.update_weights(lambda: None, preempts=True)
    outputs_of(answers)
    replica.pause(keep_kv=False)
    assert len(held) == (1 if how == "closed" else 2) and not any(held)


def test_an_engine_that_fails_drops_all_requests_and_can_be_used_again() -> None:
    engine = ScriptedEngine(dies_at=3)
    heard: list[tuple[BaseException, int]] = []
    replica = paused(engine, ended=lambda error, left: heard.append((error, left)))
    answers = replica.submit_many([request(1), request(2)])
    replica.resume()
    for answer in answers:
        with pytest.raises(ReplicaLost, match="native-0 died: RuntimeError: out of memory"):
            answer.result(600)
    with pytest.raises(ReplicaLost, match="native-0 died"):
        replica.pause()
    ((error, left),) = heard
    assert str(error).startswith("out of memory") and left == 2 and engine.sleeps == 1
    with pytest.raises(ReplicaLost, match="native-0 died"):
        replica.resume()
    engine.dies_at = None
    again = paused(engine)
    answers = again.submit_many([request(1)])
    again.resume(closed=True)
    assert len(outputs_of(answers)[1].token_ids) == 5, "nothing of before is left"


def test_what_is_forgotten_leaves_nothing_behind() -> None:
    engine = ScriptedEngine(seconds=0.001)
    replica = EngineReplica(engine)
    answers = replica.submit_many([request(1, LONG), request(2, LONG)])
    replica.forget("nobody reads them")
    for answer in answers:
        with pytest.raises(ReplicaLost, match="nobody reads them"):
            answer.result(600)
    assert replica.load == 0
    replica.pause(keep_kv=False)
    answers = replica.submit_many([request(1)])
    replica.resume(closed=True)
    assert list(outputs_of(answers)) == [1]


class Told(ReplicaRanks):
    """A later rank of a replica, which hears the commands of a list."""

    def __init__(self, commands: list[Commands]) -> None:
        super().__init__(size=2, rank=1)
        object.__setattr__(self, "commands", iter(commands))

    def from_first(self, value):  # type: ignore[no-untyped-def]
        assert value is None, "it has none of its own"
        return next(self.commands)  # type: ignore[attr-defined]


def test_a_later_rank_does_what_the_first_is_told() -> None:
    engine = ScriptedEngine()
    changed: list[int] = []
    heard = [
        Commands((request(1), request(2))),
        Commands(),
        Commands(aborted=(2,)),
        Commands(changes=1),
        Commands(pause="preempt"),
    ]
    replica = paused(engine, ranks=Told(heard))
    replica.resume()
    replica.update_weights(lambda: changed.append(engine.sleeps))
    replica.pause(keep_kv=False)
    assert engine.joined == [[1, 2]] and changed == [0] and engine.sleeps == 1
    assert replica.load == 0, "only the first rank has requests"


class First(ReplicaRanks):
    """The first rank of a replica, whose words are noted."""

    def __init__(self) -> None:
        super().__init__(size=2, rank=0)
        object.__setattr__(self, "said", [])

    def from_first(self, value):  # type: ignore[no-untyped-def]
        self.said.append(value)  # type: ignore[attr-defined]
        return value


def test_ranks_seldom_talk_in_a_closed_session() -> None:
    ranks = First()
    replica = paused(ScriptedEngine(), ranks=ranks)
    answers = replica.submit_many([request(1, max_tokens=3 * STEPS_PER_TALK)])
    replica.resume(closed=True)
    outputs_of(answers)
    replica.pause(keep_kv=False)
    assert len(ranks.said) == 3  # type: ignore[attr-defined]


def test_a_pause_that_is_interrupted_leaves_nothing_behind(
    stepped: StepByStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = paused(stepped)
    (answer,) = replica.submit_many([request(1)])
    replica.resume()
    stepped.begun.acquire()

    def interrupted(*args: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(replica._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            replica.pause(keep_kv=False)
    stepped.allowed.release(1000)
    assert len(answer.result(600).token_ids) == 5
    replica.close()


def test_a_pause_and_a_change_that_preempts_may_come_together(stepped: StepByStep) -> None:
    replica = paused(stepped)
    (answer,) = replica.submit_many([request(1)])
    replica.resume()
    stepped.begun.acquire()
    changing = threading.Thread(
        target=replica.update_weights, args=[lambda: stepped.set_version(1)], kwargs={"preempts": True}
    )
    changing.start()
    pausing = threading.Thread(target=replica.pause, kwargs={"keep_kv": False})
    pausing.start()
    while not (replica._changes and replica._pause):
        pass
    stepped.allowed.release(1000)
    changing.join(600)
    pausing.join(600)
    assert replica.failure is None and replica.stands
    replica.resume(closed=True)
    assert answer.result(600).policy_versions == [0, 1, 1, 1, 1]


def test_a_resume_waits_for_a_closed_session_that_is_about_to_end() -> None:
    engine = ScriptedEngine()
    asleep = threading.Semaphore(0)
    goes_on = threading.Semaphore(0)

    def sleep(level: int = 1) -> None:
        asleep.release()
        goes_on.acquire()

    engine.sleep = sleep  # type: ignore[method-assign]
    replica = paused(engine)
    replica.submit_many([request(1)])
    replica.resume(closed=True)
    asleep.acquire()
    (answer,) = replica.submit_many([request(2)])
    resuming = threading.Thread(target=replica.resume, kwargs={"closed": True})
    resuming.start()
    goes_on.release(2)
    assert len(answer.result(600).token_ids) == 5
    resuming.join(600)


def test_requests_that_wait_are_counted_also_where_the_engine_stands() -> None:
    replica = paused(ScriptedEngine())
    replica.submit_many([request(1), request(2)])
    assert replica.waiting == replica.load == 2 and replica.crowded_out == 0
