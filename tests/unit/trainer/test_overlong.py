"""Overlong shaping and filtering, by hand."""

from __future__ import annotations

import pytest
import torch

from hybridflow.episodes.filters import filter_overlong, overlong_penalty, shape_overlong
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (5, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (10, -1.0), (12, -1.5)]
)
def test_the_penalty_grows_over_the_buffer(length: int, penalty: float) -> None:
    found = overlong_penalty(torch.tensor([length]), max_len=10, buffer_len=4, factor=1.0)
    assert found.tolist() == [penalty] and found.dtype == torch.float32
    assert overlong_penalty(torch.tensor([length]), max_len=10, buffer_len=4, factor=2.0).tolist() == [
        2 * penalty
    ]


def batch() -> DataProto:
    tensors = make_rows([[5], [5, 5], [5], [5]], [[1] * 4, [1] * 2, [1] * 3, []], pad_id=0)
    tensors["loss_mask"] = tensors["response_mask"].clone()
    tensors["token_level_scores"] = torch.tensor([[0.0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]])
    return DataProto.from_dict(tensors, {"finish_reason": ["length", "stop", "stop", "length"]})


def test_what_a_tool_has_given_makes_no_response_longer() -> None:
    rows = batch()
    rows.batch["response_mask"][0, 1:3] = False  # four tokens, two of them sampled
    shaped = shape_overlong(rows, max_len=4, buffer_len=2, factor=1.0)
    assert list(shaped.non_tensor_batch["overlong_reward"]) == [0.0, 0.0, -0.5, 0.0]


def test_rows_that_were_cut_leave_the_loss_and_stay_in_their_group() -> None:
    rows = batch()
    mask = rows.batch["response_mask"].clone()
    metrics = filter_overlong(rows).to_floats()
    assert rows.batch["loss_mask"].sum(-1).tolist() == [0, 2, 3, 0] and torch.equal(
        rows.batch["response_mask"], mask
    )
    assert metrics == {"training/overlong_filtered_ratio": 0.5}
