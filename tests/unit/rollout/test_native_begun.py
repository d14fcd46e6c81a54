"""A request that carries a part of its response goes on as if it had never been interrupted."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import test_native_session
from rollout_models import VOCABULARY, prompts, requests_for, run, tiny_engine

from hybridflow.errors import RolloutError
from hybridflow.models.exact_mode import ExactMode
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, PartialResponse, SamplingParams
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.rollout.native.scheduler import Scheduler

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
PARAMS = [
    SamplingParams(24, ignore_eos=True),
    SamplingParams(24, temperature=0.6, min_tokens=9),
    SamplingParams(20, temperature=1.4, top_k=9, top_p=0.9, min_p=0.02),
    SamplingParams(24, repetition_penalty=1.6, ignore_eos=True),
    SamplingParams(22, greedy=True, repetition_penalty=3.0, ignore_eos=True),
    SamplingParams(24, logit_bias=((5, 1.5), (9, -2.0)), top_log_probs=3, ignore_eos=True),
    SamplingParams(24, stop=("de", "fg", "yz", "Ab"), ignore_eos=True),
    SamplingParams(24, stop_token_ids=tuple(range(20, 26)), min_tokens=6),
]


def exact_engine(*, prefixes: bool) -> NativeEngine:
    engine = tiny_engine(
        enable_prefix_caching=prefixes,
        max_num_batched_tokens=24,  # prompts come in chunks
        decode=lambda ids: "".join(ALPHABET[token] for token in ids),
    )
    engine.policy.exact = ExactMode.choices(engine.policy.hf.base_model, 80)[0]
    return engine


def random_requests(draw: random.Random) -> list[GenerationRequest]:
    """Prompts of which some are equal and some begin alike, each with its own parameters."""
    trunk = tuple(draw.randrange(3, VOCABULARY) for _ in range(40))
    made = []
    for number in range(len(PARAMS) + 2):
        prompt = trunk[: draw.choice([2, 18, 18, 24])]
        if draw.random() < 0.6:
            prompt += tuple(draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(1, 6)))
        sampling = PARAMS[number % len(PARAMS)]
        made.append(GenerationRequest(number, Prompt(prompt), sampling, seed=draw.randrange(1 << 40)))
    return made


def cut_and_continued(
    engine: NativeEngine, requests: list[GenerationRequest], draw: random.Random
) -> tuple[dict[int, GenerationOutput], int]:
    """Outputs of requests aborted at random and continued elsewhere, and the cuts after a first token."""
    outputs: dict[int, GenerationOutput] = {}
    cuts = 0
    waiting = list(requests)
    while waiting:
        session = engine.open()
        draw.shuffle(waiting)
        by_id = {request.request_id: request for request in waiting}
        assert session.add(waiting) == []
        waiting = []
        ends_after = draw.randrange(8, 40)
        while not session.idle:
            ended = session.step()
            some = [number for number in by_id if draw.random() < 0.02 or ends_after == 0]
            ends_after -= 1
            for output in [*ended, *session.abort(some)]:
                if output.finish_reason != "abort":
                    outputs[output.request_id] = output
                    continue
                cuts += len(output.token_ids) > len(by_id[output.request_id].partial_response)
                waiting.append(by_id[output.request_id].continued(output))
        session.close()
    return outputs, cuts


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("prefixes", [True, False], ids=["prefix_cache", "no_prefix_cache"])
def test_cut_preempted_and_continued_it_has_the_bits_of_an_undisturbed_request(
    seed: int, prefixes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    requests = random_requests(draw)
    wanted = run(exact_engine(prefixes=prefixes), requests)
    preempted: list[int] = []
    put_back = Scheduler.put_back

    def counted(self: Scheduler, request: GenerationRequest) -> None:
        preempted.append(len(request.partial_response))
        put_back(self, request)

    monkeypatch.setattr(Scheduler, "put_back", counted)
    engine = exact_engine(prefixes=prefixes)
    test_native_session.limit_memory(engine, 256, monkeypatch)
    monkeypatch.setattr("hybridflow.models.cache.kv_cache.AHEAD", 2)  # rows enter though they may not stay
    outputs, cuts = cut_and_continued(engine, requests, draw)
    assert outputs == wanted  # tokens, log-probs, versions, reasons and most probable tokens, all equal
    assert cuts > 5 and preempted and min(preempted) > 0
    assert {output.finish_reason for output in outputs.values()} == {"stop", "length"}


def test_what_was_begun_keeps_its_versions_and_the_rest_has_the_new_one() -> None:
    engine = tiny_engine()
    request = requests_for(prompts(1), max_tokens=9, ignore_eos=True)[0]
    session = engine.open()
    session.add([request])
    for _ in range(3):
        session.step()
    (cut,) = session.abort([0])
    assert cut.finish_reason == "abort" and len(cut.token_ids) == 4
    engine.set_version(3)
    generated = engine.stats.generated_tokens
    session.add([request.continued(cut)])
    (so_far,) = session.so_far({0: 1})
    assert (so_far.start, so_far.token_ids) == (1, cut.token_ids[1:])  # before it has entered, too
    (again,) = session.abort([0])
    assert again == cut
    session.add([request.continued(again)])
    while not session.idle:
        outputs = session.step()
    assert outputs[0].token_ids[:4] == cut.token_ids and outputs[0].log_probs[:4] == cut.log_probs
    assert outputs[0].policy_versions == [0] * 4 + [3] * 5
    assert engine.stats.generated_tokens - generated == 5  # what was begun was generated before
    session.close()


def test_a_part_that_cannot_be_continued_is_an_error_of_that_request() -> None:
    engine = tiny_engine()
    request = requests_for(prompts(1), max_tokens=3, ignore_eos=True)[0]
    whole = run(engine, [request])[0]
    bad = {
        "max_tokens": request.continued(whole),
        "partial_response": replace(request, partial_response=PartialResponse((VOCABULARY,), (-1.0,), (0,))),
        "top_log_probs": replace(
            request,
            sampling=SamplingParams(9, top_log_probs=2),
            partial_response=PartialResponse((5,), (-1.0,), (0,)),
        ),
    }
    for said, one in bad.items():
        output = run(engine, [one])[0]
        assert output.refused and said in str(output.error), output
    with pytest.raises(RolloutError, match="2 tokens, 1 log-probs"):
        PartialResponse((5, 6), (-1.0,), (0, 0))
