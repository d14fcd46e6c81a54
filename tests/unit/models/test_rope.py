"""Rotary scaling: each row has the log-probs that transformers gives it alone, whatever it is packed with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen2_5_VLConfig
from zoo import BASE, SUPPORTED, packed_rows, tiny_hf, tiny_rows

from hybridflow.errors import ModelError
from hybridflow.models.attention.rope import length_limit, longest_generated, row_lengths
from hybridflow.models.files.build import describe_model
from hybridflow.models.files.override import apply_override, effective_override
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows, pack, share_prompts
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationRequest, SamplingParams
from hybridflow.rollout.native.engine import NativeEngine

ORIGINAL = 16
ROWS = ((3, 6), (9, 13), (2, 1), (11, 19), (5, 9), (4, 26))
"""(prompt, response): three rows are longer than the original length, by different numbers."""
LONGROPE = {"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.0, 2.0, 3.0, 4.0], "factor": 4.0}
SCALING: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "dynamic": {"factor": 2.0},
    "longrope": LONGROPE,
}


def scaled_hf(kind: str, model_type: str = "llama", **given: Any) -> PreTrainedModel:
    """A random model with rotary scaling of a kind, asked for as verl's documents do."""
    config = AutoConfig.for_model(
        model_type, **{**BASE, **SUPPORTED[model_type], "max_position_embeddings": ORIGINAL}
    )
    override: dict[str, Any] = {"rope_scaling": {"type": kind, **SCALING[kind]}, **given}
    apply_override(config, override)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return hf.eval()


def by_transformers(hf: PreTrainedModel, packed: Any) -> Tensor:
    """Log-probs [M] of each row, run alone by a copy of the model that has seen no other row."""
    logits = []
    for row in packed.input_ids.split(packed.lengths):
        with torch.no_grad():
            logits.append(copy.deepcopy(hf)(input_ids=row[None], use_cache=False).logits[0])
    log_probs = torch.cat(logits).log_softmax(-1)[packed.predict_index]
    return log_probs.gather(-1, packed.targets[:, None])[:, 0]


@pytest.mark.parametrize("kind", SCALING)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_rows_beyond_the_original_length_are_those_of_transformers(kind: str, model_type: str) -> None:
    hf = scaled_hf(kind, model_type)
    unscaled = scaled_hf("linear", model_type, rope_scaling={"type": "default"})
    rows = tiny_rows(ROWS)
    packed = packed_rows(rows)
    wanted = by_transformers(hf, packed)
    assert (wanted - by_transformers(unscaled, packed)).abs().max() > 1e-3, "the scaling matters"
    policy = PolicyModel(hf)
    with torch.no_grad():
        got = policy(packed).log_probs
        again = policy(packed).log_probs
        turned = policy(packed_rows(rows, [5, 4, 3, 2, 1, 0])).log_probs
        alone = [policy(packed_rows(rows, [row])).log_probs for row in range(len(ROWS))]
    assert torch.equal(got, again), "no row leaves anything behind"
    assert torch.allclose(got, wanted, atol=2e-5)
    assert torch.allclose(got, torch.cat(alone), atol=1e-5)
    parts = turned.split([response for _, response in reversed(ROWS)])
    assert torch.allclose(got, torch.cat(parts[::-1]), atol=1e-5)


@pytest.mark.parametrize("kind", SCALING)
def test_what_is_generated_has_the_log_probs_of_training(kind: str) -> None:
    policy = PolicyModel(scaled_hf(kind))
    longest = longest_generated(policy.config)
    assert longest == (64 if kind == "yarn" else ORIGINAL)
    engine = NativeEngine(policy, eos_token_ids=[])
    prompts = [(5, 7, 9), (8, 4, 6, 11, 13), (9, 9, 9)]
    sampling = [SamplingParams(longest - len(prompt), ignore_eos=True) for prompt in prompts]
    requests = [
        GenerationRequest(number, Prompt(prompt), how, seed=number)
        for number, (prompt, how) in enumerate(zip(prompts, sampling, strict=True))
    ]
    too_long = GenerationRequest(3, Prompt((5,)), SamplingParams(longest), seed=0)
    outputs = {output.request_id: output for output in engine.generate([*requests, too_long])}
    assert outputs[3].finish_reason == "error" and f"{longest} positions" in str(outputs[3].error)
    made = [outputs[number] for number in range(3)]
    rows = DataProto.from_dict(make_rows(prompts, [output.token_ids for output in made], pad_id=0))
    with torch.no_grad():
        trained = policy(pack(rows)).log_probs
    assert torch.allclose(trained, torch.tensor([x for output in made for x in output.log_probs]), atol=2e-5)


