"""Many episodes at once: each failure under its cause, tried again by its cause, and nothing left over."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from spoken_engine import LIMITS, FakeSession, client_of, episode

from hybridflow.agent.episode import AgentResult, Episode, LengthReached, Policy, TrajectoryFailed
from hybridflow.agent.runner import Concurrency, Limit, Runner
from hybridflow.config.agent import AgentConfig, RetriesConfig
from hybridflow.errors import DataError
from hybridflow.models.tiny import create_tiny_tokenizer
from hybridflow.processes.local import LocalHosts
from hybridflow.protocol.prompt import Prompt
from hybridflow.protocol.trajectory import PolicyCall, Trajectory
from hybridflow.rollout.base import GenerationRequest

END = 3
TOKENIZER = create_tiny_tokenizer()
Play = Callable[[Episode, Policy], object]


class Scripted:
    """An agent that does what a coroutine function does."""

    def __init__(self, play: Play) -> None:
        self.play = play

    async def run(self, episode: Episode, policy: Policy) -> AgentResult:
        return await self.play(episode, policy)  # type: ignore[misc,no-any-return]


def three_more(request: GenerationRequest) -> list[int]:
    """The three numbers after the last one of the prompt."""
    last = request.prompt_token_ids[-1]
    return [last + 1, last + 2, last + 3]


def played(
    play: Play,
    *episodes: Episode,
    session: FakeSession | None = None,
    config: AgentConfig | None = None,
    others: tuple[FakeSession, ...] = (),
) -> tuple[list[Trajectory], Runner]:
    """Play episodes; give what came of them in their order."""
    config = config or AgentConfig()
    limit = Limit(config.max_concurrent)
    runner = Runner(lambda _: Scripted(play), TOKENIZER, LIMITS, config, hosts=LocalHosts(), limit=limit)
    told: dict[int, Trajectory] = {}

    async def work() -> None:
        with client_of(session or FakeSession(three_more, end=END), *others) as client:
            await runner.run(client, episodes, told.__setitem__)
            assert client.load == 0, "no request is left behind"
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"tasks are left behind: {left}"

    asyncio.run(work())
    return [told[place] for place in range(len(episodes))], runner


async def two_turns(episode: Episode, policy: Policy) -> AgentResult:
    first = await policy.generate(episode.prompt)
    longer = (*episode.prompt.token_ids, *first.token_ids, 50)
    await policy.generate(Prompt(longer))
    return AgentResult(
        reward=1.0, turn_rewards={0: 0.25}, metrics={"fun": 2.0}, extra_info={"tool_rewards": [0.5]}
    )


def test_a_trajectory_has_its_calls_as_one_row() -> None:
    (found,), _ = played(two_turns, episode())
    assert found.outcome.kind == "finished" and found.turns == 2 and found.reward == 1.0
    (row,) = found.lineages
    assert row.prompt.token_ids == (5, 6)
    assert [(segment.token_ids, segment.sampled) for segment in row.segments] == [
        ((7, 8, 9, END), True),
        ((50,), False),
        ((51, 52, 53, END), True),
    ]
    info = found.extra["extra_info"]
    assert info["num_turns"] == 2 and info["tool_rewards"] == [0.5]
    assert found.extra["ground_truth"] == "4" and found.metrics == {"fun": 2.0}


def test_draws_differ_by_call_and_by_sample_and_by_nothing_else() -> None:
    seeds: list[int] = []

    def note(request: GenerationRequest) -> list[int]:
        if request.seed not in seeds:
            seeds.append(request.seed)
        return three_more(request)

    played(two_turns, episode(0), episode(1), session=FakeSession(note, end=END))
    assert len(seeds) == 4 and {100, 101} <= set(seeds), "the first call has the seed of a single turn"
    before = sorted(seeds)
    seeds.clear()
    played(two_turns, episode(1), episode(0), session=FakeSession(note, end=END))
    assert sorted(seeds) == before


def raises(error: BaseException) -> Play:
    async def play(episode: Episode, policy: Policy) -> AgentResult:
        await policy.generate(episode.prompt)
        raise error

    return play


@pytest.mark.parametrize(
    "error, kind, cause",
    [
        (TrajectoryFailed("infrastructure", "lost"), "failed", "infrastructure"),
        (TrajectoryFailed("data", "no such prompt"), "failed", "data"),
        (DataError("a row of another form"), "failed", "data"),
        (ZeroDivisionError("a mistake"), "failed", "environment"),
        (SystemExit(3), "failed", "environment"),
        (LengthReached("no room"), "truncated", None),
    ],
)
def test_each_failure_has_its_cause(error: BaseException, kind: str, cause: str | None) -> None:
    (found,), _ = played(raises(error), episode())
    assert (found.outcome.kind, found.outcome.cause) == (kind, cause)
    assert bool(found.lineages) == (kind == "truncated"), "a trajectory that failed is never a row"
    if kind == "failed":
        assert str(error) in found.outcome.detail


@pytest.mark.parametrize(
    "cause, tries", [("infrastructure", 4), ("environment", 3), ("deadline", 2), ("data", 1)]
)
def test_failures_are_tried_again_by_their_cause_with_other_draws(cause: str, tries: int) -> None:
    seeds: list[int] = []

    async def play(episode: Episode, policy: Policy) -> AgentResult:
        seeds.append(episode.seed)
        raise TrajectoryFailed(cause, "again")  # type: ignore[arg-type]

    config = AgentConfig(retries=RetriesConfig(infrastructure=3, environment=2, deadline=1))
    (found,), runner = played(play, episode(), config=config)
    assert found.outcome.cause == cause and len(seeds) == len(set(seeds)) == tries
    assert runner.retried == Counter({cause: tries - 1}) - Counter()


@pytest.mark.parametrize(
    "result, told",
    [
        (None, "wanted an AgentResult"),
        (AgentResult(reward=float("nan")), "wanted finite numbers"),
        (AgentResult(reward="high"), "wanted finite numbers"),  # type: ignore[arg-type]
        (AgentResult(reward=1.0, turn_rewards={3: 1.0}), r"calls \[3\], and there were 1"),
    ],
)
def test_a_result_that_is_none_fails_its_trajectory_and_not_the_run(result: object, told: str) -> None:
    async def play(episode: Episode, policy: Policy) -> object:
        await policy.generate(episode.prompt)
        return result

    (found,), _ = played(play, episode())
    assert found.outcome.cause == "environment" and re.search(told, found.outcome.detail)


def test_an_agents_own_timeout_is_told_as_its_own() -> None:
    (found,), _ = played(raises(TimeoutError("no answer of the shop")), episode())
    assert found.outcome.cause == "deadline" and "no answer of the shop" in found.outcome.detail


def test_a_retry_that_goes_well_is_the_trajectory() -> None:
    tries = 0

    async def play(episode: Episode, policy: Policy) -> AgentResult:
        nonlocal tries
        tries += 1
        if tries == 1:
            await policy.generate(episode.prompt)
            raise ValueError("at first")
        return await two_turns(episode, policy)

    (found,), runner = played(play, episode())
    assert not found.failed and found.turns == 2, "calls of the first try are forgotten"
    assert runner.retried == {"environment": 1}


def test_a_trajectory_that_hangs_ends_at_its_deadline() -> None:
    async def play(episode: Episode, policy: Policy) -> AgentResult:
        await asyncio.Event().wait()
        raise AssertionError

    found, _ = played(play, episode(0), episode(1), config=AgentConfig(deadline=0.05))
    assert [one.outcome.cause for one in found] == ["deadline"] * 2
    assert "agent.deadline=0.05" in found[0].outcome.detail


def test_an_agent_that_does_not_heed_its_deadline_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridflow.agent.runner.LEAVE_SECONDS", 0.05)
    deaf = 2

    async def play(episode: Episode, policy: Policy) -> AgentResult:
        nonlocal deaf
        while deaf:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                deaf -= 1
        return AgentResult(reward=1.0)

    async def work() -> list[Trajectory]:
        found: list[Trajectory] = []
        config = AgentConfig(deadline=0.05)
        runner = Runner(
            lambda _: Scripted(play), TOKENIZER, LIMITS, config, hosts=LocalHosts(), limit=Limit()
        )
        with client_of(FakeSession(three_more, end=END)) as client:
            await runner.run(client, [episode()], lambda _, trajectory: found.append(trajectory))
        return found

    (found,) = asyncio.run(work())
    assert deaf == 0, "it was cancelled at its deadline, and again when the event loop ended"
    assert found.outcome.cause == "deadline" and "did not end within" in found.outcome.detail


def test_an_agent_without_a_call_has_failed() -> None:
    async def play(episode: Episode, policy: Policy) -> AgentResult:
        return AgentResult(reward=1.0)

    (found,), _ = played(play, episode())
    assert found.outcome.cause == "environment" and "without a call" in found.outcome.detail


def test_a_first_prompt_that_is_too_long_is_the_datas_fault_and_a_later_one_truncates() -> None:
    async def single(episode: Episode, policy: Policy) -> AgentResult:
        await policy.generate(episode.prompt)
        return AgentResult()

    (found,), _ = played(single, episode(prompt=[5] * 201))
    assert found.outcome.cause == "data" and "data.max_prompt_length=200" in found.outcome.detail

    async def grows(episode: Episode, policy: Policy) -> AgentResult:
        prompt = episode.prompt
        while True:
            output = await policy.generate(prompt)
            assert len(prompt) + len(output.token_ids) <= 400
            prompt = Prompt((*prompt.token_ids, *output.token_ids, 9))

    (found,), _ = played(grows, episode())
    assert found.outcome.kind == "truncated" and len(found.lineages) == 1
    assert 395 < len(found.lineages[0].response_ids) + 2 <= 400


def test_a_lost_replica_costs_a_call_and_no_trajectory() -> None:
    dies = FakeSession(three_more, end=END, dies_at=2)
    found, _ = played(
        two_turns,
        *(episode(number) for number in range(6)),
        session=dies,
        others=(FakeSession(three_more, end=END),),
    )
    assert not any(one.failed for one in found)
    assert all(len(one.lineages) == 1 for one in found), "a call that was lost is not recorded"


def test_where_all_replicas_are_lost_everything_fails_and_nothing_hangs() -> None:
    found, _ = played(
        two_turns,
        *(episode(number) for number in range(4)),
        session=FakeSession(three_more, end=END, dies_at=2),
    )
    assert {one.outcome.cause for one in found} == {"infrastructure"}


def test_two_thousand_trajectories_with_failures_of_every_kind() -> None:
    """Each trajectory's fate is known beforehand, and is what is counted."""
    rng = random.Random(0)
    fates = [rng.choices(["ok", "raises", "hangs", "data"], [92, 5, 2, 1])[0] for _ in range(2000)]

    async def play(episode: Episode, policy: Policy) -> AgentResult:
        fate = fates[episode.sample]
        await asyncio.sleep(rng.random() * 0.01)
        if fate == "data":
            raise TrajectoryFailed("data", "bad")
        await policy.generate(episode.prompt)
        if fate == "raises":
            raise RuntimeError("a tool that raises")
        if fate == "hangs":
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        return await two_turns(episode, policy)

    config = AgentConfig(retries=RetriesConfig(environment=0), max_concurrent=2000)
    found, runner = played(play, *(episode(number) for number in range(2000)), config=config)
    causes = Counter(str(one.outcome.cause) for one in found)
    assert causes == {
        "None": fates.count("ok"),
        "environment": fates.count("raises"),
        "deadline": fates.count("hangs"),
        "data": fates.count("data"),
    }
    assert all(one.failed == (not one.lineages) for one in found)
    assert runner.peak <= 2000


