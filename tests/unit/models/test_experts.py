"""Mixtures of experts: the seven families in training, in generation, in exact mode and in files.

That packed rows are as rows alone is in `test_architectures.py`, which goes over these families too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from zoo import SPARSE, VOCABULARY, packed_rows, tiny_hf, tiny_rows

from hybridflow.models.adapters.lora import LoraSettings, adapted_layers, add_lora
from hybridflow.models.copies.twin import Twin
from hybridflow.models.experts.layers import (
    EXPERTS_ONE_BY_ONE,
    experts_per_token,
    mlp_width,
    num_experts,
    routers,
)
from hybridflow.models.files.build import build_policy
from hybridflow.models.files.export import plain_weights, save_hf_sharded
from hybridflow.models.files.size import matmul_parameters
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows, pack
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationRequest, SamplingParams
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.rollout.self_check import choose_exact_mode

EXPERT_NAMES = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w2.weight",
    "gpt_oss": "model.layers.1.mlp.experts.down_proj_bias",
}
"""A tensor of the files by which vLLM's loaders know experts, where it is not the usual one."""
INEXACT = ("deepseek_v3",)
"""Families for which the self-check finds a difference on some machines: attention over latent keys."""


def gap(policy: PolicyModel) -> float:
    """The largest difference of a sampled token's log-prob from that of training, in nats."""
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCABULARY, (length,), generator=draw).tolist() for length in (1, 5, 12, 5)]
    sampling = SamplingParams(max_tokens=12)
    requests = [GenerationRequest(i, Prompt(tuple(p)), sampling, seed=i) for i, p in enumerate(prompts)]
    outputs = {o.request_id: o for o in NativeEngine(policy, eos_token_ids=(2,)).generate(requests)}
    responses = [outputs[number].token_ids for number in range(len(prompts))]
    packed = pack(DataProto.from_dict(make_rows(prompts, responses, pad_id=0)))
    sampled = torch.tensor([value for number in range(len(prompts)) for value in outputs[number].log_probs])
    with torch.no_grad():
        return float((policy(packed).log_probs - sampled).abs().max())


@pytest.mark.parametrize("family", SPARSE)
def test_rollout_and_training_agree_and_exact_mode_to_the_bit(family: str) -> None:
    policy = PolicyModel(tiny_hf(family))
    assert 0 < gap(policy) < 3e-5
    engine = NativeEngine(policy, eos_token_ids=(2,))
    usual = policy.config._experts_implementation
    mode = choose_exact_mode(engine, policy, longest=64, temperature=1.0)
    assert policy.config._experts_implementation == usual != EXPERTS_ONE_BY_ONE
    if isinstance(mode, str):
        assert family in INEXACT and "has log-prob" in mode, mode
        return
    policy.exact = mode
    assert policy.config._experts_implementation == EXPERTS_ONE_BY_ONE and gap(policy) == 0
    policy.exact = None
    assert policy.config._experts_implementation == usual


@pytest.mark.parametrize("family", SPARSE)
def test_every_parameter_learns(family: str) -> None:
    policy = PolicyModel(tiny_hf(family))
    policy(packed_rows(tiny_rows())).log_probs.sum().backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.any()), name


@pytest.mark.parametrize("family", SPARSE)
def test_files_have_the_names_of_the_family_and_are_read_to_the_bit(family: str, tmp_path: Path) -> None:
    policy = PolicyModel(tiny_hf(family))
    save_hf_sharded(policy, tmp_path / "ours")
    policy.hf.save_pretrained(tmp_path / "theirs")
    ours, theirs = (tensors_of(tmp_path / folder) for folder in ("ours", "theirs"))
    assert EXPERT_NAMES.get(family, "model.layers.1.mlp.experts.3.down_proj.weight") in ours
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    pushed = dict(plain_weights(policy))
    assert pushed.keys() == ours.keys() and all(torch.equal(pushed[name], ours[name]) for name in ours)
    again = build_policy(tmp_path / "ours", device="cpu")
    for name, tensor in policy.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def tensors_of(folder: Path) -> dict[str, Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)


@pytest.mark.parametrize("family", SPARSE)
def test_a_twin_has_the_same_experts(family: str) -> None:
    policy = PolicyModel(tiny_hf(family))
    weights = dict(policy.named_parameters())
    dtypes = {name: weight.dtype for name, weight in weights.items()}
    twin = Twin(policy, dtypes=dtypes, device=torch.device("cpu"))
    for name, memory in twin.allocate().items():
        memory.copy_(weights[name].detach())
    packed = packed_rows(tiny_rows())
    with torch.no_grad():
        assert torch.equal(twin.policy(packed).log_probs, policy(packed).log_probs)


def test_adapters_leave_experts_and_routers_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    policy = PolicyModel(tiny_hf("qwen2_moe"))
    with caplog.at_level("INFO"):
        add_lora(policy, LoraSettings(2))
    names = set(adapted_layers(policy))
    assert "model.layers.0.self_attn.q_proj" in names and "model.layers.0.mlp.shared_expert.up_proj" in names
    assert not any(".experts" in name or name.endswith(".gate") for name in names)
    assert "experts and routers get no adapters" in caplog.text
    policy(packed_rows(tiny_rows())).log_probs.sum().backward()
    trained = {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
    assert trained and all(".lora_" in name for name in trained)


@pytest.mark.parametrize("family", SPARSE)
def test_sizes_count_the_experts_of_a_token(family: str) -> None:
    hf = tiny_hf(family)
    assert (num_experts(hf.config), experts_per_token(hf.config)) == (4, 2)
    dense = {"deepseek_v3": 1, "glm4_moe": 1, "glm4_moe_lite": 1}.get(family, 0)
    assert sorted(routers(hf)) == list(range(dense, 2))
    experts = sum(p.numel() for name, p in hf.named_parameters() if ".experts." in name)
    others = sum(p.numel() for p in hf.parameters()) - experts - hf.get_input_embeddings().weight.numel()
    assert matmul_parameters(hf) == others + experts // 2
    own = 24 if hasattr(hf.config, "moe_intermediate_size") else 48
    shared = 24 if family in ("qwen2_moe", "deepseek_v3", "glm4_moe", "glm4_moe_lite") else 0
    assert mlp_width(hf.config) == 2 * own + shared


def test_a_dense_model_has_no_experts() -> None:
    hf = tiny_hf("llama")
    assert num_experts(hf.config) == experts_per_token(hf.config) == 0 and not routers(hf)
    assert mlp_width(hf.config) == 48
