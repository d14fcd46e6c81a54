"""Rows that share a prompt's tokens have the log-probs and gradients of rows that do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from zoo import VOCABULARY, tiny_hf

from hybridflow.engines.base import BatchLimits
from hybridflow.engines.micro_batches import plan
from hybridflow.models.attention.shared_tokens import SharedTokens
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import PackedBatch, make_rows, pack, share_prompts

GROUPS = {(4, 5, 6): (3, 7, 1), (9, 8): (2, 2), (7,): (5,), (4, 5): (6, 3)}
"""Prompts, and the lengths of their responses; one prompt begins with another, and one is alone."""


def _rows() -> DataProto:
    draw = torch.Generator().manual_seed(0)
    prompts = [list(prompt) for prompt, lengths in GROUPS.items() for _ in lengths]
    responses = [
        torch.randint(3, VOCABULARY, (length,), generator=draw).tolist()
        for lengths in GROUPS.values()
        for length in lengths
    ]
    order = torch.randperm(len(prompts), generator=draw).tolist()
    masks = [torch.randint(0, 4, (len(responses[row]),), generator=draw).bool().tolist() for row in order]
    return DataProto.from_dict(
        make_rows(
            [prompts[row] for row in order],
            [responses[row] for row in order],
            pad_id=0,
            response_masks=masks,
        )
    )


def _computed(policy: PolicyModel, packed: PackedBatch) -> tuple[Tensor, list[Tensor]]:
    policy.zero_grad()
    outputs = policy(packed, with_entropy=True)
    weights = torch.linspace(-1, 1, len(outputs.log_probs), dtype=torch.float64)
    ((outputs.log_probs * weights).sum() + outputs.entropy.sum()).backward()
    return outputs.log_probs.detach(), [p.grad.clone() for p in policy.parameters() if p.grad is not None]


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"])
def test_same_log_probs_and_gradients(model_type: str) -> None:
    policy = PolicyModel(tiny_hf(model_type, torch.float64))
    packed = pack(_rows())
    shared = share_prompts(packed)
    assert (
        shared.num_tokens
        == sum(len(prompt) + sum(lengths) for prompt, lengths in GROUPS.items())
        < packed.num_tokens
    )
    assert torch.equal(shared.predict_index_on_cpu, shared.predict_index)
    alone, gradients = _computed(policy, packed)
    together, others = _computed(policy, shared)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)
    assert len(others) == len(gradients) > 0
    for gradient, other in zip(gradients, others):
        torch.testing.assert_close(other, gradient, rtol=1e-10, atol=1e-11)


def test_rows_of_different_prompts_stay_as_they_are() -> None:
    packed = pack(DataProto.from_dict(make_rows([[4, 5], [4, 6]], [[7], [7, 8]], pad_id=0)))
    assert share_prompts(packed) is packed


def test_sum_by_token() -> None:
    index = torch.tensor([2, 0, 2, 1, 2, 0])
    real = torch.tensor([True, True, True, True, False, True])
    values = torch.randn(6, 3)
    expected = torch.zeros(4, 3).index_add_(0, index[real], values[real])
    torch.testing.assert_close(SharedTokens(index, real, "cpu").sum(values, 4), expected)


def test_rows_of_a_prompt_meet_as_far_as_they_fit() -> None:
    prompts = [[4, 5, 6]] * 4 + [[7, 8, 9]] * 2
    rows = DataProto.from_dict(make_rows(prompts[::2] + prompts[1::2], [[1] * 3] * 6, pad_id=0))
    micros = plan(rows, BatchLimits(18, share_prompts=True), None)
    # one prompt in two parts: 3 rows of 6 tokens fit
    assert sum(micro.packed.num_tokens for micro in micros) == 3 * 3 + 6 * 3
    assert sorted(row for micro in micros for row in micro.indices or []) == list(range(6))
    apart = plan(rows, BatchLimits(18), None)
    assert sum(micro.packed.num_tokens for micro in apart) == 36
