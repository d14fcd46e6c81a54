"""Models filled from files slice by slice: those that are loaded whole, and the same refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForTokenClassification
from zoo import SUPPORTED, packed_rows, tiny_hf, tiny_rows

from hybridflow.errors import ModelError
from hybridflow.models.attention.layouts import PackedLayout
from hybridflow.models.blocks import compile_blocks, decoder_blocks
from hybridflow.models.files import sharded_load
from hybridflow.models.files.build import build_policy
from hybridflow.models.files.build_score import build_score
from hybridflow.models.files.probe_architecture import probe_architecture, small_config
from hybridflow.models.files.sharded_load import load_weights, materialise, meta_model, parameters_on_meta
from hybridflow.models.policy import PolicyModel
from hybridflow.models.value import ValueModel
from ranks import Ranks

CPU = torch.device("cpu")


def save(hf: Any, folder: Path, *, several: bool = False) -> Path:
    hf.save_pretrained(folder, **({"max_shard_size": "20KB"} if several else {}))
    return folder


def load(
    path: Path, kind: Any = "policy", dtype: torch.dtype = torch.float32, **settings: Any
) -> PolicyModel | ValueModel:
    meta = meta_model(kind, path, dtype=dtype, **settings)
    assert all(parameter.is_meta for parameter in meta.module.parameters())
    assert not any(b.is_meta for b in meta.module.buffers())
    materialise(meta.module, CPU, CPU)
    load_weights(meta)
    return meta.module


def same(ours: nn.Module, theirs: nn.Module, but: tuple[str, ...] = ()) -> bool:
    """Parameters and buffers, those too that are in no file."""
    parts = [({**dict(m.named_parameters()), **dict(m.named_buffers())}) for m in (ours, theirs)]
    assert parts[0].keys() == parts[1].keys()
    return all(
        torch.equal(parts[0][name], value) and parts[0][name].dtype == value.dtype
        for name, value in parts[1].items()
        if name not in but
    )


@pytest.mark.parametrize("model_type", sorted(SUPPORTED))
def test_every_architecture_is_the_same_as_when_loaded_whole(model_type: str, tmp_path: Path) -> None:
    """Fused experts are not in the files as the model has them: those are loaded whole."""
    folder = save(tiny_hf(model_type), tmp_path / "model", several=model_type == "qwen3")
    ours, theirs = load(folder), build_policy(folder, device="cpu", probe=False)
    assert same(ours, theirs)
    packed = packed_rows(tiny_rows())
    assert torch.equal(ours(packed).log_probs, theirs(packed).log_probs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_values_and_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save(tiny_hf("qwen2"), tmp_path / "model")
    name = str(dtype).removeprefix("torch.")
    assert same(load(folder, dtype=dtype), build_policy(folder, device="cpu", dtype=name, probe=False))
    ours, theirs = (
        load(folder, "value", dtype),
        build_score("value", folder, device="cpu", dtype=name, probe=False),
    )
    assert same(ours, theirs, but=("head.weight", "head.bias")), "a value head is in no file"


def test_a_critic_that_begins_from_a_critic_reads_its_head(tmp_path: Path) -> None:
    config = tiny_hf("qwen2").config
    config.num_labels = 1
    AutoModelForTokenClassification.from_config(config).save_pretrained(tmp_path / "critic")
    ours, theirs = load(tmp_path / "critic", "value"), build_score("value", tmp_path / "critic", device="cpu")
    assert same(ours, theirs) and bool(theirs.head.weight.any())
    assert theirs.head.weight.data_ptr() % 16 == 0, "its bits depend on the place otherwise, on AMD"
    packed = packed_rows(tiny_rows())
    assert torch.equal(ours(packed), theirs(packed))


def test_tied_weights_stay_one_and_may_have_either_name(tmp_path: Path) -> None:
    folder = save(tiny_hf("qwen2"), tmp_path / "model")
    policy = load(folder)
    assert isinstance(policy, PolicyModel) and policy.head.weight is policy.hf.get_input_embeddings().weight
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert same(load(folder), policy)


def test_end_tokens_and_switches_are_read(tmp_path: Path) -> None:
    hf = tiny_hf("llama")
    hf.generation_config.eos_token_id = [2, 5]
    folder = save(hf, tmp_path / "model")
    hf.config.attention_dropout = 0.5
    hf.config.save_pretrained(folder)
    policy = load(folder, gradient_checkpointing=True)
    assert isinstance(policy, PolicyModel) and policy.hf.generation_config.eos_token_id == [2, 5]
    assert policy.config.attention_dropout == 0.0
    assert policy.hf.is_gradient_checkpointing
    assert not policy.training


def change(folder: Path, target: Path, **weights: Tensor | None) -> Path:
    shutil.copytree(folder, target)
    found = load_file(target / "model.safetensors")
    for name, value in weights.items():
        key = name.replace("__", ".")
        found.pop(key)
        if value is not None:
            found[key] = value
    save_file(found, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_what_is_wrong_with_the_files_is_said(tmp_path: Path) -> None:
    folder = save(tiny_hf("llama"), tmp_path / "model")
    cases: list[tuple[Path, str]] = [
        (change(folder, tmp_path / "a", model__norm__weight=None), r"lacks 1 weights .* 'model.norm.weight'"),
        (
            change(folder, tmp_path / "b", model__norm__weight=torch.ones(3)),
            "of another shape|size mismatch|mismatch",
        ),
        (
            change(folder, tmp_path / "c", model__norm__weight=torch.full((32,), torch.nan)),
            r"model.norm.weight holds NaN or infinity",
        ),
    ]
    broken = change(folder, tmp_path / "d")
    (broken / "model.safetensors").write_bytes(b"not safetensors at all")
    cases.append((broken, "cannot load model"))
    several = save(tiny_hf("llama"), tmp_path / "e", several=True)
    next(several.glob("model-00001-*.safetensors")).unlink()
    cases.append((several, r"names 1 files that are not there, the first model-00001"))
    unnamed = save(tiny_hf("llama"), tmp_path / "g", several=True)
    (unnamed / "model.safetensors.index.json").write_text(json.dumps({"weights": {}}))
    cases.append((unnamed, "cannot load model"))
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "config.json").write_text((folder / "config.json").read_text())
    cases.append((tmp_path / "f", r"has no weights: \*.safetensors is missing"))
    for path, says in cases:
        with pytest.raises(ModelError, match=says):
            load(path)


def test_registering_parameters_is_as_ever_afterwards() -> None:
    before = nn.Module.register_parameter
    with pytest.raises(RuntimeError, match="inside"), parameters_on_meta():
        assert nn.Linear(2, 2).weight.is_meta
        raise RuntimeError("inside")
    assert nn.Module.register_parameter is before and not nn.Linear(2, 2).weight.is_meta


def read_shards(rank: int, path: str) -> tuple[int, int, bool]:
    """(elements read from the files, elements held, all pieces right)."""
    numels: list[int] = []
    make = sharded_load._file_reader

    def counting(*args: Any) -> Any:
        read = make(*args)
        assert read is not None

        def count(names: tuple[str, ...], where: tuple[slice, ...]) -> Tensor:
            value = read(names, where)
            numels.append(value.numel())
            return value

        return count

    sharded_load._file_reader = counting
    try:
        meta = meta_model("policy", path, dtype=torch.float32)
        for block in decoder_blocks(meta.module):
            fully_shard(block)
        fully_shard(meta.module)
        materialise(meta.module, CPU, CPU)
        load_weights(meta)
    finally:
        sharded_load._file_reader = make
    expected = dict(build_policy(path, device="cpu", probe=False).named_parameters())
    right = all(
        torch.equal(parameter.full_tensor(), expected[name])
        for name, parameter in meta.module.named_parameters()
    )  # type: ignore[attr-defined]
    return sum(numels), sum(p.to_local().numel() for p in meta.module.parameters()), right  # type: ignore[attr-defined]


@pytest.mark.parametrize("several", [False, True])
def test_a_rank_reads_its_own_slices_only(two_ranks: Ranks, tmp_path: Path, several: bool) -> None:
    hf = tiny_hf("llama", hidden_size=28, intermediate_size=45, head_dim=6, vocab_size=65)
    folder = save(hf, tmp_path / "model", several=several)
    assert (folder / "model.safetensors.index.json").is_file() == several
    total = sum(parameter.numel() for parameter in hf.parameters())
    ranks = two_ranks.run(read_shards, str(folder))
    assert all(read == held and right for read, held, right in ranks)
    assert sum(read for read, _, _ in ranks) == total


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_moe", "deepseek_v3"])
def test_a_small_twin_is_probed(model_type: str) -> None:
    config = tiny_hf(model_type).config
    before = torch.random.get_rng_state()
    difference = probe_architecture(config, CPU)
    assert difference is not None and difference < 1e-3 and torch.equal(torch.random.get_rng_state(), before)


def test_the_twin_has_every_kind_of_layer() -> None:
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    config = tiny_hf("gemma3_text", num_hidden_layers=8, layer_types=kinds * 2).config
    small = small_config(config)
    assert small.layer_types == kinds and small.num_hidden_layers == 4 and config.num_hidden_layers == 8
    assert small_config(tiny_hf("llama", num_hidden_layers=5).config).num_hidden_layers == 2


def test_the_twin_finds_attention_that_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = PackedLayout.attend
    monkeypatch.setattr(
        PackedLayout, "attend", lambda self, q, k, v, scores: attend(self, q, k.roll(1, 2), v, scores)
    )
    with pytest.raises(ModelError, match="does not give the same log-probs"):
        probe_architecture(tiny_hf("llama", initializer_range=0.02).config, CPU)


def test_a_twin_too_large_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridflow.models.files.probe_architecture.MAX_PARAMETERS", 10)
    assert probe_architecture(tiny_hf("llama").config, CPU) is None


@pytest.mark.parametrize("model_type", sorted(SUPPORTED))
def test_blocks_are_found(model_type: str) -> None:
    hf = tiny_hf(model_type)
    for model in (PolicyModel(hf), ValueModel(hf)):
        blocks = decoder_blocks(model)
        assert len(blocks) == 2
        assert sum(p.numel() for block in blocks for p in block.parameters()) > 0.5 * matrices(hf)


def matrices(hf: nn.Module) -> int:
    return sum(
        p.numel() for name, p in hf.named_parameters() if "embed" not in name and "lm_head" not in name
    )


@pytest.mark.slow
def test_compiled_blocks_keep_names_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced but not turned into machine code, which takes minutes here."""
    compiler = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **settings: compiler(function, backend="eager", **settings)
    )
    policy, packed = PolicyModel(tiny_hf("llama")), packed_rows(tiny_rows())
    names, expected = list(policy.state_dict()), policy(packed).log_probs
    compile_blocks(policy, decoder_blocks(policy))
    assert list(policy.state_dict()) == names
    torch._dynamo.reset()
    for lengths in (((3, 6), (7, 5)), ((2, 2), (4, 1), (5, 3)), ((3, 6), (7, 5), (2, 1), (5, 9))):
        found = policy(packed_rows(tiny_rows(lengths))).log_probs
    assert torch.allclose(found, expected, atol=1e-6)
    counters = torch._dynamo.utils.counters
    assert counters["frames"]["ok"] == counters["frames"]["total"] > 0, "the attention, nothing else"
    assert len(counters["graph_break"]) == 1, "the attention, nothing else"
    torch._dynamo.reset()
