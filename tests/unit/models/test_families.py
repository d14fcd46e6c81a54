"""Every family of the page of families does what its row says, and those it refuses are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_families import (
    FAMILIES,
    REFUSED,
    SPREADS,
    adapters,
    exact_problem,
    generated,
    gradients_apart,
    in_stages,
    packed_apart,
    read_back,
    refused,
    shared_apart,
    spread,
)
from zoo import tiny_hf

from hybridflow.config.model import ModelConfig
from hybridflow.errors import ModelError
from hybridflow.models.files.build import build_policy
from hybridflow.models.files.probe import layer_facts, probe_policy
from hybridflow.models.files.size import size_of
from hybridflow.models.policy import PolicyModel
from hybridflow.planner.model_shape import read_shape
from ranks import Ranks

PAGE = Path(__file__).parents[3] / "benchmarks" / "results" / "families.md"
UNCUT = {"GLM-4.7-Flash", "gpt-oss"}
"""Families that transformers publishes no plan of tensor parallelism for, or one with parts unknown here."""


@pytest.mark.parametrize("name", FAMILIES)
def test_training_is_transformers(name: str) -> None:
    family = FAMILIES[name]
    assert 0 < packed_apart(family, torch.float32) < 2e-5
    assert packed_apart(family, torch.float64) < 1e-12
    assert gradients_apart(family) < 1e-12
    assert shared_apart(family) < 1e-12


@pytest.mark.parametrize("name", FAMILIES)
def test_generation_is_transformers(name: str) -> None:
    found = generated(FAMILIES[name])
    assert found.same_tokens == found.tokens > 60 and found.apart < 2e-5
    assert exact_problem(FAMILIES[name]) == "" or name in ("DeepSeek-V3", "GLM-4.7-Flash")


@pytest.mark.parametrize("name", FAMILIES)
def test_folders_adapters_and_stages(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    assert read_back(family, tmp_path) > 10
    layers, apart = adapters(family)
    assert layers >= 8 and apart < 1e-4
    assert in_stages(family) == 0.0


@pytest.mark.parametrize("name", FAMILIES)
def test_the_cache_is_as_large_as_planned(name: str, tmp_path: Path) -> None:
    hf = FAMILIES[name].hf()
    hf.config.save_pretrained(tmp_path)
    counted = size_of("policy", ModelConfig(path=str(tmp_path)), dtype="float32", device=torch.device("cpu"))
    stored = sum(shape.bytes_per_token for shape in layer_facts(PolicyModel(hf))[0].values()) // 4
    for size in (counted, read_shape(hf.config.to_dict(), name).size()):
        assert 2 * size.num_layers * size.num_kv_heads * size.head_dim == stored


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_are_one_or_refuse(name: str, two_ranks: Ranks) -> None:
    family = FAMILIES[name]
    for how in SPREADS:
        found = spread(two_ranks, how, family)
        sliced = how in ("TP 2", "generation TP 2")
        if (sliced and (family.sparse or name in UNCUT)) or (how == "TP 2 with EP 2" and name in UNCUT):
            assert isinstance(found, str) and "cannot be cut by tensor parallelism" in found, (how, found)
        elif "EP" in how and not family.sparse:
            assert isinstance(found, str) and "has no experts" in found, (how, found)
        else:
            assert isinstance(found, float) and found < 1e-12, (how, found)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused(name: str) -> None:
    said = refused(REFUSED[name])
    assert REFUSED[name].model_type in said.lower() or "does not give the same log-probs" in said


@pytest.mark.parametrize("name", ["Qwen3-Next", "Llama 4", "Falcon"])
def test_layers_that_are_no_attention_are_refused_before_weights_are_read(name: str, tmp_path: Path) -> None:
    REFUSED[name].hf().config.save_pretrained(tmp_path)  # there are no weights to read
    with pytest.raises(ModelError, match=r"layer_types are full_attention|does not let its attention"):
        build_policy(tmp_path, device="cpu")


def test_a_window_that_only_a_mask_knows_is_found_in_short_rows() -> None:
    """The rows of the probe are shorter than the window, which is narrowed for them and wide again after."""
    policy = PolicyModel(tiny_hf("qwen2_moe", sliding_window=100, use_sliding_window=True))
    with pytest.raises(ModelError, match="packed as a row alone: they differ by"):
        probe_policy(policy)
    assert policy.config.sliding_window == 100
    heeded = PolicyModel(tiny_hf("qwen2", sliding_window=100, use_sliding_window=True, max_window_layers=0))
    assert probe_policy(heeded) < 1e-4
    assert layer_facts(heeded)[1][0].sliding_window == 100
    never_crossed = PolicyModel(tiny_hf("phimoe", sliding_window=128, num_local_experts=4))
    assert probe_policy(never_crossed) < 1e-4


def test_an_error_in_a_packed_pass_is_told_as_one_of_the_model() -> None:
    policy = PolicyModel(tiny_hf("llama"))
    forward = policy.hf.model.layers[0].forward

    def only_with_a_mask(hidden_states: torch.Tensor, *args: object, **kwargs: object) -> object:
        if kwargs["attention_mask"] is None:
            raise TypeError("'NoneType' object is not subscriptable")
        return forward(hidden_states, *args, **kwargs)

    policy.hf.model.layers[0].forward = only_with_a_mask
    with pytest.raises(ModelError, match=r"LlamaForCausalLM fails where rows are packed .*NoneType"):
        probe_policy(policy)


def test_the_page_has_a_row_for_each_family() -> None:
    rows = [line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert set(FAMILIES) | set(REFUSED) <= set(rows)
