"""Limits of a reward behind a service, further tries, and outcomes that are kept, without a clock."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from pathlib import Path

import pytest

from hybridflow.config.reward import CustomRewardConfig, RewardConfig
from hybridflow.rewards import RewardManager, ScoreRequest
from hybridflow.rewards.build import CachedScorer, InProcessScorer, build_reward_manager
from hybridflow.rewards.function import RewardFunction
from hybridflow.rewards.pool import RateLimit
from hybridflow.rewards.result import ScoringOutcome


def admissions(config: RewardConfig, count: int, seconds_each: float) -> tuple[list[float], int]:
    """Return when `count` requests were let through on a clock of sleeps, and the most under way at once."""
    clock = [0.0]
    under_way = [0]
    times: list[float] = []
    most = 0

    async def sleep(seconds: float) -> None:
        clock[0] += seconds
        await asyncio.sleep(0)

    limit = RateLimit(config, now=lambda: clock[0], sleep=sleep)

    async def one() -> None:
        nonlocal most
        async with limit.admitted():
            times.append(clock[0])
            under_way[0] += 1
            most = max(most, under_way[0])
            for _ in range(10):
                await asyncio.sleep(0)
            under_way[0] -= 1

    async def run() -> None:
        await asyncio.gather(*(one() for _ in range(count)))

    asyncio.run(run())
    return times, most


def test_requests_tokens_and_places_are_limited() -> None:
    times, _ = admissions(RewardConfig(max_rpm=120), 5, 0.0)
    assert times == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0])
    by_tokens = RewardConfig(max_rpm=6000, max_tpm=6000, estimated_tokens_per_request=300)
    assert admissions(by_tokens, 3, 0.0)[0] == pytest.approx([0.0, 3.0, 6.0])
    assert admissions(RewardConfig(max_concurrent=3), 12, 0.0)[1] == 3
    assert admissions(RewardConfig(), 12, 0.0) == ([0.0] * 12, 12)


FLAKY = """
from pathlib import Path
def compute_score(data_source, solution_str, ground_truth, extra_info):
    calls = Path(ground_truth)
    calls.write_text(calls.read_text() + solution_str if calls.exists() else solution_str)
    if solution_str == "b" or (solution_str == "a" and calls.read_text().count("a") < 2):
        raise ConnectionError("away")
    return {"score": 1.0, "acc": 1}
"""


def test_a_reward_that_fails_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "flaky.py").write_text(FLAKY)
    calls = tmp_path / "calls"
    function = CustomRewardConfig(str(tmp_path / "flaky.py"))
    config = RewardConfig(
        custom_reward_function=function, num_workers=1, timeout=600.0, max_retries=1, on_error="zero"
    )
    with build_reward_manager(config, seed=0) as manager, manager.open() as session:
        for place, text in enumerate("abc"):
            session.add(place, ScoreRequest("x", text, str(calls)))
        batch = session.result()
    assert batch.scores == [1.0, 0.0, 1.0] and sorted(calls.read_text()) == list("aabbc")
    assert (batch.metrics["reward/num_retries"], batch.metrics["reward/num_errors"]) == (2.0, 1.0)


def test_equal_responses_are_scored_once_and_counted() -> None:
    called: list[str] = []

    def compute_score(*, solution_str: str, **row: object) -> float:
        called.append(solution_str)
        if solution_str == "bad":
            raise ValueError("no")
        return float(len(called))

    scorer = CachedScorer(InProcessScorer(lambda: RewardFunction.of(compute_score), 30.0), size=2)
    manager = RewardManager(scorer, on_error="zero")

    def scores(*texts: str) -> list[float]:
        with manager.open() as session:
            for place, text in enumerate(texts):
                session.add(place, ScoreRequest("x", text, "truth", {"index": 3}))
            batch = session.result()
        counts.append(batch.metrics.get("reward/num_cached", 0.0))
        return batch.scores

    counts: list[float] = []
    assert scores("a", "b", "a", "a") == [1.0, 2.0, 1.0, 1.0]
    assert scores("b", "c", "bad") == [2.0, 3.0, 0.0]
    # "a" is the oldest of three and forgotten; an error is not kept
    assert scores("c", "a", "bad") == [3.0, 5.0, 0.0]
    assert called == ["a", "b", "c", "bad", "a", "bad"] and counts == [2.0, 1.0, 1.0]
    manager.close()


def test_an_outcome_is_found_while_another_thread_keeps_one() -> None:
    scorer = CachedScorer(InProcessScorer(lambda: RewardFunction.of(lambda **_: 1.0), 30.0), size=1)
    outcome = ScoringOutcome(score=0.5, tries=0)
    keeper = threading.Thread(target=scorer.keep, args=(b"new", outcome))

    class Kept(OrderedDict[bytes, ScoringOutcome]):
        def move_to_end(self, key: bytes, last: bool = True) -> None:
            if key == b"old":
                keeper.start()  # it would forget this key
                keeper.join(0.2)
            super().move_to_end(key, last)

    scorer._kept = Kept()
    scorer.keep(b"old", outcome)
    assert scorer.find(b"old") == outcome
    keeper.join()
    assert scorer.find(b"old") is None and scorer.find(b"new") == outcome
    scorer.close()


def test_rows_that_cannot_be_compared_equal_no_other_of_any_step() -> None:
    called: list[str] = []

    def compute_score(solution_str: str, **row: object) -> float:
        called.append(solution_str)
        return float(len(called))

    scorer = CachedScorer(InProcessScorer(lambda: RewardFunction.of(compute_score), 30.0), size=8)
    with RewardManager(scorer) as manager:
        for text in ("first", "second"):
            with manager.open() as session:
                session.add(0, ScoreRequest("x", text, "truth", {"lock": threading.Lock()}))
                session.result()
    assert called == ["first", "second"]
