"""Packed log-probs of many architectures against transformers' own attention, a row at a time."""

from __future__ import annotations

import pytest
import torch
from zoo import SUPPORTED, eager_log_probs, packed_rows, tiny_hf, tiny_rows

from hybridflow.errors import ModelError
from hybridflow.models.files.build import enable_gradient_checkpointing
from hybridflow.models.files.probe import _alone, _packed, _rows, probe_policy
from hybridflow.models.policy import PolicyModel
from hybridflow.models.value import ValueModel


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_packed_equals_alone(model_type: str) -> None:
    hf = tiny_hf(model_type)
    packed = packed_rows(tiny_rows())
    with torch.no_grad():
        wanted = eager_log_probs(hf, packed)
        got = PolicyModel(hf)(packed).log_probs
    assert got.dtype == torch.float32 and got.shape == packed.targets.shape
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=0)
    assert wanted.std() > 0.3, "the model says the same everywhere: this test would see nothing"


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_probe_accepts(model_type: str) -> None:
    assert probe_policy(PolicyModel(tiny_hf(model_type)), tolerance=1e-4) < 1e-4


@pytest.mark.parametrize("model_type", ["mistral", "gemma2", "gpt_oss"])
def test_gradient_checkpointing_gives_the_same_gradient(model_type: str) -> None:
    packed = packed_rows(tiny_rows())
    gradients = []
    for checkpointing in (False, True):
        policy = PolicyModel(tiny_hf(model_type)).train()
        if checkpointing:
            enable_gradient_checkpointing(policy.hf)
        policy(packed).log_probs.sum().backward()
        gradients.append([p.grad for p in policy.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 5
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}),
        ("falcon", {"alibi": True, "new_decoder_architecture": False, "head_dim": None}),
        ("mamba", {"state_size": 4}),
        (
            "qwen3_next",
            {
                "layer_types": ["linear_attention", "full_attention"],
                "num_experts": 4,
                "num_experts_per_tok": 2,
            },
        ),
    ],
)
def test_unsupported_is_refused(model_type: str, settings: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=f"{model_type}|layers call"):
        probe_policy(PolicyModel(tiny_hf(model_type, **settings)))


def test_probe_finds_a_layer_that_does_not_call_our_attention() -> None:
    policy = PolicyModel(tiny_hf("llama"))
    attention = policy.hf.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ModelError, match="1 of 2 layers"):
        probe_policy(policy)


def test_values_start_at_zero_and_learn() -> None:
    packed = packed_rows(tiny_rows())
    model = ValueModel(tiny_hf("qwen2"))
    values = model(packed)
    assert values.shape == packed.targets.shape and values.dtype == torch.float32 and not values.any()
    (values - 1).square().sum().backward()
    assert model.head.weight.grad is not None and model.head.weight.grad.abs().sum() > 0
    assert not any(name.startswith("lm_head") for name in model.state_dict())


def test_probe_in_bfloat16_allows_for_rounding_and_finds_a_difference() -> None:
    """Logits as large as a trained model's: rounding alone moves the worst by more than 0.3."""
    policy = PolicyModel(tiny_hf("llama", torch.bfloat16))
    policy.head.weight.data.mul_(2.0)
    rows = _rows(policy)
    with torch.no_grad():
        worst = max(
            float((a - b).abs().max())
            for a, b in zip(_packed(policy, rows), _alone(policy, rows), strict=True)
        )
    assert worst > 0.3 > probe_policy(policy)
    object.__setattr__(policy.transform, "scale", 1.5)
    with pytest.raises(ModelError, match="does not give the same log-probs"):
        probe_policy(policy)
