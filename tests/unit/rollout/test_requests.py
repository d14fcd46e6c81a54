"""The part of a request that is left, for engines that know no `partial_response`."""

from __future__ import annotations

from dataclasses import replace

from hybridflow.protocol.prompt import Prompt
from hybridflow.protocol.randomness import derive_seed
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, PartialResponse, SamplingParams
from hybridflow.rollout.session_engine import aborted, rest_of, rest_problem, whole_of

SAMPLING = SamplingParams(10, min_tokens=4, top_log_probs=1)
REQUEST = GenerationRequest(3, Prompt((5, 6)), SAMPLING, seed=11)
BEGUN = replace(
    REQUEST, partial_response=PartialResponse((7, 8), (-0.5, -0.25), (1, 1), ([(7, -0.5)], [(8, -0.25)]))
)


def test_what_was_begun_is_prompt_for_such_an_engine_and_counts_against_the_limits() -> None:
    rest = rest_of(BEGUN)
    assert rest.prompt == Prompt((5, 6, 7, 8)) and not rest.partial_response
    assert rest.sampling == replace(SAMPLING, max_tokens=8, min_tokens=2)
    # else its draws would be those of the first two tokens
    assert rest.seed == derive_seed(11, "begun", 2)
    assert rest_of(rest_of(BEGUN)) == rest and rest_of(REQUEST) is REQUEST


def test_the_output_has_what_was_begun_and_the_rest() -> None:
    rest = GenerationOutput(3, [9], [-1.0], "length", [2], top_log_probs=[[(4, -0.1)]])
    whole = whole_of(BEGUN, rest)
    assert (whole.token_ids, whole.log_probs) == ([7, 8, 9], [-0.5, -0.25, -1.0])
    assert whole.policy_versions == [1, 1, 2] and whole.finish_reason == "length"
    assert whole.top_log_probs == [[(7, -0.5)], [(8, -0.25)], [(4, -0.1)]]
    assert BEGUN.continued(whole).partial_response.token_ids == (7, 8, 9)
    assert aborted(BEGUN).token_ids == [7, 8] and aborted(REQUEST).token_ids == []


def test_stop_texts_that_may_begin_in_what_was_begun_are_refused_there() -> None:
    with_texts = replace(SAMPLING, stop=("ab",))
    assert rest_problem(BEGUN) is None and rest_problem(replace(REQUEST, sampling=with_texts)) is None
    assert "stop texts" in str(rest_problem(replace(BEGUN, sampling=with_texts)))
