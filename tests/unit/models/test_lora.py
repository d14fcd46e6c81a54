"""Adapters: which layers, equal first values, off for the reference, folded, and in peft's format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import distribute_tensor, init_device_mesh
from transformers import AutoModelForCausalLM
from zoo import SUPPORTED, eager_log_probs, packed_rows, tiny_hf, tiny_rows

from hybridflow.config.model import ModelConfig
from hybridflow.errors import ModelError
from hybridflow.models.adapters.adapter_folder import CONFIG, WEIGHTS
from hybridflow.models.adapters.lora import (
    LoraSettings,
    adapted_layers,
    adapters_off,
    add_lora,
    fold,
    fold_adapters,
    has_adapters,
    init_lora,
    is_adapter,
    plain_state,
    saved_names,
)
from hybridflow.models.files.build import build_policy, enable_gradient_checkpointing
from hybridflow.models.files.export import save_adapter, save_config, save_hf
from hybridflow.models.policy import PolicyModel
from hybridflow.models.tiny import create_tiny_model
from hybridflow.models.value import ValueModel
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationRequest, SamplingParams
from hybridflow.rollout.native.engine import NativeEngine

SETTINGS = LoraSettings(rank=4, alpha=8, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny", hidden=32, intermediate=64, heads=2, kv_heads=1
    )


def learned(folder: Path, settings: LoraSettings = SETTINGS) -> PolicyModel:
    """A policy whose adapters do something."""
    policy = build_policy(folder, device="cpu", probe=False)
    add_lora(policy, settings)
    stir(policy)
    return policy


@torch.no_grad()
def stir(model: PolicyModel | ValueModel) -> None:
    for number, layer in enumerate(adapted_layers(model).values()):
        b = layer.lora_B["default"].weight
        b.copy_(torch.rand(b.shape, generator=torch.Generator().manual_seed(number)) - 0.5)


@torch.no_grad()
def log_probs(policy: PolicyModel) -> Tensor:
    return policy(packed_rows(tiny_rows())).log_probs


@pytest.mark.parametrize("kind", sorted(SUPPORTED))
def test_every_architecture_starts_as_its_base_and_folds_into_it(kind: str) -> None:
    policy = PolicyModel(tiny_hf(kind))
    names, before = list(policy.state_dict()), log_probs(policy)
    stream = torch.random.get_rng_state()
    add_lora(policy, SETTINGS)
    assert torch.random.get_rng_state().equal(stream), "the first values are keyed"
    assert log_probs(policy).equal(before)
    assert not any(name.endswith(("lm_head", "embed_out")) for name in adapted_layers(policy)), (
        "the head has no adapter"
    )
    stir(policy)
    policy(packed_rows(tiny_rows())).log_probs.sum().backward()
    for name, parameter in policy.named_parameters():
        assert is_adapter(name) == (parameter.grad is not None), name
        assert parameter.grad is None or float(parameter.grad.abs().sum()) > 0, f"{name} is without effect"
    after = log_probs(policy)
    assert float((after - before).abs().max()) > 0.1
    with adapters_off(policy):
        assert log_probs(policy).equal(before)
    assert log_probs(policy).equal(after)
    assert list(plain_state(policy)) == names
    fold_adapters(policy)
    assert list(policy.state_dict()) == names and not has_adapters(policy)
    assert torch.allclose(log_probs(policy), after, atol=1e-4)


def test_settings_from_the_configuration() -> None:
    assert LoraSettings.from_config(ModelConfig()) is None
    given = ModelConfig(lora_rank=8, lora_alpha=32, target_modules=["q_proj"], exclude_modules="k_proj")
    assert LoraSettings.from_config(given, seed=5) == LoraSettings(8, 32, ("q_proj",), "k_proj", None, 5)
    assert LoraSettings.from_config(ModelConfig(lora_adapter_path="here")) == LoraSettings(
        0, adapter_path="here"
    )


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, 14),
        ({"target_modules": ("q_proj", "v_proj")}, 4),
        ({"target_modules": "q_proj"}, 2),
        ({"target_modules": ("self_attn.o_proj", "model.layers.1.mlp.up_proj")}, 3),
        ({"target_modules": r".*layers\.0\..*_proj"}, 7),
        ({"exclude_modules": ("gate_proj", r".*layers\.1\..*")}, 6),
        ({"target_modules": ("q_proj", "k_proj"), "exclude_modules": "k_proj"}, 2),
    ],
)
def test_which_layers(folder: Path, settings: dict[str, object], wanted: int) -> None:
    policy = build_policy(folder, device="cpu", probe=False)
    add_lora(policy, LoraSettings(2, **settings))  # type: ignore[arg-type]
    assert len(adapted_layers(policy)) == wanted
    assert saved_names(policy) == {name for name in policy.state_dict() if is_adapter(name)}
    assert len(saved_names(policy) or ()) == 2 * wanted
    value = ValueModel(build_policy(folder, device="cpu", probe=False).hf)
    add_lora(value, LoraSettings(2, **settings))  # type: ignore[arg-type]
    assert set(adapted_layers(value)) == set(adapted_layers(policy)), (
        "names are those of the causal language model"
    )
    assert {name for name, p in value.named_parameters() if p.requires_grad} == saved_names(value)
    assert {"head.weight", "head.bias"} < (saved_names(value) or set())


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"target_modules": ("q_proj", "query")},
            r"'query' is no linear layer.*: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
        ),
        ({"target_modules": "lm_head"}, "'lm_head' is no linear layer that can have an adapter"),
        ({"target_modules": "*_proj"}, "no regular expression"),
        ({"exclude_modules": ".*"}, "leaves no layer"),
        ({"adapter_path": "/no/such"}, "cannot read adapter_config.json"),
    ],
)
def test_what_is_refused(folder: Path, settings: dict[str, object], text: str) -> None:
    policy = build_policy(folder, device="cpu", probe=False)
    with pytest.raises(ModelError, match=text):
        add_lora(policy, LoraSettings(2, **settings))  # type: ignore[arg-type]


def test_first_values_are_keyed_by_seed_and_layer(folder: Path) -> None:
    first, again, other = (learned(folder, LoraSettings(4, seed=seed)).state_dict() for seed in (1, 1, 2))
    firsts = [name for name in first if "lora_A" in name]
    assert all(first[name].equal(again[name]) and not first[name].equal(other[name]) for name in firsts)
    assert len({float(first[name].flatten()[0]) for name in firsts}) == len(firsts), "each layer has its own"
    bound = 1 / 32**0.5
    q = next(first[name] for name in firsts if "q_proj" in name)
    assert float(q.abs().max()) <= bound and float(q.std()) == pytest.approx(bound / 3**0.5, rel=0.2)


def test_on_meta_first_and_the_dtype(folder: Path) -> None:
    policy = build_policy(folder, device="cpu", dtype="bfloat16", probe=False)
    add_lora(policy, SETTINGS)
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}
    plain = build_policy(folder, device="cpu", dtype="bfloat16", probe=False)
    later = PolicyModel(type(plain.hf)(plain.config).to(torch.bfloat16).to("meta"))
    add_lora(later, SETTINGS)
    assert {p.device.type for p in later.parameters()} == {"meta"}
    later.to_empty(device="cpu")
    init_lora(later, SETTINGS)
    own, wanted = later.state_dict(), policy.state_dict()
    assert own.keys() == wanted.keys()
    assert all(own[name].equal(wanted[name]) for name in saved_names(later) or ())


def test_gradients_are_those_without_checkpointing(folder: Path) -> None:
    gradients = []
    for checkpointing in (False, True):
        policy = learned(folder)
        if checkpointing:
            enable_gradient_checkpointing(policy.hf)
        policy.train()
        policy(packed_rows(tiny_rows())).log_probs.sum().backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() == saved_names(policy)
    assert all(gradients[0][name].allclose(gradients[1][name], atol=1e-6) for name in gradients[0])


def test_adapters_off_leaves_gradients_asked_for(folder: Path) -> None:
    policy = learned(folder)
    wanted = {name: p.requires_grad for name, p in policy.named_parameters()}
    with pytest.raises(RuntimeError, match="in the middle"), adapters_off(policy):
        assert {name: p.requires_grad for name, p in policy.named_parameters()} == wanted
        raise RuntimeError("in the middle")
    assert {name: p.requires_grad for name, p in policy.named_parameters()} == wanted
    assert not log_probs(policy).equal(log_probs(build_policy(folder, device="cpu", probe=False))), (
        "they are on again"
    )


def test_peft_reads_what_we_write_and_we_go_on_from_it(tmp_path: Path, folder: Path) -> None:
    policy = learned(folder, LoraSettings(4, 8, ("q_proj", "down_proj")))
    save_adapter(policy, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], sorted(config["target_modules"])) == (
        4,
        8,
        ["down_proj", "q_proj"],
    )
    assert config["base_model_name_or_path"] == str(folder.resolve())
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter"
    ).merge_and_unload()
    assert torch.allclose(eager_log_probs(theirs, packed_rows(tiny_rows())), log_probs(policy), atol=1e-5)
    again = build_policy(folder, device="cpu", probe=False)
    add_lora(again, LoraSettings(0, adapter_path=str(tmp_path / "adapter")))
    assert log_probs(again).equal(log_probs(policy)) and saved_names(again) == saved_names(policy)
    whole = tmp_path / "whole"
    save_hf(policy, whole)
    assert torch.allclose(
        eager_log_probs(AutoModelForCausalLM.from_pretrained(whole), packed_rows(tiny_rows())),
        log_probs(policy),
        atol=1e-5,
    )
    assert (
        load_file(whole / "lora_adapter" / WEIGHTS).keys() == load_file(tmp_path / "adapter" / WEIGHTS).keys()
    )
    save_config(policy, tmp_path / "config")
    assert sorted(path.name for path in (tmp_path / "config" / "lora_adapter").iterdir()) >= [CONFIG]
    assert not (tmp_path / "config" / "lora_adapter" / WEIGHTS).exists()


def test_adapters_that_do_not_fit(tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_adapter(learned(folder, LoraSettings(4, target_modules="up_proj")), tmp_path)
    other = create_tiny_model(tmp_path / "other", hidden=16, intermediate=64, heads=2, kv_heads=1, layers=2)
    with pytest.raises(ModelError, match=r"has a part of \(4, 32\) there and of \(4, 16\) here"):
        add_lora(build_policy(other, device="cpu", probe=False), LoraSettings(0, adapter_path=str(tmp_path)))
    with pytest.raises(
        ModelError, match=r"is for 2 layers that this model has not, such as 'model.layers.0.mlp.up_proj'"
    ):
        add_lora(PolicyModel(tiny_hf("gpt_neox")), LoraSettings(0, adapter_path=str(tmp_path)))
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**config, "base_quantization": "nf4"}))
    add_lora(build_policy(folder, device="cpu", probe=False), LoraSettings(0, adapter_path=str(tmp_path)))
    assert "over a base with quantization=nf4 and is read over one with quantization=null" in caplog.text
    for change, text in (
        ({"use_dora": True}, "DoRA"),
        ({"init_lora_weights": "pissa"}, "changed the base"),
        ({"peft_type": "LOHA"}, "only LORA"),
    ):
        (tmp_path / CONFIG).write_text(json.dumps({**config, **change}))
        with pytest.raises(ModelError, match=text):
            add_lora(
                build_policy(folder, device="cpu", probe=False), LoraSettings(0, adapter_path=str(tmp_path))
            )
    (tmp_path / CONFIG).write_text(json.dumps(config))
    (tmp_path / WEIGHTS).rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelError, match="pickles are never loaded"):
        add_lora(build_policy(folder, device="cpu", probe=False), LoraSettings(0, adapter_path=str(tmp_path)))


def test_generation_says_what_training_says(folder: Path) -> None:
    policy = learned(folder)
    engine = NativeEngine(policy, eos_token_ids=[])
    prompt = (3, 5, 8)
    (output,) = engine.generate([GenerationRequest(0, Prompt(prompt), SamplingParams(max_tokens=6), seed=1)])
    rows = DataProto.from_dict(make_rows([list(prompt)], [output.token_ids], pad_id=0))
    again = policy(packed_rows(rows)).log_probs
    assert torch.allclose(again, torch.tensor(output.log_probs), atol=1e-5)


def test_fold_keeps_a_sharded_weight_sharded(two_ranks: object) -> None:
    assert two_ranks.run(fold_on_shards) == [True, True]  # type: ignore[attr-defined]


def fold_on_shards(rank: int) -> bool:
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (2,))
    draw = torch.Generator().manual_seed(0)
    weight, a, b = (torch.rand(*shape, generator=draw) for shape in ((5, 7), (3, 7), (5, 3)))
    parts = [distribute_tensor(each, mesh, [Shard(0)]) for each in (weight, a, b)]
    folded = fold(*parts, 0.5)
    turned = fold(
        distribute_tensor(weight.T.contiguous(), mesh, [Shard(0)]), *parts[1:], 0.5, transposed=True
    )
    plain = fold(weight, a, b, 0.5)
    placed = folded.placements == turned.placements == parts[0].placements
    return bool(
        placed
        and folded.full_tensor().allclose(plain, atol=1e-6)
        and turned.full_tensor().allclose(plain.T, atol=1e-6)
    )
