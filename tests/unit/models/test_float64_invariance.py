"""In float64 nothing depends on how rows are packed: log-probs, loss and gradients agree to 1e-10."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from zoo import packed_rows, tiny_hf, tiny_rows

from hybridflow.models.files.build import enable_gradient_checkpointing
from hybridflow.models.policy import PolicyModel
from hybridflow.models.value import ValueModel

MODELS = ["llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3"]


@pytest.mark.parametrize("model_type", MODELS)
def test_packed_equals_alone_in_float64(model_type: str) -> None:
    policy = PolicyModel(tiny_hf(model_type, torch.float64))
    data = tiny_rows()
    with torch.no_grad():
        together = packed_rows(data)
        outputs = policy(together, temperature=0.7, with_entropy=True)
        assert outputs.log_probs.dtype == torch.float64 and outputs.entropy is not None
        for row in range(len(data)):
            alone = policy(packed_rows(data, [row]), temperature=0.7, with_entropy=True)
            mine = together.rows == row
            torch.testing.assert_close(alone.log_probs, outputs.log_probs[mine], atol=1e-10, rtol=0)
            torch.testing.assert_close(alone.entropy, outputs.entropy[mine], atol=1e-10, rtol=0)


def _gradients(policy: PolicyModel, parts: list[list[int]]) -> tuple[float, list[Tensor]]:
    policy.zero_grad(set_to_none=True)
    total = 0.0
    for rows in parts:
        packed = packed_rows(tiny_rows(), rows)
        outputs = policy(packed, with_entropy=True)
        assert outputs.entropy is not None
        weights = 1.0 + torch.tensor(rows)[packed.rows] + 0.1 * packed.columns
        loss = (weights * outputs.log_probs + 0.3 * outputs.entropy).sum()
        loss.backward()
        total += loss.item()
    return total, [p.grad.clone() for p in policy.parameters() if p.grad is not None]


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradients_do_not_depend_on_packing(model_type: str, checkpointing: bool) -> None:
    policy = PolicyModel(tiny_hf(model_type, torch.float64)).train()
    if checkpointing:
        enable_gradient_checkpointing(policy.hf)
    loss, gradients = _gradients(policy, [[0, 1, 2, 3]])
    assert len(gradients) > 5
    for parts in ([[3, 1, 0, 2]], [[0], [1], [2], [3]], [[2, 0], [3, 1]]):
        other_loss, other = _gradients(policy, parts)
        assert abs(loss - other_loss) < 1e-10 * max(1.0, abs(loss))
        for a, b in zip(gradients, other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-10 * max(1.0, a.abs().max().item()), rtol=0)


def test_value_model_in_float64() -> None:
    model = ValueModel(tiny_hf("qwen2", torch.float64))
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    data = tiny_rows()
    together = packed_rows(data)
    values = model(together)
    for row in range(len(data)):
        torch.testing.assert_close(
            model(packed_rows(data, [row])), values[together.rows == row], atol=1e-10, rtol=0
        )
