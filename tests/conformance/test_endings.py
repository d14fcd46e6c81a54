"""Why a response ends."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import replace

import pytest
from subjects import END, Outputs, Subject, prompts, requests_for

from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationRequest, SamplingParams

TRIES = 10


def test_stop_token_and_length(subject: Subject) -> None:
    subject.needs("stop_token_ids")
    given = prompts(6, seed=10)
    whole = subject.run(requests_for(given, greedy=True, ignore_eos=True, max_tokens=12))
    for output in whole.values():
        assert (output.finish_reason, len(output.token_ids), output.stop_reason, output.error) == (
            "length",
            12,
            None,
            None,
        )
    requests = []
    for place, prompt in enumerate(given):
        stop = whole[place].token_ids[5]
        requests.append(
            GenerationRequest(
                place,
                Prompt(prompt),
                SamplingParams(12, greedy=True, ignore_eos=True, stop_token_ids=(99, stop)),
                0,
            )
        )
    for place, output in subject.run(requests).items():
        tokens = whole[place].token_ids
        ends = min(tokens.index(token) if token in tokens else 12 for token in (99, tokens[5]))
        assert (output.finish_reason, output.token_ids) == ("stop", tokens[: ends + 1])
        assert output.stop_reason == tokens[ends]


def test_the_models_end_token_ends_and_is_kept(subject: Subject) -> None:
    subject.needs("stop_token_ids")
    requests = requests_for(prompts(3, seed=11), max_tokens=8, logit_bias=((END, 60.0),))
    subject.needs("logit_bias")
    for output in subject.run(requests).values():
        assert (output.finish_reason, output.token_ids, output.stop_reason) == ("stop", [END], END)


def test_stop_text(subject: Subject) -> None:
    subject.needs("stop")
    given = prompts(6, seed=12)
    whole = subject.run(requests_for(given, greedy=True, ignore_eos=True, max_tokens=12))
    requests, wanted = [], {}
    for place, prompt in enumerate(given):
        tokens = whole[place].token_ids
        text = subject.decode(tokens[:8])[-2:]  # ends with the eighth token, perhaps begins in an earlier one
        wanted[place] = next(number for number in range(1, 13) if text in subject.decode(tokens[:number]))
        requests.append(
            GenerationRequest(
                place,
                Prompt(prompt),
                SamplingParams(12, greedy=True, ignore_eos=True, stop=("\x00", text)),
                0,
            )
        )
    for place, output in subject.run(requests).items():
        assert output.finish_reason == "stop" and output.stop_reason == requests[place].sampling.stop[1]
        # the token that completes it is the last
        assert output.token_ids == whole[place].token_ids[: wanted[place]]


def test_min_tokens_and_ignore_eos(subject: Subject) -> None:
    subject.needs("min_tokens")
    subject.needs("ignore_eos")
    given = prompts(3, seed=13)
    for output in subject.run(
        requests_for(given, max_tokens=9, logit_bias=((END, 60.0),), ignore_eos=True)
    ).values():
        assert (output.finish_reason, output.token_ids) == ("length", [END] * 9)
    for output in subject.run(
        requests_for(given, max_tokens=9, min_tokens=4, logit_bias=((END, 60.0),))
    ).values():
        assert output.finish_reason == "stop" and len(output.token_ids) == 5
        assert output.token_ids.index(END) == 4  # the first four may not end it


def test_a_response_that_was_cut_goes_on(subject: Subject) -> None:
    given = prompts(6, seed=12)
    requests = requests_for(given, greedy=True, ignore_eos=True, max_tokens=12, repetition_penalty=1.3)
    whole = subject.run(requests)
    cut = []
    for place, request in enumerate(requests):
        part = whole[place]
        size = 2 * place
        begun = replace(
            part,
            token_ids=part.token_ids[:size],
            log_probs=part.log_probs[:size],
            policy_versions=[-7] * size,
        )
        cut.append(request.continued(begun))
    for place, output in subject.run(cut).items():
        wanted = whole[place]
        assert output.token_ids == wanted.token_ids and output.finish_reason == wanted.finish_reason
        assert output.log_probs == pytest.approx(wanted.log_probs, abs=1e-4)
        size = 2 * place
        assert output.policy_versions == [-7] * size + wanted.policy_versions[size:]


def test_abort(subject: Subject) -> None:
    subject.needs("abort")
    aborted, rest = abort(subject, long_and_short(), [3, 4, 99], least=0)
    assert set(aborted) == {3, 4} and set(rest) == {0, 1, 2}
    assert {output.finish_reason for output in aborted.values()} == {"abort"}
    assert {output.finish_reason for output in rest.values()} == {"length"}
    assert [len(rest[number].token_ids) for number in (0, 1, 2)] == [2, 120, 120]
    assert len(subject.run(requests_for(prompts(3)))) == 3  # and it goes on


def test_abort_gives_what_there_is(subject: Subject) -> None:
    subject.needs("abort_partials")
    requests = long_and_short(40)  # a server has begun with the others too by then
    whole = subject.run(requests)
    aborted, _ = abort(subject, requests, [3, 4], least=1)
    for number, output in aborted.items():
        assert 0 < len(output.token_ids) < 120
        assert output.token_ids == whole[number].token_ids[: len(output.token_ids)]
        assert len(output.log_probs) == len(output.token_ids) == len(output.policy_versions)


def long_and_short(first: int = 2) -> list[GenerationRequest]:
    """Five requests, of which the first is done before the others."""
    lengths = (first, 120, 120, 120, 120)
    return [
        GenerationRequest(
            place, Prompt(prompt), SamplingParams(lengths[place], greedy=True, ignore_eos=True), seed=place
        )
        for place, prompt in enumerate(prompts(5, seed=14))
    ]


def abort(
    subject: Subject, requests: list[GenerationRequest], ids: list[int], least: int
) -> tuple[Outputs, Outputs]:
    """Abort while the others are generated: the outputs of those, and of the others.

    On a busy machine an abort may come before a request has `least` tokens, or after its last one: then all
    is done again.
    """
    for _ in range(TRIES):
        with subject.replica() as replica:
            answers = replica.submit_many(requests)
            wait(answers, return_when=FIRST_COMPLETED)
            replica.abort(ids)
            outputs = [answer.result() for answer in answers]
        aborted = {output.request_id: output for output in outputs if output.request_id in ids}
        if all(least <= len(output.token_ids) < 120 for output in aborted.values()):
            break
    return aborted, {output.request_id: output for output in outputs if output.request_id not in ids}
