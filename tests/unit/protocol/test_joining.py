"""Batches of different widths under one another: every token and number stays with its row and its side."""

from __future__ import annotations

import math

import torch

from hybridflow.protocol import DataProto
from hybridflow.protocol.joining import join_rows, with_all_columns
from hybridflow.protocol.packing import make_rows, pack

PAD = 9


def part(prompts: list[list[int]], responses: list[list[int]], **columns: list[object]) -> DataProto:
    tensors = make_rows(prompts, responses, PAD, prompt_width=5, response_width=4)
    width = 4
    tensors |= {
        "loss_mask": tensors["response_mask"].clone(),
        "rollout_log_probs": -torch.arange(1.0, len(prompts) * width + 1).reshape(-1, width)
        * tensors["response_mask"],
        "policy_version": torch.where(tensors["response_mask"], 3, -1).to(torch.int32),
        "row_id": torch.tensor([row[0] for row in prompts]),
        "reward_baselines": torch.tensor([row[0] / 10 for row in prompts]),
    }
    return DataProto.from_dict(tensors, {"uid": [str(row[0]) for row in prompts], **columns})


def test_rows_are_as_wide_as_the_longest_and_lose_nothing() -> None:
    first, second = part([[1, 2], [2]], [[3], [4]]), part([[5, 6, 7]], [[8, 8]])
    joined = join_rows([first, second], PAD)
    assert joined.batch["prompts"].tolist() == [[PAD, 1, 2], [PAD, PAD, 2], [5, 6, 7]]
    assert joined.batch["responses"].tolist() == [[3, PAD], [4, PAD], [8, 8]]
    assert joined.batch["input_ids"].tolist() == [[PAD, 1, 2, 3, PAD], [PAD, PAD, 2, 4, PAD], [5, 6, 7, 8, 8]]
    assert joined.batch["attention_mask"].long().tolist() == [
        [0, 1, 1, 1, 0],
        [0, 0, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]
    assert (
        joined.batch["response_mask"].tolist()
        == joined.batch["loss_mask"].tolist()
        == [[True, False], [True, False], [True, True]]
    )
    assert joined.batch["rollout_log_probs"].tolist() == [[-1, 0], [-5, 0], [-1, -2]]
    assert joined.batch["policy_version"].tolist() == [[3, -1], [3, -1], [3, 3]]
    assert joined.batch["row_id"].tolist() == [1, 2, 5]
    assert list(joined.non_tensor_batch["uid"]) == [
        "1",
        "2",
        "5",
    ]
    torch.testing.assert_close(joined.batch["reward_baselines"], torch.tensor([0.1, 0.2, 0.5]))
    apart = [pack(first).input_ids, pack(second).input_ids]
    assert torch.equal(pack(joined).input_ids, torch.cat(apart)), "the packed tokens are those of the parts"


def test_a_narrower_part_gets_padding() -> None:
    wide = part([[1, 1, 1, 1, 1]], [[2, 2, 2, 2]])
    joined = join_rows([part([[3]], [[4]]), wide], PAD)
    assert joined.batch["prompts"].tolist() == [[PAD] * 4 + [3], [1] * 5]
    assert joined.batch["responses"].tolist() == [[4] + [PAD] * 3, [2] * 4]
    assert joined.batch["policy_version"].tolist() == [[3, -1, -1, -1], [3] * 4]


def test_columns_that_a_part_lacks() -> None:
    left = part([[1]], [[2]], acc=[1.0], pred=["7"])
    right = part([[3]], [[4]], share=[0.5])
    joined = join_rows([left, part([], []), right], PAD).non_tensor_batch
    assert math.isnan(joined["acc"][1]), "numbers are missing as NaN, as within a batch"
    assert joined["acc"][0] == 1.0, "numbers are missing as NaN, as within a batch"
    assert list(joined["pred"]) == ["7", None] and math.isnan(joined["share"][0])
    assert [sorted(p.non_tensor_batch) for p in with_all_columns([left, right])] == [
        ["acc", "pred", "share", "uid"]
    ] * 2


def test_no_rows_at_all() -> None:
    assert len(join_rows([part([], []), part([], [])], PAD)) == 0
