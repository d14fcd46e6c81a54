"""Every sampling parameter of the native engine against a slow float64 generation."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from rollout_models import EOS, VOCABULARY, prompts, requests_for, run, tiny_engine, tiny_hf
from transformers import PreTrainedModel

from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationRequest, SamplingParams
from hybridflow.rollout.native.rows import RowTable
from hybridflow.rollout.native.sampling import stream_keys, uniforms

FORBIDDEN = -float("inf")
PARAMS = [
    SamplingParams(10),
    SamplingParams(10, min_p=0.1, temperature=1.3),
    SamplingParams(10, top_k=7, top_p=0.9, min_p=0.02),
    SamplingParams(12, repetition_penalty=1.5),
    SamplingParams(12, repetition_penalty=0.7, greedy=True),
    SamplingParams(9, repetition_penalty=1.2, temperature=0.6, top_k=10, logit_bias=((5, 3.0), (6, -2.0))),
    SamplingParams(9, logit_bias=((7, 50.0), (EOS, FORBIDDEN)), greedy=True),
    SamplingParams(9, logit_bias=tuple((token, FORBIDDEN) for token in range(30)), temperature=2.0),
    SamplingParams(12, min_tokens=6, stop_token_ids=tuple(range(3, 30))),
    SamplingParams(12, min_tokens=12, stop_token_ids=tuple(range(3, 30)), temperature=2.0, min_p=0.01),
    SamplingParams(12, min_tokens=4, ignore_eos=True),
    SamplingParams(8, top_log_probs=5),
    SamplingParams(8, top_log_probs=VOCABULARY, temperature=0.5, min_p=0.3, repetition_penalty=1.3),
    SamplingParams(8, top_log_probs=1, temperature=0.0, min_tokens=3, logit_bias=((9, 1.0),)),
]


@cache
def reference_model() -> PreTrainedModel:
    return tiny_hf("llama", torch.float64)


def requests() -> list[GenerationRequest]:
    """Each of PARAMS for two prompts, with requests of other parameters between them."""
    return [
        GenerationRequest(number, Prompt(prompt), PARAMS[number % len(PARAMS)], seed=77 * number)
        for number, prompt in enumerate(prompts(2 * len(PARAMS)))
    ]


@torch.no_grad()
def reference(request: GenerationRequest) -> tuple[list[int], list[float], list[list[tuple[int, float]]]]:
    """Tokens, log-probs and most probable tokens, with nothing kept from one token to the next."""
    params, tokens, log_probs, top = (
        request.sampling,
        list[int](),
        list[float](),
        list[list[tuple[int, float]]](),
    )
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    while len(tokens) < params.max_tokens and not (tokens and tokens[-1] in ends):
        context = [*request.prompt_token_ids, *tokens]
        raw = reference_model()(torch.tensor([context])).logits[0, -1]
        changed = raw.tolist()
        for token, bias in params.logit_bias:
            changed[token] += bias
        for token in set(context):
            value = changed[token]
            changed[token] = (
                value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
            )
        if len(tokens) < params.min_tokens:
            for token in ends:
                changed[token] = FORBIDDEN
        temperature = 1.0 if params.takes_argmax else params.temperature
        everything = (raw / temperature).log_softmax(-1)
        token = (
            max(range(VOCABULARY), key=changed.__getitem__)
            if params.takes_argmax
            else _drawn(changed, request, len(tokens))
        )
        tokens.append(token)
        log_probs.append(float(everything[token]))
        top.append(
            [
                (int(one), float(everything[one]))
                for one in everything.argsort(descending=True)[: params.top_log_probs]
            ]
        )
    return tokens, log_probs, top


def _drawn(logits: list[float], request: GenerationRequest, place: int) -> int:
    params = request.sampling
    p = (torch.tensor(logits, dtype=torch.float64) / params.temperature).softmax(-1).tolist()
    order = sorted(
        (token for token in range(VOCABULARY) if p[token] >= params.min_p * max(p)),
        key=lambda token: -p[token],
    )
    order = order[: params.top_k] if params.top_k > 0 else order
    whole, held, kept = sum(p[token] for token in order), 0.0, []
    for token in order:
        if held < params.top_p * whole:
            kept.append(token)
        held += p[token]
    number = float(uniforms(stream_keys(torch.tensor([request.seed])), torch.tensor([place]), torch.float64))
    threshold, held = number * sum(p[token] for token in kept), 0.0
    for token in sorted(kept):
        held += p[token]
        if held > threshold:
            return token
    raise AssertionError("the sum of what is kept passes every threshold")


@pytest.mark.parametrize("max_num_seqs", [64, 5, 1])
def test_tokens_log_probs_and_top_log_probs_are_the_slow_ones(max_num_seqs: int) -> None:
    """Also where rows of other parameters enter, leave and move beside them (the model itself has parts in
    float32).
    """
    outputs = run(tiny_engine("llama", torch.float64, max_num_seqs=max_num_seqs), requests())
    for request in requests():
        output = outputs[request.request_id]
        tokens, log_probs, top = reference(request)
        assert output.token_ids == tokens, request
        assert output.log_probs == pytest.approx(log_probs, abs=5e-6)
        if not request.sampling.top_log_probs:
            assert output.top_log_probs is None
            continue
        assert output.top_log_probs is not None and len(output.top_log_probs) == len(tokens)
        for found, wanted in zip(output.top_log_probs, top, strict=True):
            assert [token for token, _ in found] == [token for token, _ in wanted]
            assert [value for _, value in found] == pytest.approx([value for _, value in wanted], abs=5e-6)


def test_what_a_request_asks_for_changes_no_other_request() -> None:
    """Nor its log-probs, beyond the rounding of larger matrix products."""
    plain = requests_for(prompts(6), n=2, max_tokens=10)
    others = [replace(request, request_id=100 + request.request_id) for request in requests()]
    alone = run(tiny_engine(), plain)
    mixed = run(tiny_engine(), [*others[:14], *plain, *others[14:]])
    for request in plain:
        one, other = alone[request.request_id], mixed[request.request_id]
        assert one.token_ids == other.token_ids and one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def test_min_tokens_holds_back_every_end() -> None:
    ends = tuple(range(3, VOCABULARY, 2))
    for sampling in (
        SamplingParams(20, stop_token_ids=ends),
        SamplingParams(20, stop_token_ids=ends, min_tokens=7),
    ):
        outputs = run(tiny_engine(), requests_for(prompts(12), sampling=sampling))
        least = min(len(output.token_ids) for output in outputs.values())
        assert least > sampling.min_tokens
        for output in outputs.values():
            assert not {EOS, *ends} & set(output.token_ids[: sampling.min_tokens])
            assert output.finish_reason == "stop" and output.stop_reason == output.token_ids[-1]


def test_an_end_token_that_the_vocabulary_lacks_is_no_end() -> None:
    requests = requests_for(prompts(4), max_tokens=8, min_tokens=3)
    wanted = run(tiny_engine(), requests)
    assert run(tiny_engine(eos=(EOS, VOCABULARY, 10 * VOCABULARY)), requests) == wanted


def test_a_row_that_was_put_aside_goes_on_with_all_it_had() -> None:
    """Its history, bias and most probable tokens come back with it, to a table whose columns have grown."""
    logits = 3 * torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(6, repetition_penalty=5.0, logit_bias=((4, 2.0),), top_log_probs=2, min_tokens=2)
    request = GenerationRequest(0, Prompt((7, 8, 9)), params, seed=3)
    outputs = []
    for aside in (False, True):
        table = RowTable(VOCABULARY, (EOS,), torch.float32, torch.device("cpu"))
        table.add([request])
        for step in range(5):
            if aside and step == 2:
                begun = request.continued(table.outputs([0], "abort")[0])
                table.remove([0])
                other = SamplingParams(
                    40, repetition_penalty=2.0, logit_bias=((5, 1.0), (6, 1.0)), stop_token_ids=(3,)
                )
                table.add([GenerationRequest(1, Prompt((1,) * 9), other, seed=1), begun])
            table.responses.take(table.choose(table.count - 1, logits[step : step + 1], 0))
        outputs += table.outputs([table.count - 1], "abort")
    assert outputs[0] == outputs[1] and len(outputs[0].token_ids) == 5


def test_what_ended_a_response() -> None:
    outputs = run(tiny_engine(), requests_for(prompts(20), max_tokens=15, stop_token_ids=(5, 9)))
    reasons = {output.stop_reason for output in outputs.values() if output.finish_reason == "stop"}
    assert {EOS, 5, 9} & reasons == reasons and len(reasons) > 1
    for output in outputs.values():
        assert output.stop_reason == (output.token_ids[-1] if output.finish_reason == "stop" else None)
        assert output.finish_reason == "stop" or len(output.token_ids) == 15


def test_a_request_that_cannot_be_sampled_gives_an_error_and_the_others_go_on() -> None:
    bad = [
        {"stop": ("x",)},
        {"logit_bias": ((VOCABULARY, 1.0),)},
        {"logit_bias": ((3, float("nan")),)},
        {"top_log_probs": VOCABULARY + 1},
    ]
    params = [SamplingParams(4, **change) for change in bad] + [SamplingParams(4)]  # type: ignore[arg-type]
    outputs = run(
        tiny_engine(),
        [GenerationRequest(number, Prompt((4, 5)), one, number) for number, one in enumerate(params)],
    )
    assert [outputs[number].finish_reason == "error" for number in range(5)] == [True] * 4 + [False]
    assert "request 0: stop=['x'] are texts, and this engine was built without `decode`" in (
        outputs[0].error or ""
    )
