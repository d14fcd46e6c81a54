"""The native engine against transformers, against training, and against itself in other company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rollout_models import EOS, KINDS, VOCABULARY, prompts, requests_for, run, tiny_engine
from torch import Tensor
from transformers import GenerationConfig

from hybridflow.models.flat_decoder import FlatDecoder, FlatLayer
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows, pack
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.rollout.native.sampling import stream_keys, uniforms


def greedy_by_transformers(engine: NativeEngine, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    hf = engine.policy.hf
    hf.set_attn_implementation("eager")
    config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=EOS, pad_token_id=0)
    ids = torch.tensor([prompt])
    out = hf.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[
        0, len(prompt) :
    ].tolist()
    hf.set_attn_implementation("hybridflow")
    return out


def training_log_probs(
    policy: PolicyModel,
    requests: list[GenerationRequest],
    outputs: dict[int, GenerationOutput],
    temperature: float,
) -> torch.Tensor:
    rows = make_rows(
        [r.prompt_token_ids for r in requests], [outputs[r.request_id].token_ids for r in requests], pad_id=0
    )
    return policy(pack(DataProto.from_dict(rows)), temperature=temperature).log_probs


@pytest.mark.parametrize("kind", list(KINDS))
def test_greedy_tokens_equal_those_of_transformers(kind: str) -> None:
    engine = tiny_engine(kind, max_num_seqs=7)
    token_ids = prompts(16)
    lengths = [3 + (5 * i) % 13 for i in range(16)]  # so that rows leave at different steps
    params = [SamplingParams(length, greedy=True) for length in lengths]
    outputs = run(engine, [GenerationRequest(i, Prompt(token_ids[i]), params[i], seed=0) for i in range(16)])
    wanted = [greedy_by_transformers(engine, prompt, length) for prompt, length in zip(token_ids, lengths)]
    assert [outputs[i].token_ids for i in range(16)] == wanted


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_training(kind: str, temperature: float) -> None:
    engine = tiny_engine(kind, max_num_seqs=5, max_num_batched_tokens=20)
    requests = requests_for(prompts(6), n=3, temperature=temperature, top_k=20, max_tokens=10)
    outputs = run(engine, requests)
    kept = torch.tensor([value for request in requests for value in outputs[request.request_id].log_probs])
    assert (training_log_probs(engine.policy, requests, outputs, temperature) - kept).abs().max() < 1e-4


def test_log_probs_of_greedy_rows_are_at_temperature_one() -> None:
    engine = tiny_engine()
    requests = requests_for(prompts(4), greedy=True, temperature=0.3)
    outputs = run(engine, requests)
    kept = torch.tensor([value for request in requests for value in outputs[request.request_id].log_probs])
    assert (training_log_probs(engine.policy, requests, outputs, 1.0) - kept).abs().max() < 1e-4


@pytest.mark.parametrize(("rows", "budget"), [(12, 8192), (5, 8192), (8, 16), (1, 8192)])
def test_a_group_is_prefilled_once_however_it_enters(rows: int, budget: int) -> None:
    engine = tiny_engine(dtype=torch.float64, max_num_seqs=rows, max_num_batched_tokens=budget)
    token_ids = prompts(3)
    requests = requests_for(token_ids, n=4, max_tokens=8)
    outputs = run(engine, requests)
    computed = engine.stats.prefill_tokens - sum(len(prompt) for prompt in token_ids)
    # whoever enters later computes the last token of the prompt once more, for its hidden state
    assert computed == 0 if rows == 12 else 0 <= computed <= 12 - rows
    assert engine.stats.max_rows == rows
    assert engine.stats.generated_tokens == sum(len(output.token_ids) for output in outputs.values())
    whole = run(tiny_engine(dtype=torch.float64), requests)
    for request_id, output in outputs.items():
        assert output.token_ids == whole[request_id].token_ids
        assert output.log_probs == pytest.approx(whole[request_id].log_probs, abs=1e-12)


def test_samples_follow_the_models_distribution() -> None:
    engine = tiny_engine(max_num_seqs=512)
    prompt = prompts(1)[0]
    outputs = run(engine, requests_for([prompt], n=3000, max_tokens=1))
    shares = (
        torch.bincount(
            torch.tensor([output.token_ids[0] for output in outputs.values()]), minlength=VOCABULARY
        )
        / 3000
    )
    engine.policy.hf.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = engine.policy.hf(torch.tensor([prompt]), use_cache=False).logits[0, -1].softmax(-1)
    assert (shares - wanted).abs().max() < 0.03


def test_outputs_come_as_they_finish_and_versions_go_with_the_tokens() -> None:
    engine = tiny_engine()
    engine.set_version(7)
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in (9, 2, 5)]
    stream = engine.generate(
        [GenerationRequest(i, Prompt(prompt), params[i], seed=i) for i, prompt in enumerate(prompts(3))]
    )
    first = next(stream)
    assert first.request_id == 1 and first.policy_versions == [7, 7]
    engine.set_version(8)
    second, third = stream
    assert second.policy_versions == [7, 7, 8, 8, 8] and third.policy_versions == [7, 7] + [8] * 7


def test_random_numbers_are_the_ones_of_the_request() -> None:
    engine = tiny_engine(dtype=torch.float64)
    request = requests_for(prompts(3), max_tokens=6, ignore_eos=True)[2]
    tokens = run(engine, [request])[2].token_ids
    numbers = uniforms(stream_keys(torch.tensor([request.seed])).expand(6), torch.arange(6), torch.float64)
    ids = list(request.prompt_token_ids)
    engine.policy.hf.set_attn_implementation("eager")
    for token, number in zip(tokens, numbers):
        with torch.no_grad():
            cumulative = (
                engine.policy.hf(torch.tensor([ids]), use_cache=False)
                .logits[0, -1]
                .double()
                .softmax(-1)
                .cumsum(-1)
            )
        assert int((cumulative <= number * cumulative[-1]).sum()) == token
        ids.append(token)


def test_a_flat_decoder_whose_states_differ_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step in which the ways are compared leaves the modules' keys and values in the cache."""
    requests = requests_for(prompts(3), temperature=0.0)
    engine = tiny_engine()
    wanted = run(engine, requests)
    assert isinstance(engine.policy._decoder, FlatDecoder)
    attend = FlatDecoder._attend

    def other(self: FlatDecoder, layer: FlatLayer, states: Tensor, *rest: Any) -> Tensor:
        return attend(self, layer, states * 1.5, *rest)

    monkeypatch.setattr(FlatDecoder, "_attend", other)
    engine = tiny_engine()
    found = run(engine, requests)
    assert engine.policy._decoder is not None and not isinstance(engine.policy._decoder, FlatDecoder)
    for row, output in wanted.items():
        assert (found[row].token_ids, found[row].log_probs) == (output.token_ids, output.log_probs)
