"""Scores on their tokens, and what a reward that fails does to its row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridflow.agent.collate import collate
from hybridflow.config.reward import RewardConfig
from hybridflow.episodes.scoring import Scoring
from hybridflow.protocol.columns import place_scores
from hybridflow.protocol.prompt import Prompt
from hybridflow.protocol.trajectory import Lineage, Outcome, Segment, Trajectory
from hybridflow.rewards.build import InProcessScorer
from hybridflow.rewards.function import RewardFunction
from hybridflow.rewards.manager import RewardManager


def test_a_score_lands_on_the_last_sampled_token() -> None:
    mask = torch.tensor(
        [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]]
    ).bool()
    placed = place_scores(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), mask)
    assert placed.tolist() == [
        [0, 0, 0, 1],
        [0, 2, 0, 0],
        [0, 0, 3, 0],
        [4, 0, 0, 0],
        [0, 0, 0, 0],
        [0, 6, 0, 0],
    ]
    assert not placed[~mask].any()
    assert place_scores(torch.tensor([1.0, 2.0]), torch.zeros(2, 0, dtype=torch.bool)).shape == (2, 0), (
        "no response has a token"
    )


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Any:
    if solution_str == "broken":
        raise ValueError("no number in it")
    right = float(solution_str == ground_truth)
    return {"score": right + extra_info.get("bonus", 0.0), "acc": right, "pred": solution_str}


def trajectories(*solutions: str) -> list[Trajectory]:
    """A trajectory of one sampled token for each text; the second has a bonus."""
    made = []
    for number, text in enumerate(solutions):
        bonus = {"bonus": 0.5} if number == 1 else {}
        facts = {"data_source": "sums", "solution_str": text, "ground_truth": "4", "extra_info": bonus}
        row = Lineage(Prompt((5,)), (Segment((6,), True, (-1.0,), (0,)),))
        made.append(Trajectory(0, number, (row,), extra=facts))
    return made


def score(
    made: list[Trajectory], rewards: RewardManager, *, failures_count: bool = True
) -> tuple[list[Trajectory], dict[str, float]]:
    """Score trajectories that end in another order than theirs."""
    with rewards.open() as session:
        scoring = Scoring(session)
        for place in reversed(range(len(made))):
            scoring.ended(place, made[place])
        scored, metrics = scoring.rewarded(session.result(), failures_count=failures_count)
    return scored, metrics.to_floats()


def manager(on_error: Any = "raise", function: Any = compute_score) -> RewardManager:
    scorer = InProcessScorer(lambda: RewardFunction.of(function), RewardConfig().timeout)
    return RewardManager(scorer, on_error=on_error)


def test_a_reward_cannot_replace_a_column_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    def presuming(**row: Any) -> Any:
        return {"score": 1.0, "uid": "mine", "reward": 7.0, "advantages": 1.0, "share": 0.5}

    rewards = manager(function=presuming)
    for _ in range(2):
        scored, _ = score(trajectories("4", "4", "5"), rewards)
        assert all(one.extra["share"] == 0.5 for one in scored)
        assert not any({"uid", "reward", "advantages"} & one.extra.keys() for one in scored)
    assert caplog.text.count("the reward returns uid, reward, advantages") == 1, (
        "said once, not at every step"
    )


def test_a_trajectory_whose_reward_failed_has_failed_where_it_is_to_be_dropped() -> None:
    scored, metrics = score(trajectories("4", "broken", "5"), manager("drop"))
    assert metrics["reward/num_errors"] == 1.0
    assert [one.reward for one in scored] == [1.0, None, 0.0]
    assert [one.outcome.cause for one in scored] == [None, "environment", None]
    counted, _ = score(trajectories("4", "broken", "5"), manager("drop"), failures_count=False)
    assert [one.reward for one in counted] == [1.0, 0.0, 0.0] and not any(one.failed for one in counted)


def test_a_trajectory_that_failed_before_is_not_scored() -> None:
    made = trajectories("4", "broken", "5")
    made[1] = replace(made[1], outcome=Outcome("failed", "cancelled"))
    scored, metrics = score(made, manager("raise"))
    assert [one.reward for one in scored] == [1.0, None, 0.0] and metrics["reward/num_errors"] == 0.0


def test_scores_of_single_tokens_land_on_the_tokens_that_were_sampled() -> None:
    def by_token(*, response_ids: list[int], solution_str: str, **row: Any) -> Any:
        scores = [token / 8 for token in response_ids]
        return {"two": scores[:2], "dict": {"score": scores, "acc": 1}}.get(solution_str, scores)

    def segment(call: int, *ids: int) -> Segment:
        return Segment(ids, True, (-1.0,) * len(ids), (0,) * len(ids), call)

    rows = (
        Lineage(Prompt((5,)), (segment(0, 1, 2), Segment((9, 9)), segment(2, 3))),
        Lineage(Prompt((5, 5)), (segment(1, 4),)),
    )
    rewards = manager("drop", by_token)
    made = [replace(one, lineages=rows) for one in trajectories("list", "dict", "two")]
    (listed, as_dict, wrong), metrics = score(made, rewards)
    assert listed.sampled_ids == (1, 2, 4, 3)
    assert listed.reward == 10 / 8 and as_dict.extra["acc"] == 1.0
    assert wrong.failed and metrics["reward/num_errors/RewardError"] == 1.0
    batch = collate([listed, as_dict], pad_token_id=0)
    wanted = [[1 / 8, 2 / 8, 0, 0, 3 / 8], [4 / 8, 0, 0, 0, 0]]
    assert batch.batch["token_level_scores"].tolist() == wanted * 2
