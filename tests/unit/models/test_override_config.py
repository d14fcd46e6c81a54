"""`override_config`: what it names is what the model computes with, and what is saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, Gemma3TextConfig, LlamaConfig, MixtralConfig, Qwen2Config

from hybridflow.errors import ModelError
from hybridflow.models.files.build import build_policy, load_config, override_in_full
from hybridflow.models.files.export import save_config
from hybridflow.models.files.override import apply_override
from hybridflow.models.files.sharded_load import meta_model
from hybridflow.models.policy import PolicyModel
from hybridflow.models.tiny import create_tiny_model

YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny", hidden=32, intermediate=64, heads=2, kv_heads=1
    )


def tables(policy: PolicyModel) -> tuple[Tensor, Tensor]:
    """cos and sin of a few positions, as the layers get them."""
    rotary: Any = policy.hf.base_model.rotary_emb
    cos, sin = rotary(torch.zeros(1, 1, 1), torch.arange(50, 60)[None])
    return cos, sin


@pytest.mark.parametrize(
    "override",
    [
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"type": "yarn", "factor": 4.0}},
        {"rope_parameters": YARN},
        {"rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 4.0}},
    ],
)
def test_scaling_under_each_of_its_names(folder: Path, tmp_path: Path, override: dict[str, Any]) -> None:
    written = shutil.copytree(folder, tmp_path / "written")
    content = json.loads((folder / "config.json").read_text())
    content["rope_parameters"] |= YARN
    (written / "config.json").write_text(json.dumps(content))
    wanted, unscaled = (build_policy(path, device="cpu", probe=False) for path in (written, folder))
    policy = build_policy(folder, device="cpu", override_config=override)
    for got, want, plain in zip(tables(policy), tables(wanted), tables(unscaled), strict=True):
        assert got.equal(want) and not torch.allclose(got, plain, atol=1e-2)
    shard = meta_model("policy", folder, dtype=torch.float32, override_config=override).module
    assert isinstance(shard, PolicyModel) and tables(shard)[0].equal(tables(wanted)[0])
    save_config(policy, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())["rope_parameters"]
    assert saved["rope_type"] == "yarn" and saved["factor"] == 4.0 and saved.get("type", "yarn") == "yarn"
    assert AutoConfig.from_pretrained(tmp_path / "saved").rope_parameters == policy.config.rope_parameters


def test_the_original_length_is_the_models_own() -> None:
    config = Qwen2Config(max_position_embeddings=1000)
    apply_override(config, {"max_position_embeddings": 4000, "rope_scaling": {"type": "yarn", "factor": 4.0}})
    assert config.max_position_embeddings == 4000
    assert config.rope_parameters["original_max_position_embeddings"] == 1000


def test_a_width_of_heads_that_config_json_leaves_open() -> None:
    config = MixtralConfig(hidden_size=32, num_attention_heads=4, head_dim=None)
    apply_override(config, {"rope_scaling": YARN})
    assert config.head_dim == 8, "transformers computes scaled frequencies of it"


def test_another_type_leaves_nothing_of_the_one_before() -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    known = {"rope_theta": 5e5, "original_max_position_embeddings": 512}
    config = LlamaConfig(max_position_embeddings=4096, rope_parameters={**llama3, **known})
    apply_override(config, {"rope_parameters": {"factor": 2.0}})
    assert config.rope_parameters == {**llama3, **known, "factor": 2.0}, "the same type is merged"
    apply_override(config, {"rope_parameters": YARN})
    assert config.rope_parameters == {**YARN, **known}
    apply_override(config, {"rope_parameters": {"rope_type": "default"}})
    assert config.rope_parameters["rope_type"] == "default" and "factor" not in config.rope_parameters


def test_theta_by_its_old_name(folder: Path) -> None:
    assert load_config(folder, override_config={"rope_theta": 5e5}).rope_parameters["rope_theta"] == 5e5


def test_settings_for_each_type_of_layer() -> None:
    config = Gemma3TextConfig()
    apply_override(config, {"rope_parameters": {"full_attention": {"type": "linear", "factor": 8.0}}})
    assert config.rope_parameters["full_attention"] == {
        "rope_type": "linear",
        "factor": 8.0,
        "rope_theta": 1e6,
    }
    assert config.rope_parameters["sliding_attention"]["rope_type"] == "default"
    with pytest.raises(ModelError, match=r"name it: override_config\.rope_parameters\.sliding_attention\."):
        apply_override(config, {"rope_scaling": {"type": "linear", "factor": 8.0}})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            {"rope_scaling": {"factor": 4.0}},
            "sets factor, but its rope_type is 'default'.*for example to yarn",
        ),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear"}}, "type='yarn' and rope_type='linear'"),
        ({"rope_scaling": YARN, "rope_parameters": YARN}, "names both rope_parameters and rope_scaling"),
        (
            {"rope_scaling": {"type": "yarm", "factor": 4.0}},
            r"rope_type='yarm': wanted one of default, .*yarn",
        ),
        ({"rope_scaling": {"type": "yarn"}}, "Missing required keys.*factor"),
        ({"rope_scaling": "yarn"}, r"wanted a block of keys.*rope_scaling\.rope_type=yarn"),
        ({"rope_theta": 1.0, "rope_scaling": {"rope_theta": 2.0}}, "give it once"),
    ],
)
def test_contradictions_are_refused(folder: Path, override: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_config(folder, override_config=override)


def test_a_value_that_the_model_fixes() -> None:
    config = LlamaConfig(original_max_position_embeddings=64, max_position_embeddings=128)
    with pytest.raises(ModelError, match=r"original_max_position_embeddings=32: .* fixes it at 64"):
        apply_override(config, {"rope_scaling": {**YARN, "original_max_position_embeddings": 32}})


def test_what_another_engine_is_told(folder: Path) -> None:
    override = {"rope_scaling": {"type": "yarn", "factor": 4.0}, "attention_dropout": 0.0}
    told = override_in_full(folder, False, override)
    scaled = load_config(folder, override_config=override).rope_parameters
    assert scaled["rope_theta"] and told == {"attention_dropout": 0.0, "rope_parameters": scaled}
    assert load_config(folder, override_config=told).rope_parameters == scaled
    assert override_in_full(folder, False, {"attention_dropout": 0.0}) == {"attention_dropout": 0.0}
    assert override_in_full(folder, False, {}) is None