def test_longrope_of_phi_and_a_scaling_that_is_the_same_for_all_lengths() -> None:
    hf = scaled_hf("longrope", "phi3", max_position_embeddings=64, original_max_position_embeddings=16)
    assert length_limit(hf.config) == ORIGINAL and longest_generated(hf.config) == ORIGINAL
    packed = packed_rows(tiny_rows(ROWS))
    wanted = by_transformers(hf, packed)
    with torch.no_grad():
        assert torch.allclose(PolicyModel(hf)(packed).log_probs, wanted, atol=2e-5)
    apply_override(hf.config, {"rope_scaling": {"short_factor": LONGROPE["long_factor"]}})
    assert length_limit(hf.config) is None and longest_generated(hf.config) == 64


def test_float64_rows_alone_and_packed_are_equal() -> None:
    policy = PolicyModel(scaled_hf("dynamic").double())
    rows = tiny_rows(ROWS)
    with torch.no_grad():
        got = policy(packed_rows(rows)).log_probs
        alone = torch.cat([policy(packed_rows(rows, [row])).log_probs for row in range(len(ROWS))])
    assert torch.allclose(got, alone, atol=1e-12, rtol=0)


def test_rows_that_share_a_prompt_cannot_have_frequencies_of_their_own() -> None:
    ids = [(5, 6, 7), (5, 6, 7)]
    packed = share_prompts(pack(DataProto.from_dict(make_rows(ids, [[8] * 20, [9] * 4], pad_id=0))))
    with pytest.raises(ModelError, match=r"a row of 23 tokens.*dynamic.*use_prefix_grouper=false"):
        PolicyModel(scaled_hf("dynamic"))(packed)
    PolicyModel(scaled_hf("yarn"))(packed)


def test_lengths_of_rows_by_their_positions() -> None:
    packed = torch.tensor([[0, 1, 2, 0, 0, 1, 5, 6, 7]])
    assert row_lengths(packed).tolist() == [3, 3, 3, 1, 2, 2, 8, 8, 8]
    assert row_lengths(torch.tensor([[4], [5], [0]])).tolist() == [5, 6, 1]


def test_a_model_that_rotates_in_its_own_way_is_refused() -> None:
    hf: Any = tiny_hf("llama")
    rotary = hf.model.rotary_emb
    apply_override(hf.config, {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    rotary.rope_type = "dynamic"

    class Own(type(rotary)):  # type: ignore[misc]
        def forward(self, x: Tensor, position_ids: Tensor) -> Any:
            return x, x

    rotary.__class__ = Own
    with pytest.raises(ModelError, match="Own chooses its rotary frequencies in a way of its own"):
        PolicyModel(hf)


def test_entries_of_the_language_model_inside_a_model_of_pictures() -> None:
    config = Qwen2_5_VLConfig()
    positions = config.text_config.max_position_embeddings
    override = {
        "rope_scaling": {"type": "yarn", "factor": 2.0},
        "max_position_embeddings": 1000,
        "text_config": {"rope_theta": 5e5},
        "attn_implementation": "flash_attention_2",
    }
    apply_override(config, override)
    rope = config.text_config.rope_parameters
    assert rope["rope_type"] == "yarn" and rope["rope_theta"] == 5e5
    assert rope["original_max_position_embeddings"] == positions
    assert config.text_config.max_position_embeddings == 1000
    told = effective_override(config, override)
    assert told == {"text_config": {"max_position_embeddings": 1000, "rope_parameters": rope}}
    with pytest.raises(ModelError, match=r"max_position_embeddings=1000 and .*text_config\..*=2000"):
        apply_override(config, {**override, "text_config": {"max_position_embeddings": 2000}})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout=0.1: dropout is always 0"),
        ({"torch_dtype": "bfloat16"}, "set model.dtype instead"),
    ],
)
def test_entries_without_effect_are_refused(override: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        apply_override(tiny_hf("llama").config, override)


def test_what_a_model_computes_with_is_said() -> None:
    config = scaled_hf(
        "longrope", "phi3", max_position_embeddings=64, original_max_position_embeddings=16
    ).config
    said = describe_model(config, torch.bfloat16)
    assert "rope longrope (factor 4, long_factor [4 numbers], original_max_position_embeddings 16" in said
    assert "rows of up to 16 tokens are generated" in said and "dtype bfloat16" in said
    moe = tiny_hf("qwen3_moe").config
    apply_override(moe, {"experts_implementation": "batched_mm"})
    assert "experts by batched_mm" in describe_model(moe, torch.float32)