def test_places_double_until_there_is_a_crowd_and_then_shrink_fast_and_grow_slowly() -> None:
    crowded = False
    limit = Limit()

    async def scene() -> list[int]:
        nonlocal crowded
        places = Concurrency(limit, 1000, lambda: crowded)
        limits = []
        leave = asyncio.Event()

        async def stay() -> None:
            async with places.place():
                await leave.wait()

        async def settle() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        staying = [asyncio.create_task(stay()) for _ in range(200)]
        for now in (False, False, True, True, True):
            crowded = now
            await settle()
            await places.look()
            limits.append(limit.value)
        leave.set()
        await asyncio.gather(*staying)
        await places.look()
        limits.append(limit.value)
        crowded = False
        leave.clear()
        staying = [asyncio.create_task(stay()) for _ in range(200)]
        await settle()
        await places.look()
        limits.append(limit.value)
        leave.set()
        await asyncio.gather(*staying)
        return limits

    found = asyncio.run(scene())
    assert found[:3] == [128, 256, 128], "200 run, and half of 256 may"
    assert found[3:5] == [128, 128], "the decrease is waited for: 200 still run"
    assert found[5:] == [64, 72] and limit.was_crowded, "the next step goes on with what was found"


def test_a_cancellation_that_comes_out_of_an_agent_is_a_failure_that_is_told() -> None:
    async def play(episode: Episode, policy: Policy) -> AgentResult:
        await policy.generate(episode.prompt)
        raise asyncio.CancelledError

    config = AgentConfig(retries=RetriesConfig(environment=0))
    found, _ = played(play, episode(0), episode(1), config=config)
    assert [one.outcome.cause for one in found] == ["environment"] * 2


