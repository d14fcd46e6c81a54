"""Scores on their tokens, and what a reward that fails does to its row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridflow.config.reward import RewardConfig
from hybridflow.errors import RewardError
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows
from hybridflow.rewards.in_process import InProcessScorer
from hybridflow.rewards.manager import RewardManager
from hybridflow.trainer.ppo.scoring import place_scores, score


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


def rows(*solutions: str) -> DataProto:
    tensors = make_rows([[5]] * len(solutions), [[6] * (2 + i) for i in range(len(solutions))], pad_id=0)
    tensors["loss_mask"] = tensors["response_mask"].clone()
    columns = {
        "uid": ["a"] * len(solutions),
        "data_source": ["sums"] * len(solutions),
        "solution_str": list(solutions),
        "ground_truth": ["4"] * len(solutions),
        "extra_info": [{}, {"bonus": 0.5}, *[{}] * (len(solutions) - 2)],
    }
    return DataProto.from_dict(tensors, columns)


def manager(on_error: Any = "raise") -> RewardManager:
    return RewardManager(InProcessScorer(compute_score, RewardConfig().timeout), on_error=on_error)


def test_scores_and_extra_keys_become_columns() -> None:
    scored = score(rows("4", "4", "5"), manager())
    batch = scored.batch
    assert batch.batch["token_level_scores"].sum(-1).tolist() == [1.0, 1.5, 0.0]
    assert batch.batch["token_level_scores"].nonzero().tolist() == [[0, 1], [1, 2]]
    assert list(batch.non_tensor_batch["acc"]) == [1.0, 1.0, 0.0] and list(
        batch.non_tensor_batch["pred"]
    ) == ["4", "4", "5"]
    assert scored.metrics.to_floats()["reward/num_errors"] == 0.0 and not scored.dropped.any()
    assert torch.equal(batch.batch["loss_mask"], batch.batch["response_mask"])


def test_a_reward_cannot_replace_a_column_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    def presuming(**row: Any) -> Any:
        return {"score": 1.0, "uid": "mine", "reward": 7.0, "advantages": 1.0, "share": 0.5}

    rewards = RewardManager(InProcessScorer(presuming, RewardConfig().timeout))
    batch = score(rows("4", "4", "5"), rewards).batch
    assert (
        list(batch.non_tensor_batch["uid"]) == ["a"] * 3
        and list(batch.non_tensor_batch["share"]) == [0.5] * 3
    )
    assert not {"reward", "advantages"} & {*batch.batch.keys(), *batch.non_tensor_batch}
    score(rows("4", "4", "5"), rewards)
    assert caplog.text.count("the reward returns uid, reward, advantages") == 1, (
        "said once, not at every step"
    )


def test_a_failed_row_is_marked_where_it_is_to_be_dropped() -> None:
    scored = score(rows("4", "broken", "5"), manager("drop"))
    assert scored.metrics.to_floats()["reward/num_errors"] == 1.0
    assert scored.dropped.tolist() == [False, True, False] and scored.batch.batch["loss_mask"].any(-1).all()


def test_on_error_zero_and_raise() -> None:
    scored = score(rows("4", "broken"), manager("zero"))
    assert (
        scored.batch.batch["token_level_scores"].sum(-1).tolist() == [1.0, 0.0] and not scored.dropped.any()
    )
    with pytest.raises(RewardError, match="no number in it"):
        score(rows("4", "broken"), manager("raise"))
