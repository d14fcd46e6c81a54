"""Which tokens are chosen, and what is kept of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from subjects import Subject, prompts, requests_for


def test_greedy_tokens_are_those_of_generate(
    subject: Subject, record_property: Callable[[str, object], None]
) -> None:
    subject.needs("greedy_parity")
    given = prompts(64)
    outputs = subject.run(requests_for(given, temperature=0.0))
    wanted = subject.greedy(given, 16)
    assert [outputs[place].token_ids for place in range(64)] == wanted
    assert len({token for tokens in wanted for token in tokens}) > 30  # no model that says one thing
    apart = []
    for place, prompt in enumerate(given):
        logits = subject.logits(prompt, wanted[place]).log_softmax(-1)
        right = logits.gather(-1, torch.tensor(wanted[place])[:, None])[:, 0]
        apart.append((torch.tensor(outputs[place].log_probs) - right).abs().max())
    assert float(torch.stack(apart).max()) <= 1e-4
    record_property("greedy_equal", 64)
    record_property("greedy_log_probs_apart", float(torch.stack(apart).max()))


@pytest.mark.parametrize(
    "params", [{"temperature": 0.7}, {"temperature": 1.3, "top_k": 5, "top_p": 0.9}], ids=["plain", "limited"]
)
def test_log_probs_are_those_of_a_forward_pass_at_the_temperature(
    subject: Subject, params: dict[str, float], record_property: Callable[[str, object], None]
) -> None:
    subject.needs("log_probs")
    if "top_k" in params and "log_probs_limited" in subject.lacks:
        pytest.skip(f"{subject.name}: {subject.lacks['log_probs_limited']}")
    given = prompts(12, seed=1)
    outputs = subject.run(requests_for(given, **params))
    apart = []
    for place, prompt in enumerate(given):
        tokens = outputs[place].token_ids
        scaled = (subject.logits(prompt, tokens) / params["temperature"]).log_softmax(-1)
        right = scaled.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        apart.append((torch.tensor(outputs[place].log_probs) - right).abs().max())
    assert float(torch.stack(apart).max()) <= 1e-4
    record_property("sampled_log_probs_apart", float(torch.stack(apart).max()))


def test_groups_are_whole_and_in_order(subject: Subject) -> None:
    subject.needs("groups")
    given = prompts(5, seed=2)
    requests = requests_for(given, n=4)
    outputs = subject.run(requests)
    for place, prompt in enumerate(given):
        group = [outputs[place * 4 + copy] for copy in range(4)]
        assert len({tuple(output.token_ids) for output in group}) > 1
        for output in group:  # it continues this prompt and no other
            scaled = subject.logits(prompt, output.token_ids).log_softmax(-1)
            right = scaled.gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(output.log_probs), right, atol=1e-4, rtol=0)


def test_same_seeds_same_tokens_in_any_company(subject: Subject) -> None:
    subject.needs("seeds")
    requests = requests_for(prompts(10, seed=3), n=2, max_tokens=10)
    together = subject.run(requests)
    alone = {request.request_id: subject.run([request])[request.request_id] for request in requests[:4]}
    turned = subject.run(requests[::-1])
    renamed = subject.run([replace(request, request_id=request.request_id + 100) for request in requests[5:]])
    for request in requests:
        tokens = together[request.request_id].token_ids
        assert turned[request.request_id].token_ids == tokens
        assert request.request_id not in alone or alone[request.request_id].token_ids == tokens
        assert (
            request.request_id + 100 not in renamed or renamed[request.request_id + 100].token_ids == tokens
        )
    others = subject.run([replace(request, seed=request.seed + 1) for request in requests])
    assert sum(others[number].token_ids != together[number].token_ids for number in together) > 15


def test_requests_join_while_others_run(subject: Subject) -> None:
    requests = requests_for(prompts(8, seed=8), greedy=True, max_tokens=10)
    together = subject.run(requests)
    with subject.replica() as replica:
        answers = []
        for place, request in enumerate(requests):
            answers.append(replica.submit(request))
            if place % 3 == 2:
                answers[place - 2].result()
        for answer in answers:
            output = answer.result()
            assert output.token_ids == together[output.request_id].token_ids


@pytest.mark.parametrize("feature, value", [("top_k", 3), ("top_p", 0.5), ("min_p", 0.3)])
def test_only_allowed_tokens_are_drawn(subject: Subject, feature: str, value: float) -> None:
    subject.needs(feature)
    given = prompts(8, seed=4)
    outputs = subject.run(requests_for(given, **{feature: value}))
    beyond_best = 0
    for place, prompt in enumerate(given):
        tokens = torch.tensor(outputs[place].token_ids)
        probs = subject.logits(prompt, tokens.tolist()).softmax(-1)
        own = probs.gather(-1, tokens[:, None])[:, 0]
        above = (probs > own[:, None] * 1.001).float()
        allowed = {
            "top_k": above.sum(-1) < 3,
            "top_p": (above * probs).sum(-1) < 0.5,
            "min_p": own * 1.001 >= 0.3 * probs.amax(-1),
        }
        assert bool(allowed[feature].all())
        beyond_best += int((above.sum(-1) > 0).sum())
    assert beyond_best > 5  # it is a draw, not the most probable token


def test_repetition_penalty(subject: Subject) -> None:
    subject.needs("repetition_penalty")
    given = prompts(6, seed=5)
    outputs = subject.run(requests_for(given, greedy=True, repetition_penalty=1.5, ignore_eos=True))
    for place, prompt in enumerate(given):
        tokens = outputs[place].token_ids
        logits = subject.logits(prompt, tokens)
        for step, token in enumerate(tokens):
            seen = torch.tensor(sorted({*prompt, *tokens[:step]}))
            row = logits[step].clone()
            row[seen] = torch.where(row[seen] > 0, row[seen] / 1.5, row[seen] * 1.5)
            assert token == int(row.argmax())
    plain = subject.run(requests_for(given, greedy=True, ignore_eos=True))
    assert any(plain[place].token_ids != outputs[place].token_ids for place in range(6))


def test_logit_bias(subject: Subject) -> None:
    subject.needs("logit_bias")
    given = prompts(4, seed=6)
    pushed = subject.run(requests_for(given, max_tokens=4, ignore_eos=True, logit_bias=((50, 60.0),)))
    assert all(output.token_ids == [50] * 4 for output in pushed.values())
    for place, prompt in enumerate(given):  # what is kept is the model's own log-prob
        right = subject.logits(prompt, [50] * 4).log_softmax(-1)[:, 50]
        torch.testing.assert_close(torch.tensor(pushed[place].log_probs), right, atol=1e-4, rtol=0)
    taken = [output.token_ids[0] for output in subject.run(requests_for(given, greedy=True)).values()]
    barred = subject.run(
        requests_for(given, greedy=True, logit_bias=tuple((token, -60.0) for token in sorted(set(taken))))
    )
    assert all(output.token_ids[0] not in taken for output in barred.values())


def test_top_log_probs(subject: Subject) -> None:
    subject.needs("top_log_probs")
    given = prompts(4, seed=7)
    outputs = subject.run(requests_for(given, max_tokens=6, temperature=0.8, top_log_probs=3))
    for place, prompt in enumerate(given):
        tokens, top = outputs[place].token_ids, outputs[place].top_log_probs
        assert top is not None and [len(entry) for entry in top] == [3] * len(tokens)
        right = (subject.logits(prompt, tokens) / 0.8).log_softmax(-1).topk(3)
        assert [[token for token, _ in entry] for entry in top] == right.indices.tolist()
        torch.testing.assert_close(
            torch.tensor([[value for _, value in entry] for entry in top]), right.values, atol=1e-4, rtol=0
        )
    assert subject.run(requests_for(given[:1]))[0].top_log_probs is None
