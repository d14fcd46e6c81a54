"""The native engine with pictures: log-probs of training, shared prefill, and no sampled placeholder."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hybridflow.models.exact_mode import ExactMode
from hybridflow.models.policy import PolicyModel
from hybridflow.models.vision import placeholder_ids
from hybridflow.protocol import prompt as prompt_module
from hybridflow.protocol.packing import pack
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.rollout.self_check import choose_exact_mode
from picture_models import FAMILIES, picture_policy, picture_prompt, picture_requests, rows_with_media

PICTURES = [1, 1, 1, 2, 2, 3]


def engine(policy: PolicyModel, **settings: int) -> NativeEngine:
    return NativeEngine(policy, eos_token_ids=[3], **settings)


def generate(
    policy: PolicyModel, requests: list[GenerationRequest], **settings: int
) -> list[GenerationOutput]:
    outputs = {output.request_id: output for output in engine(policy, **settings).generate(requests)}
    assert all(output.error is None for output in outputs.values())
    return [outputs[request.request_id] for request in requests]


@torch.no_grad()
def trained_log_probs(
    policy: PolicyModel, requests: list[GenerationRequest], outputs: list[GenerationOutput]
) -> torch.Tensor:
    prompts = [request.prompt for request in requests]
    return policy(pack(rows_with_media(prompts, [output.token_ids for output in outputs]))).log_probs


def sampled_log_probs(outputs: list[GenerationOutput]) -> torch.Tensor:
    return torch.tensor([value for output in outputs for value in output.log_probs])


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_has_the_log_probs_of_training(family: str) -> None:
    policy = picture_policy(family)
    requests = picture_requests(policy, PICTURES)
    for tokens in (8192, 7):  # chunks that cut pictures
        outputs = generate(policy, requests, max_num_batched_tokens=tokens)
        trained = trained_log_probs(policy, requests, outputs)
        torch.testing.assert_close(sampled_log_probs(outputs), trained, atol=2e-5, rtol=0)
    mode = choose_exact_mode(engine(policy), policy, longest=64, temperature=1.0)
    assert isinstance(mode, ExactMode), mode
    policy.exact = mode
    outputs = generate(policy, requests)
    assert torch.equal(sampled_log_probs(outputs), trained_log_probs(policy, requests, outputs))


def test_a_group_shares_the_prefill_of_its_picture() -> None:
    policy = picture_policy()
    calls = []
    policy.vision.tower.register_forward_hook(lambda *_: calls.append(1))
    shared = engine(policy)
    requests = picture_requests(policy, [1] * 8)[:-1]
    list(shared.generate(requests))
    assert shared._stats.prefill_tokens == len(requests[0].prompt)
    assert len(calls) == 1


def test_pictures_under_equal_ids_share_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = picture_policy()
    requests = picture_requests(policy, [1, 2])[:-1]
    assert requests[0].prompt.token_ids == requests[1].prompt.token_ids
    outputs = generate(policy, requests)
    torch.testing.assert_close(
        sampled_log_probs(outputs), trained_log_probs(policy, requests, outputs), atol=2e-5, rtol=0
    )
    # without the key the second row would read the keys and values of the first one's picture
    monkeypatch.setattr(prompt_module, "_units", lambda token_ids, media: token_ids)
    same = [
        replace(request, prompt=Prompt(request.prompt.token_ids, request.prompt.media))
        for request in requests
    ]
    outputs = generate(policy, same)
    apart = (sampled_log_probs(outputs) - trained_log_probs(policy, same, outputs)).abs()
    assert apart.max() > 0.1, "a test that cannot fail"


def test_a_finished_row_is_a_prefix_of_the_next_turn() -> None:
    policy = picture_policy()
    first = picture_requests(policy, [1])[0]
    session = engine(policy).open()
    session.add([first])
    outputs = []
    while not outputs:
        outputs = session.step()
    more = Prompt((*first.prompt.token_ids, *outputs[0].token_ids, 50, 51), first.prompt.media)
    second = GenerationRequest(7, more, SamplingParams(max_tokens=4, ignore_eos=True), seed=3)
    session.add([second])
    later: list[GenerationOutput] = []
    while not later:
        later = session.step()
    session.close()
    torch.testing.assert_close(
        sampled_log_probs(later), trained_log_probs(policy, [second], later), atol=2e-5, rtol=0
    )


def greedy_for_placeholders(rows: int) -> tuple[PolicyModel, list[GenerationRequest]]:
    """A policy whose head likes placeholders, and many short requests."""
    policy = picture_policy()
    policy.hf.lm_head.weight = torch.nn.Parameter(policy.head.weight.detach().clone())
    with torch.no_grad():
        for number in placeholder_ids(policy.config):
            policy.head.weight[number] = 20 * torch.randn(policy.head.weight.shape[1])
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    prompts = [picture_prompt(policy, picture) for picture in range(4)]
    requests = [
        GenerationRequest(number, prompts[number * 4 // rows], sampling, seed=number)
        for number in range(rows)
    ]
    return policy, requests


def count_placeholders(policy: PolicyModel, outputs: list[GenerationOutput]) -> int:
    forbidden = set(placeholder_ids(policy.config))
    return sum(token in forbidden for output in outputs for token in output.token_ids)


def test_no_placeholder_among_four_thousand_responses() -> None:
    torch.manual_seed(0)
    policy, requests = greedy_for_placeholders(4_000)
    outputs = generate(policy, requests, max_num_seqs=1024)
    assert len(outputs) == 4_000
    assert count_placeholders(policy, outputs) == 0
    some = slice(0, 64)
    torch.testing.assert_close(
        sampled_log_probs(outputs[some]),
        trained_log_probs(policy, requests[some], outputs[some]),
        atol=2e-5,
        rtol=0,
    )
    # the same without the guard: the model writes placeholders
    policy.transform = replace(policy.transform, forbidden=())
    assert count_placeholders(policy, generate(policy, requests[:200])) > 50
