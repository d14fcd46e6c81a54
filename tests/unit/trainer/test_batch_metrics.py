"""What a batch says about itself, by hand-computed numbers."""

from __future__ import annotations

import pytest
import torch

from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows
from hybridflow.trainer.ppo.data_metrics import batch_metrics, equal_groups
from hybridflow.workers.correction import rows_of_version
from hybridflow.workers.log_prob_check import comparable_tokens, difference

NAN = float("nan")


def rows() -> DataProto:
    """Responses of 3, 2 and 1 tokens; the middle token of row 0 is an observation; row 2 is out of the
    loss.
    """
    columns = make_rows(
        [[1, 1], [1], [1, 1, 1]], [[2, 3, 4], [5, 6], [7]], 0, response_masks=[[1, 0, 1], [1, 1], [1]]
    )
    columns["loss_mask"] = columns["response_mask"] & torch.tensor([[True], [True], [False]])
    columns["token_level_scores"] = torch.tensor([[0, NAN, 1.0], [0, 3.0, NAN], [8.0, NAN, NAN]]).nan_to_num(
        0.0
    )
    columns["token_level_rewards"] = columns["token_level_scores"] - 0.5 * columns["response_mask"]
    columns["advantages"] = torch.tensor([[1.0, NAN, 2.0], [3.0, -6.0, NAN], [99.0, NAN, NAN]])
    columns["returns"] = torch.tensor([[1.0, NAN, 2.0], [3.0, 4.0, NAN], [99.0, NAN, NAN]])
    columns["values"] = torch.tensor([[0.0, NAN, 1.0], [2.0, 3.0, NAN], [99.0, NAN, NAN]])
    columns["old_log_probs"] = torch.tensor([[-1.0, NAN, -2.0], [-1.0, -1.0, NAN], [-3.0, NAN, NAN]])
    columns["rollout_log_probs"] = torch.tensor([[-1.0, 0.0, -2.5], [-1.0, -1.0, 0.0], [-3.1, 0.0, 0.0]])
    return DataProto.from_dict(columns, {"uid": [*"aab"], "finish_reason": ["length", "stop", "stop"]})


def test_names_and_values() -> None:
    found = batch_metrics(rows(), has_critic=True).to_floats()
    assert found == pytest.approx(
        {
            "critic/score/mean": 4.0,
            "critic/score/max": 8.0,
            "critic/score/min": 1.0,
            "critic/rewards/mean": (0.0 + 2.0 + 7.5) / 3,
            "critic/rewards/max": 7.5,
            "critic/rewards/min": 0.0,
            "critic/advantages/mean": 0.0,
            "critic/advantages/max": 3.0,
            "critic/advantages/min": -6.0,
            "critic/returns/mean": 2.5,
            "critic/returns/max": 4.0,
            "critic/returns/min": 1.0,
            "critic/values/mean": 1.5,
            "critic/values/max": 3.0,
            "critic/values/min": 0.0,
            "critic/vf_explained_var": 1.0,  # one off everywhere: the mean is no variance
            "response_length/mean": 5 / 3,  # the observation is not the policy's
            "response_length/max": 2.0,
            "response_length/min": 1.0,
            "prompt_length/mean": 2.0,
            "prompt_length/max": 3.0,
            "prompt_length/min": 1.0,
            "response_length/clip_ratio": 1 / 3,
            "perf/total_num_tokens": 12.0,
            "training/loss_tokens_ratio": 4 / 5,
            "training/num_trajectories": 3.0,
            "training/zero_variance_groups": 0.0,
        }
    )


@pytest.mark.parametrize(
    ("uids", "scores", "found"),
    [
        ("aabb", [1.0, 1.0, 0.0, 1.0], (1, 2)),
        ("abab", [1.0, 0.0, 1.0, 0.0], (2, 2)),
        ("abbc", [1.0, 0.0, 0.5, 1.0], (0, 1)),
        ("", [], (0, 0)),
    ],
)
def test_groups_of_equal_scores(uids: str, scores: list[float], found: tuple[int, int]) -> None:
    assert equal_groups(list(uids), torch.tensor(scores)) == found


def test_without_a_critic_there_are_no_values() -> None:
    batch = rows()
    batch.pop(["values"])
    assert (
        not {"critic/values/mean", "critic/vf_explained_var"}
        & batch_metrics(batch, has_critic=False).to_floats().keys()
    )


def test_a_batch_that_is_out_of_the_loss_altogether() -> None:
    batch = rows()
    batch.narrow_loss_mask(torch.zeros(3, 3, dtype=torch.bool))
    found = batch_metrics(batch, has_critic=True).to_floats()
    assert (
        "critic/advantages/mean" not in found
        and found["training/loss_tokens_ratio"] == 0.0
        and found["critic/score/mean"] == 4.0
    )


def test_log_probs_are_compared_in_rows_of_the_actors_version_only() -> None:
    batch = rows()
    versions = torch.tensor([[4, -1, 4], [4, 4, -1], [3, -1, -1]], dtype=torch.int32)
    batch.batch["policy_version"] = versions
    assert rows_of_version(batch, 4).tolist() == [True, True, False]
    assert rows_of_version(batch, 3).tolist() == [False, False, True]
    tokens = comparable_tokens(batch, 4)
    assert tokens.tolist() == [[True, False, True], [True, True, False], [False, False, False]]
    versions[0, 2] = 3  # begun under one version, continued under the next: of neither
    assert rows_of_version(batch, 4).tolist() == [False, True, False]
    batch |= DataProto.from_dict({"is_demonstration": torch.tensor([False, True, False])})
    assert rows_of_version(batch, 4).tolist() == [False, False, False]


def test_rollout_difference() -> None:
    columns = rows().batch
    mask = columns["response_mask"]
    found = difference(columns["rollout_log_probs"][mask], columns["old_log_probs"][mask]).to_floats()
    assert found["training/rollout_log_probs_diff_max"] == pytest.approx(0.5)
    e = torch.tensor([-2.5, -2.0, -3.1, -3.0], dtype=torch.float64).exp()
    assert found["training/rollout_probs_diff_max"] == pytest.approx(float(e[1] - e[0]), rel=1e-5)
    assert found["training/rollout_probs_diff_mean"] == pytest.approx(
        float(e[1] - e[0] + e[3] - e[2]) / 5, rel=1e-5
    )
    assert difference(torch.zeros(0), torch.zeros(0)).to_floats() == {}
