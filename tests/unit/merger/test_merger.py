from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybridflow import model_merger
from hybridflow.checkpoint import CheckpointStore
from hybridflow.checkpoint.layout import ACTOR, HF_FOLDER
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.merger import compare, merge
from hybridflow.models.build import build_policy
from hybridflow.models.policy import PolicyModel
from hybridflow.models.tiny import create_tiny_model


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_tiny_model(tmp_path_factory.mktemp("models") / "tiny", hidden=32, intermediate=64, heads=2, kv_heads=1)


def trained(folder: Path, dtype: str = "float32") -> PolicyModel:
    policy = build_policy(folder, device="cpu", dtype=dtype, probe=False)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.25)
    return policy


def save(run_dir: Path, source: Path, policy: PolicyModel, **more: Any) -> Path:
    def configuration(folder: Path) -> None:
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))

    state = {ACTOR: {"model": dict(policy.state_dict()), "optimizer": {"m": torch.zeros(3)}, "scheduler": {"num_steps": 1}, **more}}
    return CheckpointStore(run_dir).save(4, state, folders={f"{ACTOR}/{HF_FOLDER}": configuration})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_merged_folder_is_the_trained_model(tmp_path: Path, tiny_folder: Path, dtype: str) -> None:
    policy = trained(tiny_folder, dtype)
    step = save(tmp_path / "run", tiny_folder, policy)
    target = merge(step, tmp_path / "out" / "merged")
    again = build_policy(target, device="cpu", dtype=dtype)
    for name, tensor in policy.state_dict().items():
        assert again.state_dict()[name].equal(tensor), name
    assert json.loads((target / "config.json").read_text())["dtype"] == dtype
    assert load_tokenizer(target).decode(load_tokenizer(target).encode("1 + 2 = ?")) == "1 + 2 = ?"
    assert sorted(path.name for path in target.parent.iterdir()) == ["merged"], "nothing is left beside it"
    assert compare(step / ACTOR, target) == len(policy.state_dict())


def test_untied_weights_and_plain_names(tmp_path: Path, tiny_folder: Path) -> None:
    policy = build_policy(tiny_folder, device="cpu", dtype="float32", probe=False)
    step = save(tmp_path / "run", tiny_folder, policy, model=dict(policy.hf.state_dict()))
    merged = load_file(merge(step / ACTOR, tmp_path / "merged") / "model.safetensors")
    original = load_file(tiny_folder / "model.safetensors")
    assert merged.keys() == original.keys(), "tied weights are written once, as transformers writes them"
    assert all(merged[name].equal(original[name]) for name in original)


def test_damage_and_what_is_missing(tmp_path: Path, tiny_folder: Path) -> None:
    step = save(tmp_path / "run", tiny_folder, trained(tiny_folder))
    with pytest.raises(CheckpointError, match=r"no actor to merge at .*: there is no such folder"):
        merge(tmp_path / "run" / "global_step_5", tmp_path / "merged")
    with pytest.raises(CheckpointError, match=r"no actor to merge at .*: it holds .*global_step_4"):
        merge(tmp_path / "run", tmp_path / "merged")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    with pytest.raises(ConfigError, match="not an empty folder"):
        merge(step, tmp_path / "full")
    alone = shutil.copytree(step / ACTOR, tmp_path / "alone")
    (alone / HF_FOLDER / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        merge(alone, tmp_path / "merged")
    tensors = step / ACTOR / "state.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(CheckpointError, match="is damaged"):
        merge(step, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_checkpoint_without_the_model(tmp_path: Path) -> None:
    step = CheckpointStore(tmp_path).save(1, {ACTOR: {"optimizer": {}}})
    with pytest.raises(CheckpointError, match="save_contents"):
        merge(step, tmp_path / "merged")


def test_the_command(tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = save(tmp_path / "run", tiny_folder, trained(tiny_folder))
    source = ["--backend", "fsdp", "--local_dir", str(step / ACTOR)]
    target = tmp_path / "merged"
    assert model_merger.main(["merge", *source, "--target_dir", str(target)]) == 0
    assert model_merger.main(["test", *source, "--test_hf_dir", str(target)]) == 0
    assert "all equal bit for bit" in capsys.readouterr().out
    assert model_merger.main(["test", *source, "--test_hf_dir", str(tiny_folder)]) == 1
    assert "differs from the checkpoint's" in capsys.readouterr().err
    assert model_merger.main(["merge", "--backend", "megatron", "--local_dir", str(step), "--target_dir", str(tmp_path / "x")]) == 1
    assert "use --backend fsdp" in capsys.readouterr().err
