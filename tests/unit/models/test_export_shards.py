"""A sharded model on two ranks, with adapters and without, becomes a folder for transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM
from zoo import eager_log_probs, packed_rows, tiny_hf, tiny_rows

from hybridflow.errors import ModelError
from hybridflow.models.adapters.lora import LoraSettings, adapted_layers, adapters_off, add_lora, init_lora
from hybridflow.models.files.export import save_hf_sharded
from hybridflow.models.policy import PolicyModel
from ranks import Ranks

SETTINGS = LoraSettings(rank=4, alpha=8, seed=3)


def built(kind: str, lora: bool) -> PolicyModel:
    policy = PolicyModel(tiny_hf(kind))
    if lora:
        add_lora(policy, SETTINGS)
        stir(policy)
    return policy


@torch.no_grad()
def stir(policy: PolicyModel) -> None:
    for number, layer in enumerate(adapted_layers(policy).values()):
        b = layer.lora_B["default"].weight
        b.copy_(torch.rand(b.shape, generator=torch.Generator().manual_seed(number)) - 0.5)


def shard(policy: PolicyModel) -> PolicyModel:
    mesh, precision = init_device_mesh("cpu", (2,)), MixedPrecisionPolicy(param_dtype=torch.float32)
    for block in next(module for module in policy.modules() if isinstance(module, nn.ModuleList)):
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    return policy


@torch.no_grad()
def log_probs(policy: PolicyModel) -> Tensor:
    return policy(packed_rows(tiny_rows())).log_probs


def export(rank: int, kind: str, lora: bool, folder: str, max_file_bytes: int) -> Tensor:
    policy = shard(built(kind, lora))
    save_hf_sharded(policy, Path(folder), max_file_bytes=max_file_bytes)
    return log_probs(policy)


@pytest.mark.parametrize(
    ("kind", "lora", "max_file_bytes"),
    [("qwen2", False, 20_000), ("qwen3_moe", True, 20_000), ("llama", True, 2**30)],
)
def test_transformers_reads_what_two_ranks_write(
    two_ranks: Ranks, tmp_path: Path, kind: str, lora: bool, max_file_bytes: int
) -> None:
    live = two_ranks.run(export, kind, lora, str(tmp_path), max_file_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 1 if max_file_bytes == 2**30 else len(files) >= 3
    names = [name for path in files for name in safe_open(path, "pt").keys()]  # noqa: SIM118
    assert len(names) == len(set(names)), "tied weights are written once"
    assert ("lm_head.weight" in names) == (kind != "qwen2"), "tied weights are written once"
    assert any("experts.3.gate_proj" in name for name in names) == (kind == "qwen3_moe"), (
        "experts are named as in its files elsewhere"
    )
    packed = packed_rows(tiny_rows())
    assert torch.allclose(
        eager_log_probs(AutoModelForCausalLM.from_pretrained(tmp_path), packed), live[0], atol=2e-5
    )
    assert live[0].equal(live[1]) and torch.allclose(live[0], log_probs(built(kind, lora)), atol=1e-5)
    if lora:
        theirs = PeftModel.from_pretrained(tiny_hf(kind), tmp_path / "lora_adapter").merge_and_unload()
        assert torch.allclose(eager_log_probs(theirs, packed), live[0], atol=2e-5)


def fail_to_export(rank: int, folder: str) -> str:
    try:
        save_hf_sharded(shard(built("llama", False)), Path(folder), max_file_bytes=20_000)
    except ModelError as error:
        return str(error)
    return ""


def test_a_rank_that_cannot_write_stops_all(two_ranks: Ranks, tmp_path: Path) -> None:
    blocked = export_names(two_ranks, tmp_path / "whole")[1]
    (tmp_path / "out" / blocked).mkdir(parents=True)
    for message in two_ranks.run(fail_to_export, str(tmp_path / "out")):
        assert f"cannot write the model: {tmp_path / 'out' / blocked}" in message


def export_names(two_ranks: Ranks, folder: Path) -> list[str]:
    two_ranks.run(export, "llama", False, str(folder), 20_000)
    return sorted(path.name for path in folder.glob("*.safetensors"))


def learn_after_the_reference(rank: int) -> dict[str, Tensor]:
    """Gradients of a model whose parameters are gathered for the first time while its adapters are off."""
    policy = PolicyModel(tiny_hf("llama").to("meta"))
    add_lora(policy, SETTINGS)
    shard(policy)
    policy.to_empty(device="cpu")
    plain = tiny_hf("llama")
    for name, tensor in plain.state_dict().items():
        layered = name.replace(".weight", ".base_layer.weight")
        place = dict(policy.hf.state_dict())
        own = place.get(layered, place.get(name))
        own.copy_(torch.distributed.tensor.distribute_tensor(tensor, own.device_mesh, own.placements))
    policy.hf.model.rotary_emb.load_state_dict(plain.model.rotary_emb.state_dict())
    for name, buffer in plain.named_buffers():
        policy.hf.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer
    init_lora(policy, SETTINGS)
    with adapters_off(policy):
        first = log_probs(policy)
    policy.train()
    policy(packed_rows(tiny_rows())).log_probs.sum().backward()
    gradients = {name: p.grad.full_tensor() for name, p in policy.named_parameters() if p.grad is not None}
    return {"first": first, **gradients}


def test_the_reference_may_come_first(two_ranks: Ranks) -> None:
    got = two_ranks.run(learn_after_the_reference)[0]
    policy = PolicyModel(tiny_hf("llama"))
    assert torch.allclose(got.pop("first"), log_probs(policy), atol=1e-5)
    add_lora(policy, SETTINGS)
    policy(packed_rows(tiny_rows())).log_probs.sum().backward()
    wanted = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    assert got.keys() == wanted.keys()
    assert all(torch.allclose(got[name], wanted[name], rtol=1e-4, atol=1e-4) for name in wanted)


def export_narrow(rank: int, folder: str) -> None:
    policy = shard(built("llama", False))
    narrow = {name: torch.bfloat16 for name, _ in policy.named_parameters() if "norm" not in name}
    save_hf_sharded(policy, Path(folder), dtypes=narrow)


def test_shards_wider_than_the_model_are_written_as_the_model(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(export_narrow, str(tmp_path))
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert read.config.dtype == torch.bfloat16
    wanted = tiny_hf("llama").to(torch.bfloat16).state_dict()
    assert all(tensor.equal(wanted[name]) for name, tensor in read.state_dict().items() if "norm" not in name)