def test_calls_that_an_agent_leaves_behind_are_ended(caplog: pytest.LogCaptureFixture) -> None:
    left: list[asyncio.Task[object]] = []

    async def play(episode: Episode, policy: Policy) -> AgentResult:
        left.append(asyncio.create_task(policy.generate(Prompt((90,)))))
        await policy.generate(episode.prompt)
        return AgentResult(reward=1.0)

    def endless(request: GenerationRequest) -> list[int]:
        return three_more(request) if request.prompt_token_ids != (90,) else [9] * 10_000

    async def work() -> Trajectory:
        session = FakeSession(endless, end=END)
        told: list[Trajectory] = []
        runner = Runner(
            lambda _: Scripted(play), TOKENIZER, LIMITS, AgentConfig(), hosts=LocalHosts(), limit=Limit()
        )
        with client_of(session) as client:
            await runner.run(client, [episode(max_tokens=300)], lambda _, each: told.append(each))
            with pytest.raises(TrajectoryFailed, match="aborted"):
                await left[0]
            assert client.load == 0 and session.idle
        return told[0]

    assert not asyncio.run(work()).failed


def test_an_answer_in_parts_is_one_turn_and_one_text() -> None:
    """An agent loop that masks a token inside of an answer leaves two calls of it."""

    async def play(episode: Episode, policy: Policy) -> AgentResult:
        output = await policy.generate(episode.prompt)
        (call,) = policy.calls
        first = replace(output, token_ids=[7], log_probs=[-0.5], policy_versions=[0])
        last = replace(output, token_ids=[9, END], log_probs=[-0.5] * 2, policy_versions=[0] * 2)
        parts = [PolicyCall(call.prompt, first), PolicyCall(Prompt((5, 6, 7, 8)), last)]
        return AgentResult(calls=parts)

    (found,), _ = played(play, episode())
    assert found.turns == 1 and found.extra["solution_str"] == TOKENIZER.decode([7, 8, 9])


def test_a_conversation_without_room_that_nobody_can_score_has_failed() -> None:
    async def grows(episode: Episode, policy: Policy) -> AgentResult:
        prompt = episode.prompt
        while True:
            output = await policy.generate(prompt)
            prompt = Prompt((*prompt.token_ids, *output.token_ids, 9))

    (found,), _ = played(grows, episode(data_source=None))
    assert found.outcome.cause == "data", "the reward function of the run needs a source"
