"""An `OutputSpec` gets the answers that it names, and a model that cannot give them says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hybridflow.models.output_spec import OutputSpec
from hybridflow.models.outputs import outputs_of
from hybridflow.models.policy import PolicyModel
from hybridflow.models.value import ValueModel
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import PackedBatch, make_rows, pack


def packed_rows() -> PackedBatch:
    columns = make_rows([[5, 6], [7]], [[8, 9, 10], [11]], pad_id=0)
    return pack(DataProto.from_dict(columns))


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation="eager")


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (OutputSpec(log_probs=True), ["log_probs"]),
        (OutputSpec(log_probs=True, entropy=True), ["log_probs", "entropy"]),
        (OutputSpec(log_probs=True, sum_pi_squared=True), ["log_probs", "sum_pi_squared"]),
    ],
)
def test_a_policy_answers_what_it_is_asked(spec: OutputSpec, names: list[str]) -> None:
    found = outputs_of(PolicyModel(llama()), packed_rows(), spec)
    assert list(found) == names
    assert all(values.shape == (4,) and values.dtype == torch.float32 for values in found.values())


def test_the_temperature_divides_the_logits() -> None:
    policy, packed = PolicyModel(llama()), packed_rows()
    cold = outputs_of(policy, packed, OutputSpec(log_probs=True, temperature=0.5))["log_probs"]
    with torch.no_grad():
        policy.head.weight.mul_(2.0)
    assert torch.allclose(
        cold, outputs_of(policy, packed, OutputSpec(log_probs=True))["log_probs"], atol=1e-6
    )


def test_a_value_model_answers_with_values() -> None:
    assert list(outputs_of(ValueModel(llama()), packed_rows(), OutputSpec(values=True))) == ["values"]


@pytest.mark.parametrize(
    ("model", "spec"),
    [
        (PolicyModel, OutputSpec()),
        (PolicyModel, OutputSpec(log_probs=True, values=True)),
        (ValueModel, OutputSpec(log_probs=True)),
        (ValueModel, OutputSpec(values=True, entropy=True)),
    ],
)
def test_what_a_model_does_not_have_is_refused(model: type[nn.Module], spec: OutputSpec) -> None:
    with pytest.raises(AssertionError, match="and is asked OutputSpec"):
        outputs_of(model(llama()), packed_rows(), spec)
