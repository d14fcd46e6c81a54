"""LLMClient over replicas: routing, streams, cancellation, deadlines, pauses for a weight swap, engines that
die.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from fake_session import FakeSession

from hybridflow.errors import RolloutError
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, PartialOutput, SamplingParams
from hybridflow.rollout.client import LEAST_WAIT, DeadlinePassed, EngineReplica, LLMClient, ReplicaLost

Make = Callable[..., tuple[LLMClient, list[FakeSession]]]


def request(number: int, *, prompt: tuple[int, ...] = (1, 2), max_tokens: int = 5) -> GenerationRequest:
    return GenerationRequest(number, Prompt(prompt), SamplingParams(max_tokens), seed=number)


def says(request: GenerationRequest) -> list[int]:
    return [100 + request.request_id] * 10_000


@pytest.fixture
def make() -> Iterator[Make]:
    """Clients over replicas on fake sessions; all are closed at the end."""
    replicas: list[EngineReplica] = []

    def made(count: int = 1, **options: Any) -> tuple[LLMClient, list[FakeSession]]:
        sessions = [FakeSession(says, **options) for _ in range(count)]
        replicas.extend(EngineReplica(session, name=f"native-{n}") for n, session in enumerate(sessions))
        return LLMClient(replicas[-count:]), sessions

    yield made
    for replica in replicas:
        replica.close()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(work, 600)

    return asyncio.run(bounded())


def test_each_request_gets_its_own_output_from_one_thread(make: Make) -> None:
    client, (session,) = make(max_rows=3)

    async def work() -> list[GenerationOutput]:
        return await asyncio.gather(*(client.generate(request(number)) for number in range(20)))

    outputs = run(work())
    assert [output.token_ids for output in outputs] == [[100 + number] * 5 for number in range(20)]
    assert len(session.threads) == 1 and session.idle and client.load == client.replicas[0].load == 0


def test_requests_that_are_submitted_together_join_before_one_step(make: Make) -> None:
    client, (session,) = make()
    session.version = 7
    (replica,) = client.replicas
    assert isinstance(replica, EngineReplica)
    with pytest.raises(RolloutError, match="the same request_id: 1"):
        replica.submit_many([request(0), request(1), request(1)])
    assert replica.load == session.num_added == 0  # none of them has joined
    answers = replica.submit_many([request(number) for number in range(8)])
    assert [answer.result().request_id for answer in answers] == list(range(8))
    assert session.steps == 5 and replica.version == 7


def test_an_output_with_an_error_leaves_the_others_alone(make: Make) -> None:
    client, _ = make()

    async def work() -> tuple[GenerationOutput, GenerationOutput]:
        return await asyncio.gather(client.generate(request(0, prompt=(0,))), client.generate(request(1)))

    bad, good = run(work())
    assert bad.finish_reason == "error" and "bad prompt" in str(bad.error) and good.finish_reason == "length"


def test_requests_go_to_the_least_loaded_and_keys_stay(make: Make) -> None:
    client, sessions = make(2, seconds=0.002)

    async def work() -> None:
        await asyncio.gather(*(client.generate(request(number)) for number in range(10)))
        assert [session.num_added for session in sessions] == [5, 5]
        await asyncio.gather(*(client.generate(request(number), sticky="talk") for number in range(10)))
        assert sorted(session.num_added for session in sessions) == [5, 15]
        await asyncio.gather(*(client.generate(request(number), sticky="talk") for number in range(100)))

    run(work())
    fewer, more = sorted(session.num_added for session in sessions)
    assert fewer > 15, "a queue far longer than the other's sends a key elsewhere"
    assert fewer + more == 120


def test_a_request_id_runs_once_at_a_time(make: Make) -> None:
    client, _ = make(seconds=0.01)

    async def work() -> None:
        first = asyncio.ensure_future(client.generate(request(7)))
        await asyncio.sleep(0)
        with pytest.raises(RolloutError, match="request 7 is running already"):
            await client.generate(request(7))
        assert (await first).finish_reason == "length"
        assert (await client.generate(request(7))).finish_reason == "length"

    run(work())


def test_a_stream_grows_and_its_last_output_is_whole(make: Make) -> None:
    client, (session,) = make(gated=True)

    async def work() -> list[PartialOutput | GenerationOutput]:
        found: list[PartialOutput | GenerationOutput] = []
        session.gate.release()
        async for output in client.stream(request(3, max_tokens=30)):
            found.append(output)
            session.gate.release()  # the next step begins when this one's piece is read
        return found

    *growing, last = run(work())
    assert len(growing) >= 29 and all(isinstance(output, PartialOutput) for output in growing)
    ends = 0
    for output in growing:  # each piece begins where the one before ended, so that no token is copied twice
        assert output.start == ends and output.token_ids
        ends += len(output.token_ids)
    assert isinstance(last, GenerationOutput) and last.token_ids == [103] * 30
    assert ends <= session.num_copied < 30


def test_a_slow_reader_gets_fewer_and_longer_pieces(make: Make) -> None:
    client, (session,) = make(seconds=0.001)

    async def work() -> int:
        count = 0
        async for _ in client.stream(request(3, max_tokens=60)):
            count += 1
            while not session.idle:  # all the other tokens come before the next piece is asked for
                await asyncio.sleep(0.002)
        return count

    assert run(work()) <= 3


def test_who_stops_waiting_frees_the_row(make: Make) -> None:
    client, (session,) = make(seconds=0.002)

    async def work() -> None:
        waiting = asyncio.ensure_future(client.generate(request(0, max_tokens=9_000)))
        async with aclosing(client.stream(request(1, max_tokens=9_000))) as outputs:
            async for _ in outputs:
                break
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        while not session.idle or client.replicas[0].load:
            await asyncio.sleep(0.002)
        assert session.steps < 8_000 and client.load == 0

    run(work())


def test_a_deadline_names_request_replica_and_limit(make: Make) -> None:
    client, (session,) = make(seconds=0.002)

    async def work() -> None:
        with pytest.raises(
            DeadlinePassed, match=r"request 4 had no answer of replica native-0 within 0.05 s"
        ):
            await client.generate(request(4, max_tokens=5_000), deadline_s=0.05)
        with pytest.raises(DeadlinePassed, match="request 5"):
            async for _ in client.stream(request(5, max_tokens=5_000), deadline_s=0.05):
                pass
        while not session.idle:
            await asyncio.sleep(0.002)

    run(work())


def test_a_deadline_counts_the_seconds_of_the_replica(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    client, (session,) = make(seconds=0.002)
    looks = iter([0.0, *[0.0] * 20, 9.9, 10.0])
    monkeypatch.setattr(EngineReplica, "clock", property(lambda self: next(looks)))

    async def wait(*args: Any, timeout: float) -> None:  # its time passes, and the replica's stands
        assert 0 < timeout <= 10
        await asyncio.sleep(0)

    async def work() -> None:
        with pytest.raises(DeadlinePassed, match="within 10 s"):
            await client.generate(request(4, max_tokens=5_000), deadline_s=10.0)
        assert next(looks, None) is None
        while not session.idle:
            await asyncio.sleep(0.002)

    monkeypatch.setattr("hybridflow.rollout.client.asyncio.wait", wait)
    run(work())


def test_a_clock_that_stands_just_before_the_deadline_keeps_nobody_busy(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = make()
    now = 0.0
    waits: list[float] = []
    wait_for_real = asyncio.wait

    async def wait(answers: Any, *, timeout: float) -> None:
        nonlocal now
        waits.append(timeout)
        now = 10.0 - 1e-6
        if len(waits) == 5:
            await wait_for_real(answers)

    monkeypatch.setattr(EngineReplica, "clock", property(lambda self: now))
    monkeypatch.setattr("hybridflow.rollout.client.asyncio.wait", wait)
    run(client.generate(request(4), deadline_s=10.0))
    assert waits == [10.0, *[LEAST_WAIT] * 4]


def test_a_pause_swaps_weights_in_flight(make: Make) -> None:
    client, sessions = make(2, seconds=0.002)

    async def work() -> list[GenerationOutput]:
        waiting = [
            asyncio.ensure_future(client.generate(request(number, max_tokens=2_000))) for number in range(4)
        ]
        while min(session.steps for session in sessions) < 3:
            await asyncio.sleep(0.002)
        await client.pause()
        steps = [session.steps for session in sessions]
        await asyncio.sleep(0.03)
        assert [session.steps for session in sessions] == steps, "a paused replica does not step"
        for session in sessions:
            session.version = 1
            session.seconds = 0.0
        client.resume()
        return await asyncio.gather(*waiting)

    for output in run(work()):
        assert output.finish_reason == "length" and set(output.policy_versions) == {0, 1}
        assert output.policy_versions == sorted(output.policy_versions)


def test_a_pause_that_is_given_up_leaves_nothing_standing(make: Make) -> None:
    client, _ = make(2, seconds=0.05)

    async def work() -> list[GenerationOutput]:
        waiting = [asyncio.ensure_future(client.generate(request(number))) for number in range(4)]
        await asyncio.sleep(0.02)
        pausing = asyncio.ensure_future(client.pause())
        await asyncio.sleep(0)
        pausing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pausing
        return await asyncio.gather(*waiting)

    assert all(len(output.token_ids) == 5 for output in run(work()))


def test_a_late_abort_does_not_end_the_next_request_of_that_id(make: Make) -> None:
    client, _ = make(seconds=0.001)
    (replica,) = client.replicas
    first = replica.submit(request(0))
    assert first.result(600).finish_reason == "length"
    replica.pause()
    replica.abort([0])
    second = replica.submit(request(0))
    replica.resume()
    assert second.result(600).finish_reason == "length"


def test_a_reader_whose_loop_is_gone_harms_nobody(make: Make) -> None:
    client, _ = make(seconds=0.002)

    async def leave() -> None:
        async for _ in client.stream(request(0, max_tokens=200)):
            return

    loop = asyncio.new_event_loop()
    loop.run_until_complete(loop.create_task(leave()))
    loop.close()  # without ending the stream: its tap is still there
    assert len(run(client.generate(request(1))).token_ids) == 5 and client.failure is None


def test_an_engine_that_dies_is_named_and_what_was_finished_is_kept(make: Make) -> None:
    client, (session,) = make(dies_at=8)

    async def work() -> list[Any]:
        requests = [request(number, max_tokens=length) for number, length in enumerate((3, 5, 50, 60))]
        return await asyncio.gather(*(client.generate(each) for each in requests), return_exceptions=True)

    short, middle, *lost = run(work())
    assert (len(short.token_ids), len(middle.token_ids)) == (3, 5)
    for error in lost:
        assert isinstance(
            error, ReplicaLost
        ) and "native-0 died: RuntimeError: out of memory, as ordered" in str(error)
    assert session.closed and "native-0 died" in str(client.failure)
    with pytest.raises(ReplicaLost, match="no replica is alive: replica native-0 died"):
        run(client.generate(request(9)))


def test_the_living_replicas_go_on(make: Make) -> None:
    dying, _ = make(dies_at=1)
    living, (session,) = make()
    client = LLMClient([*dying.replicas, *living.replicas])

    async def work() -> list[Any]:
        await asyncio.gather(
            *(client.generate(request(number)) for number in range(2)), return_exceptions=True
        )
        return await asyncio.gather(*(client.generate(request(number), sticky=1) for number in range(10, 16)))

    assert all(output.finish_reason == "length" for output in run(work())) and session.num_added >= 6
    assert client.failure is None
    run(client.pause())
    client.resume()


def test_closing_tells_those_who_wait(make: Make) -> None:
    client, (session,) = make(seconds=0.002)

    async def work() -> None:
        waiting = asyncio.ensure_future(client.generate(request(0, max_tokens=5_000)))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(client.replicas[0].close)
        with pytest.raises(ReplicaLost, match="native-0 was closed"):
            await waiting

    run(work())
    assert session.closed


def test_a_session_that_does_not_open_is_a_dead_replica() -> None:
    class Broken(FakeSession):
        def open(self, *, closed: bool = False) -> FakeSession:
            raise RolloutError("the engine is asleep")

    client = LLMClient([EngineReplica(Broken(says))])
    with pytest.raises(ReplicaLost, match="native-0 died: RolloutError: the engine is asleep"):
        run(client.generate(request(0)))
    with pytest.raises(RolloutError, match="at least one replica"):
        LLMClient([])
