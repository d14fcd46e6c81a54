"""Reward models: the numbers of transformers' classifiers, whatever the head is called in their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from zoo import BASE, SUPPORTED, tiny_hf

from hybridflow.config.model import OptimConfig
from hybridflow.engines import BatchLimits, OutputSpec
from hybridflow.engines.build import build_engine
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.errors import ModelError
from hybridflow.models.adapters.lora import LoraSettings
from hybridflow.models.files.build_score import build_score
from hybridflow.models.files.sharded_load import meta_model
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows, pack, share_prompts

PROMPTS = [[5, 9, 11], [5, 9, 11], [7]]
RESPONSES = [[8, 7], [30, 31, 32, 33], [12, 13, 14]]
MASKS = [[1, 1], [1, 0, 1, 0], [0, 1, 1]]
"""Two rows have tokens that a tool has given, one of them at its end."""
HEADS: dict[Any, Any] = {
    "score": AutoModelForSequenceClassification,
    "token_score": AutoModelForTokenClassification,
}


def rows() -> DataProto:
    return DataProto.from_dict(make_rows(PROMPTS, RESPONSES, pad_id=0, response_masks=MASKS))


def classifier(kind: str, model_type: str = "llama", labels: int = 1) -> PreTrainedModel:
    settings = {**BASE, **SUPPORTED[model_type], "num_labels": labels}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = AutoConfig.for_model(model_type, **settings)
        return HEADS[kind].from_config(config, attn_implementation="eager").eval()


def reference(hf: PreTrainedModel, kind: str) -> Tensor:
    """The scores [B, R] by transformers' own forward, a row at a time in float64."""
    wide = hf.double()
    found = torch.zeros(len(PROMPTS), max(map(len, RESPONSES)), dtype=torch.float64)
    for row, (prompt, response, mask) in enumerate(zip(PROMPTS, RESPONSES, MASKS, strict=True)):
        with torch.no_grad():
            logits = wide(input_ids=torch.tensor([prompt + response])).logits[0]
        if logits.shape[-1] == 2:
            logits = logits[..., 1:] - logits[..., :1]
        places = [column for column, sampled in enumerate(mask) if sampled]
        if kind == "score":
            found[row, places[-1]] = logits[0]
        else:
            found[row, places] = logits[len(prompt) :, 0][places]
    return found


def load(kind: Any, folder: Path, **more: Any) -> FSDPEngine:
    model = {"path": str(folder), "device": torch.device("cpu"), "dtype": "float32", "probe": False}
    optim = more.pop("optim", None)
    return build_engine(kind, model, name="reward_model", optim=optim, **more)


def scores(engine: FSDPEngine) -> Tensor:
    return engine.forward(rows(), OutputSpec(scores=True), BatchLimits(12))["scores"]


def squares(answers: dict[str, Tensor], micro: DataProto) -> tuple[Tensor, Metrics]:
    return ((answers["scores"] - 1.0) ** 2 * micro.batch["response_mask"]).sum(), Metrics()


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "gpt_neox"])
@pytest.mark.parametrize("kind", sorted(HEADS))
def test_scores_are_those_of_transformers(kind: str, model_type: str, tmp_path: Path) -> None:
    for labels in (1, 2):
        hf = classifier(kind, model_type, labels)
        hf.save_pretrained(tmp_path / f"{labels}")
        got = scores(load(kind, tmp_path / f"{labels}"))
        torch.testing.assert_close(got.double(), reference(hf, kind), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_shared_prompts_give_the_same_scores(kind: Any, tmp_path: Path) -> None:
    classifier(kind).save_pretrained(tmp_path)
    model = build_score(kind, tmp_path, device="cpu", dtype="float64")
    packed = pack(rows())
    shared = share_prompts(packed)
    assert shared.num_tokens < packed.num_tokens
    with torch.no_grad():
        torch.testing.assert_close(model(shared), model(packed), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["v_head.summary", "v_head", "classifier"])
def test_a_head_may_have_another_name(name: str, tmp_path: Path) -> None:
    hf = classifier("score")
    hf.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights[f"{name}.weight"] = weights.pop("score.weight")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    del config["id2label"], config["label2id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = load("score", tmp_path)
    torch.testing.assert_close(scores(engine).double(), reference(hf, "score"), atol=2e-5, rtol=2e-5)
    engine.export_hf(tmp_path / "out")
    assert "score.weight" in load_file(tmp_path / "out" / "model.safetensors")
    weights[f"{name}.bias"] = torch.ones(1)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refused = r"bias in its files, which LlamaForSequenceClassification has no place for"
    with pytest.raises(ModelError, match=refused):
        load("score", tmp_path)
    with pytest.raises(ModelError, match=refused):  # of several ranks, too
        meta_model("score", tmp_path, dtype=torch.float32)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)])
@pytest.mark.parametrize("kind", sorted(HEADS))
def test_trained_saved_and_exported(kind: Any, lora: LoraSettings | None, tmp_path: Path) -> None:
    """From a causal LM: scores begin at 0, move, come back from a state, and are what transformers reads."""
    tiny_hf("qwen3").save_pretrained(tmp_path / "base")
    with pytest.raises(ModelError, match="has no head"):
        load(kind, tmp_path / "base")
    optim = OptimConfig(lr=0.02)
    engine = load(kind, tmp_path / "base", optim=optim, lora=lora)
    assert not scores(engine).any()
    for _ in range(3):
        engine.train_mini_batch(rows(), OutputSpec(scores=True), squares, BatchLimits(12))
    trained = scores(engine)
    assert trained.any()
    again = load(kind, tmp_path / "base", optim=optim, lora=lora)
    again.load_state_dict(engine.state_dict())
    assert torch.equal(scores(again), trained)
    engine.export_hf(tmp_path / "out")
    hf, info = HEADS[kind].from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and hf.config.num_labels == 1
    torch.testing.assert_close(trained.double(), reference(hf, kind), atol=5e-5, rtol=5e-5)
    assert torch.allclose(scores(load(kind, tmp_path / "out")), trained, atol=1e-5)


def test_three_labels_are_refused(tmp_path: Path) -> None:
    classifier("score", labels=3).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="one label"):
        load("score", tmp_path)
