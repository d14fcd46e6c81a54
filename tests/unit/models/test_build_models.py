"""Loading, exporting and refusing model folders."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM
from zoo import tiny_hf

from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.distributed.device import resolve_device, set_threads
from hybridflow.errors import ConfigError, ModelError
from hybridflow.models.files.build import build_policy, load_config
from hybridflow.models.files.build_score import build_score
from hybridflow.models.files.export import save_hf
from hybridflow.models.files.size import matmul_parameters, workload_of
from hybridflow.models.tiny import create_tiny_model
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows, pack


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_tiny_model(folder: Path, tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    same, other = create_tiny_model(tmp_path / "same"), create_tiny_model(tmp_path / "other", seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    weights = [(path / "model.safetensors").read_bytes() for path in (folder, same, other)]
    assert weights[0] == weights[1] != weights[2]
    policy = build_policy(folder, device="cpu")
    assert 350_000 < policy.num_parameters < 450_000
    assert policy.dtype == torch.float32 and policy.device.type == "cpu"
    assert policy.head.weight is policy.hf.get_input_embeddings().weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_and_reload(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    policy = build_policy(folder, device="cpu", dtype=str(dtype).removeprefix("torch."))
    with torch.no_grad():
        policy.head.weight.add_(0.5)
    save_hf(policy, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert again.dtype == dtype and again.config._attn_implementation != "hybridflow"
    wanted = policy.hf.state_dict()
    assert wanted.keys() == again.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in wanted.items())


def test_value_of_a_folder(folder: Path) -> None:
    model = build_score("value", folder, device="cpu", gradient_checkpointing=True).train()
    packed = pack(DataProto.from_dict(make_rows([[2, 5, 9], [4]], [[8, 7], [30, 31, 32, 33]], pad_id=1)))
    values = model(packed)
    assert values.shape == (6,) and not values.any()


def test_override_config_and_dropout(folder: Path) -> None:
    policy = build_policy(
        folder,
        device="cpu",
        override_config={"attention_dropout": 0.0, "rope_parameters": {"rope_theta": 5000.0}},
    ).train()
    assert policy.config.rope_parameters["rope_theta"] == 5000.0
    packed = pack(DataProto.from_dict(make_rows([[2, 5, 9]], [[8, 7]], pad_id=1)))
    assert torch.equal(policy(packed).log_probs, policy(packed).log_probs)
    with pytest.raises(ModelError, match=r"attention_dropout=0\.1: dropout is always 0 here"):
        load_config(folder, override_config={"attention_dropout": 0.1})
    with pytest.raises(ModelError, match="no entry 'rope_tetha'"):
        load_config(folder, override_config={"rope_tetha": 1})


@pytest.mark.parametrize("variable", ["VERL_USE_MODELSCOPE", "HYBRIDFLOW_USE_MODELSCOPE"])
def test_models_from_modelscope(folder: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "True")
    monkeypatch.setitem(sys.modules, "modelscope", None)  # as if it were not installed
    for load in (load_tokenizer, load_config, lambda name: build_policy(name, device="cpu")):
        with pytest.raises(ConfigError, match=rf"{variable} is set and owner/name is no folder.*'remote'"):
            load("owner/name")
    asked: list[str] = []
    client = ModuleType("modelscope")
    monkeypatch.setattr(
        client, "snapshot_download", lambda name: asked.append(name) or str(folder), raising=False
    )
    monkeypatch.setitem(sys.modules, "modelscope", client)
    policy = build_policy("owner/name", device="cpu", probe=False)
    assert policy.head.weight.equal(build_policy(folder, device="cpu", probe=False).head.weight)
    assert load_tokenizer("owner/name").decode([5]) == load_tokenizer(folder).decode([5])
    assert set(asked) == {"owner/name"}


def _copy(folder: Path, target: Path, without: str = "") -> Path:
    shutil.copytree(folder, target)
    if without:
        (target / without).unlink()
    return target


def test_bad_folders(folder: Path, tmp_path: Path) -> None:
    cases = {
        "is no folder": tmp_path / "nowhere",
        "no config.json": _copy(folder, tmp_path / "a", "config.json"),
        "no weights": _copy(folder, tmp_path / "b", "model.safetensors"),
    }
    pickled = _copy(folder, tmp_path / "c", "model.safetensors")
    (pickled / "pytorch_model.bin").write_bytes(b"x")
    cases["is a pickle, which is never loaded"] = pickled
    for name, change in (
        ("d", {"model_type": "no_such_model"}),
        ("e", {"num_hidden_layers": 3}),
        ("f", {"model_type": "t5"}),
    ):
        changed = _copy(folder, tmp_path / name)
        (changed / "config.json").write_text(
            json.dumps(json.loads((changed / "config.json").read_text()) | change)
        )
        cases[{"d": "no_such_model", "e": "lacks 9 weights", "f": "no causal language model"}[name]] = changed
    broken = _copy(folder, tmp_path / "g")
    (broken / "model.safetensors").write_bytes(b"not safetensors at all")
    cases["cannot load"] = broken
    for message, path in cases.items():
        with pytest.raises(ModelError, match=message):
            build_policy(path, device="cpu")
    with pytest.raises(ModelError, match="float16"):
        build_policy(folder, device="cpu", dtype="float16")


def test_flops() -> None:
    hf = tiny_hf("llama")
    width, heads, head_dim, layers = 32, 4, 8, 2
    per_layer = width * width * 2 + width * 16 * 2 + 3 * width * 48
    # norms are counted too: a few values a layer
    assert 0 <= matmul_parameters(hf) - (layers * per_layer + 64 * width) <= 5 * width
    count = matmul_parameters(hf)
    attention = sum(4 * heads * head_dim * length**2 / 2 for length in (10, 20)) * layers
    workload = workload_of(hf.config, count)
    assert workload.cost(10) + workload.cost(20) == 2 * count * 30 + attention
    moe = tiny_hf("qwen3_moe")
    assert matmul_parameters(moe) < 0.75 * sum(p.numel() for p in moe.parameters())


def test_device() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ConfigError, match="wanted one of"):
        resolve_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="auto or cpu"):
            resolve_device("cuda")
    threads = torch.get_num_threads()
    assert set_threads(None) == threads and set_threads(threads) == threads
    with pytest.raises(ConfigError, match="1 or more"):
        set_threads(0)
