"""What is wrong with one request is told of that request; an engine that dies is named."""

from __future__ import annotations

import pytest
from subjects import POSITIONS, Subject, prompts, requests_for

from hybridflow.errors import RolloutError
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams


def test_a_bad_request_is_an_error_of_its_own(subject: Subject) -> None:
    subject.needs("bad_requests")
    good = SamplingParams(6, greedy=True)
    prompt = prompts(1, seed=30)[0]
    requests = [
        GenerationRequest(0, Prompt(prompt), good, 0),
        GenerationRequest(1, Prompt(()), good, 0),
        GenerationRequest(2, Prompt((5,) * POSITIONS), good, 0),
        GenerationRequest(3, Prompt((5, subject.vocabulary)), good, 0),
        GenerationRequest(
            4, Prompt(prompt), SamplingParams(6, greedy=True, stop_token_ids=(subject.vocabulary + 7,)), 0
        ),
        GenerationRequest(5, Prompt(prompt), good, 0),
    ]
    outputs = subject.run(requests)
    assert outputs[0].token_ids == outputs[5].token_ids != []
    for number, said in {
        1: "empty",
        2: str(POSITIONS),
        3: str(subject.vocabulary),
        4: str(subject.vocabulary + 7),
    }.items():
        output = outputs[number]
        assert output.finish_reason == "error" and output.token_ids == []
        assert f"request {number}" in str(output.error) and said in str(output.error), output.error
    assert subject.run([]) == {}
    assert subject.run(requests[1:2])[1].finish_reason == "error"


def test_two_requests_may_not_share_an_id(subject: Subject) -> None:
    request = requests_for(prompts(1))[0]
    with pytest.raises(RolloutError, match="request_id"):
        list(subject.engine.generate([request, request]))
    with subject.replica() as replica, pytest.raises(RolloutError, match="request ids must be unique"):
        replica.submit_many([request, request])


def test_an_engine_that_dies_is_named_and_finished_rows_are_kept(subject: Subject) -> None:
    subject.needs("dies")
    if subject.failing is None:
        pytest.skip(f"{subject.name}: no way to make it fail from here")
    lengths = (2, 100, 3, 100)
    requests = [
        GenerationRequest(
            place, Prompt(prompt), SamplingParams(lengths[place], greedy=True, ignore_eos=True), 0
        )
        for place, prompt in enumerate(prompts(4, seed=31))
    ]
    outputs: dict[int, GenerationOutput] = {}
    raised = ""
    with subject.failing(), subject.replica() as replica:
        for number, answer in enumerate(replica.submit_many(requests)):
            try:
                outputs[number] = answer.result()
            except RolloutError as error:
                raised = str(error)
    assert [outputs[number].finish_reason for number in (0, 2)] == ["length", "length"]
    for number in (1, 3):
        told = str(outputs[number].error) if number in outputs else raised
        assert subject.name in told and ("planted" in told or subject.name not in ("native", "hf")), told
